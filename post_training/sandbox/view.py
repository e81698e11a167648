"""What a sandboxed program sees: bubblewrap's options for one file system view.

    /usr, /bin, /lib*   read-only, from the host or from the image
    /etc                a few harmless files (default image); the image's own otherwise
    /sandbox/bin    `python` and `python3`, last on PATH
    /opt/python         the host interpreter's prefix, only when the host's /usr has no python3
    /work, /tmp, /dev/shm  the Sandbox's tmpfs; nothing else can be written

Which Python: the image's own python3 in /usr/local/bin or /usr/bin. When the default image has none
there (a host whose only Python came from pyenv, conda or a standalone build), the prefix of the
interpreter that runs this code is bound at /opt/python. An image directory is taken as it is.
"""

import dataclasses
import os
import sys

from wootz.post_training.sandbox.workspace import Workspace, write_static

SHIMS = "/sandbox/bin"
SEARCH_PATH = f"/usr/local/bin:/usr/bin:/bin:{SHIMS}"
WORK_DIR = "/work"
ENVIRONMENT = {"PATH": SEARCH_PATH, "HOME": WORK_DIR, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
_UID = 1000
# Never taken from an image: provided afresh, or meaningless in a sandbox.
_PROVIDED = frozenset({"dev", "proc", "sys", "tmp", "work", "run", "sandbox"})
_ETC = {
  "passwd": "root:x:0:0::/:/bin/false\nsandbox:x:1000:1000::/work:/bin/sh\n",
  "group": "root:x:0:\nsandbox:x:1000:\n",
  "hosts": "127.0.0.1 localhost\n::1 localhost\n",
  "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_HOST_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")


@dataclasses.dataclass(frozen=True)
class View:
  """An image and the interpreter to add to it; `interpreter` is a path inside the sandbox."""

  image: str | None
  prefix: str | None
  interpreter: str | None

  def binds(self) -> dict[str, str]:
    """Host directories to keep in reach under the workspace, by name."""
    sources = {"image": self.image, "python": self.prefix}
    return {name: source for name, source in sources.items() if source is not None}


def choose_view(image: str | os.PathLike | None) -> View:
  """Decides what is shown.

  Raises:
    ValueError: `image` is not a directory with /bin/sh, or is the host's root.
  """
  if image is None:
    found = _find_python("/")
    if found is not None:
      return View(None, None, found)
    prefix = os.path.realpath(sys.base_prefix)
    return View(None, prefix, f"/opt/python/bin/python{sys.version_info[0]}")
  image = os.path.realpath(image)
  if image == "/" or not os.path.isdir(image):
    raise ValueError(f"image {image!r} must be a directory that holds a root file system, not /")
  if not _in_image(image, "/bin/sh"):
    raise ValueError(f"image {image!r} has no /bin/sh, which every run starts with")
  return View(image, None, _find_python(image))


def prepare_view(view: View, workspace: Workspace) -> None:
  """Writes the view's own small files into the workspace."""
  write_static(workspace, "etc", _ETC, {})
  target = view.interpreter
  links = {} if target is None else {"python": target, "python3": target}
  write_static(workspace, "bin", {}, links)


def bwrap_options(view: View, workspace: Workspace, *, disable_userns: bool) -> list[str]:
  """bubblewrap's options for namespaces and file system."""
  base = workspace.base
  options = ["--unshare-all", "--unshare-user", "--uid", str(_UID), "--gid", str(_UID)]
  options += ["--new-session", "--hostname", "sandbox"]
  if disable_userns:
    options.append("--disable-userns")
  options += _image_options(view.image, base) if view.image else _host_options(base)
  if view.prefix is not None:
    options += ["--ro-bind", f"{base}/python", "/opt/python"]
  options += ["--ro-bind", f"{base}/bin", SHIMS]
  options += ["--proc", "/proc", "--dev", "/dev"]
  writable = {"work": WORK_DIR, "tmp": "/tmp", "shm": "/dev/shm"}
  for name, target in writable.items():
    options += ["--bind", f"{base}/{name}", target]
  options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_DIR, "--clearenv"]
  return options


def _host_options(base: str) -> list[str]:
  options = ["--ro-bind", "/usr", "/usr"]
  for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
    options += _entry_options(f"/{name}", f"/{name}", f"/{name}")
  for name in _HOST_ETC:
    options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
  for name in _ETC:
    options += ["--ro-bind", f"{base}/etc/{name}", f"/etc/{name}"]
  return options


def _image_options(image: str, base: str) -> list[str]:
  """Each entry of the image's root by itself, so that mount points it lacks can be made."""
  options = []
  for name in sorted(set(os.listdir(image)) - _PROVIDED):
    options += _entry_options(f"{image}/{name}", f"{base}/image/{name}", f"/{name}")
  return options


def _entry_options(host: str, source: str, target: str) -> list[str]:
  if os.path.islink(host):
    return ["--symlink", os.readlink(host), target]
  return ["--ro-bind", source, target] if os.path.exists(host) else []


def _find_python(root: str) -> str | None:
  for path in ("/usr/local/bin/python3", "/usr/bin/python3"):
    if _in_image(root, path):
      return path
  return None


def _in_image(root: str, path: str) -> bool:
  """Whether the path leads to a file, with links read as the sandbox will read them."""
  for _ in range(40):
    current, parts = "", [part for part in path.split("/") if part]
    for index, part in enumerate(parts):
      current = f"{current}/{part}"
      real = root.rstrip("/") + current
      if os.path.islink(real):
        link = os.path.join(os.path.dirname(current), os.readlink(real))
        path = os.path.normpath("/".join([link, *parts[index + 1:]]))
        break
    else:
      return os.path.isfile(root.rstrip("/") + current)
  return False
