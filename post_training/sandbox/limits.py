"""What a sandboxed program may use, and the part of it that rlimits can hold."""

import dataclasses
import os
import resource

from wootz.post_training.sandbox.tools import find_tool

_MIB = 2**20
OWN_PROCESSES = 1  # the shell that is the sandbox's first process
# RLIMIT_NPROC also counts what the same user runs outside: bubblewrap's monitor, and without root
# nsenter and the anchor with its parent.
_HELPERS = 1 if os.geteuid() == 0 else 4


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """Upper bounds for one run; sizes in bytes, times in seconds.

  Attributes:
    cpu_seconds: user and system time of the whole tree.
    memory_bytes: of the whole tree, including what it writes to its work directory (a tmpfs).
      Without a writable memory cgroup: address space per process, and sampled use of the tree.
    processes: processes and threads alive at once.
    file_bytes: size of any one file.
    open_files: descriptors per process.
    output_bytes: stdout and stderr, each. More ends the run.
    channel_bytes: the channel. More ends the run.
    workdir_bytes: everything a Sandbox's runs may keep in /work, /tmp and /dev/shm together.
    workdir_entries: files and directories there.
  """

  cpu_seconds: float = 60.0
  memory_bytes: int = 512 * _MIB
  processes: int = 64
  file_bytes: int = 64 * _MIB
  open_files: int = 256
  output_bytes: int = _MIB
  channel_bytes: int = _MIB
  workdir_bytes: int = 64 * _MIB
  workdir_entries: int = 10_000

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"SandboxLimits.{field.name} must be a positive number, got {value!r}")
      if field.name != "cpu_seconds" and not isinstance(value, int):
        raise ValueError(f"SandboxLimits.{field.name} must be an integer, got {value!r}")
    minima = {"memory_bytes": 8 * _MIB, "open_files": 16, "workdir_bytes": 64 * 1024}
    minima["workdir_entries"] = 64
    for name, least in minima.items():
      if getattr(self, name) < least:
        raise ValueError(
          f"SandboxLimits.{name} is {getattr(self, name)}: a shell needs at least {least}"
        )


def prlimit_command(limits: SandboxLimits, *, memory: bool, processes: bool) -> list[str]:
  """Command prefix that sets rlimits; never above our own hard limits, which would fail.

  A command, since setting another user's limits from outside takes a capability
  (CAP_SYS_RESOURCE) that root in a container often lacks.

  Args:
    limits: the bounds.
    memory: also bound each process's address space (for want of a cgroup: programs that reserve
      much more than they use would suffer from it needlessly).
    processes: also set RLIMIT_NPROC.
  """
  values = {
    "core": 0,
    "cpu": int(limits.cpu_seconds) + 1,  # whole seconds; the finer limit is watched from outside
    "fsize": limits.file_bytes,
    "nofile": limits.open_files,
  }
  if memory:
    values["as"] = limits.memory_bytes
  if processes:
    values["nproc"] = limits.processes + OWN_PROCESSES + _HELPERS
  command = [find_tool("prlimit")]
  for name, value in values.items():
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
    command.append(f"--{name}={capped}:{capped}")
  return command


def nproc_is_per_sandbox(drops_user: bool) -> bool:
  """Whether RLIMIT_NPROC counts one sandbox's processes only.

  It does when each sandbox has its own host user, and, since Linux 5.14, per user namespace.
  Else it would count everything else that the user runs, and fail honest programs.
  """
  major, minor = os.uname().release.split(".")[:2]
  return drops_user or (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
