"""Programs of the host that the sandbox is made with."""

import functools
import os
import shutil
import subprocess

from wootz.post_training.sandbox.result import SandboxUnavailable

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACE_REMEDY = (
  "As an ordinary user this needs unprivileged user namespaces: sysctl "
  "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and on Ubuntu "
  "kernel.apparmor_restrict_unprivileged_userns=0; a container must be run with "
  "--security-opt seccomp=unconfined or as privileged."
)


@functools.cache
def find_tool(name: str) -> str:
  """Path of a program of util-linux.

  Raises:
    SandboxUnavailable: it is not installed.
  """
  path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}")
  if path is None:
    raise SandboxUnavailable(f"{name} not found: apt-get install util-linux mount")
  return path


def find_bwrap() -> str:
  """bubblewrap's path, from PATH.

  Raises:
    SandboxUnavailable: it is not installed.
  """
  path = shutil.which("bwrap")
  if path is None:
    raise SandboxUnavailable(
      "bubblewrap (bwrap) not found on PATH, and programs never run without it: "
      "apt-get install bubblewrap"
    )
  return os.path.realpath(path)


@functools.cache
def bwrap_version(path: str) -> tuple[int, ...]:
  """The version of the bubblewrap at `path`, such as (0, 8, 0)."""
  shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, env={})
  numbers = shown.stdout.split()[-1:] or ["0"]
  return tuple(int(part) for part in numbers[0].split(".") if part.isdigit())
