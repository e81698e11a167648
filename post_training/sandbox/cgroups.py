"""One control group per run, version 1 or 2, wherever this process may make one.

A group bounds memory and process count of a whole tree and counts its processor time. Groups carry
their maker's pid and start time in their name, so that those of a killed maker can be swept.
"""

import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import subprocess
import time

from wootz.post_training.sandbox.limits import OWN_PROCESSES, SandboxLimits

_PREFIX = "wootz-sandbox-"
_CONTROLLERS = ("memory", "pids", "cpuacct")
_counter = itertools.count()


@dataclasses.dataclass(frozen=True)
class CgroupParents:
  """Directories under which groups can be made, by controller; absent ones cannot be used."""

  version: int
  memory: pathlib.Path | None = None
  pids: pathlib.Path | None = None
  cpuacct: pathlib.Path | None = None

  def directories(self) -> dict[str, pathlib.Path]:
    return {name: path for name in _CONTROLLERS if (path := getattr(self, name)) is not None}


@dataclasses.dataclass(frozen=True)
class Cgroup:
  """One run's group: a directory per controller (the same one thrice in version 2)."""

  version: int
  directories: dict[str, pathlib.Path]

  def admit(self, pid: int) -> None:
    """Moves a process, which has no children yet, into the group.

    Raises:
      ProcessLookupError: it is no more.
    """
    for path in set(self.directories.values()):
      (path / "cgroup.procs").write_text(str(pid))

  def cpu_seconds(self) -> float | None:
    path = self.directories.get("cpuacct")
    if path is None:
      return None
    if self.version == 1:
      return int((path / "cpuacct.usage").read_text()) / 1e9
    return _keyed(path / "cpu.stat").get("usage_usec", 0) / 1e6

  def peak_memory_bytes(self) -> int | None:
    path = self.directories.get("memory")
    name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
    if path is None or not (path / name).exists():  # memory.peak: Linux 5.19
      return None
    return int((path / name).read_text())

  def out_of_memory(self) -> bool:
    """Whether the kernel has killed a process of the group for memory."""
    path = self.directories.get("memory")
    name = "memory.oom_control" if self.version == 1 else "memory.events"
    return path is not None and _keyed(path / name).get("oom_kill", 0) > 0

  def destroy(self, patience: float = 2.0) -> None:
    """Removes the group; its processes are dead, but may take a moment to leave.

    Raises:
      OSError: the group is still busy after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    for path in set(self.directories.values()):
      while not _rmdir(path):
        if time.monotonic() > deadline:
          raise OSError(errno.EBUSY, "control group still has processes", str(path))
        time.sleep(0.002)


def create_cgroup(parents: CgroupParents, limits: SandboxLimits) -> Cgroup:
  """Makes a group and sets its limits.

  Raises:
    OSError: a directory cannot be made or a limit cannot be written.
  """
  name = f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
  group = Cgroup(
    version=parents.version,
    directories={key: path / name for key, path in parents.directories().items()},
  )
  try:
    for path in set(group.directories.values()):
      path.mkdir()
    _write_limits(group, limits)
  except OSError:
    group.destroy()
    raise
  return group


@functools.cache
def cgroup_parents() -> CgroupParents | None:
  """Where groups can be made on this machine, tried once per process; None if nowhere."""
  try:
    mounts = pathlib.Path("/proc/self/mountinfo").read_text()
    membership = pathlib.Path("/proc/self/cgroup").read_text()
  except OSError:
    return None
  parents = find_parents(mounts, membership)
  if parents is not None:
    for path in set(parents.directories().values()):
      sweep(path)
  return parents


def find_parents(mountinfo: str, membership: str) -> CgroupParents | None:
  """Reads /proc/self/mountinfo and /proc/self/cgroup; version 1 controllers go first, as a
  controller bound there is missing from version 2."""
  own = _own_paths(mountinfo, membership)
  first = {name: own[name] for name in _CONTROLLERS if name in own and _usable(own[name], name)}
  if first:
    return CgroupParents(version=1, **first)
  for path in _version2_candidates(own):
    if _usable_version2(path):
      return CgroupParents(version=2, memory=path, pids=path, cpuacct=path)
  return None


def sweep(parent: pathlib.Path) -> int:
  """Removes the empty groups of makers that are no more; returns how many went."""
  removed = 0
  for path in parent.glob(f"{_PREFIX}*-*-*"):
    pid, start = path.name.removeprefix(_PREFIX).split("-")[:2]
    if pid.isdigit() and _start_time(int(pid)) != start:
      removed += _rmdir(path)
  return removed


def _write_limits(group: Cgroup, limits: SandboxLimits) -> None:
  processes = limits.processes + OWN_PROCESSES
  if "pids" in group.directories:
    (group.directories["pids"] / "pids.max").write_text(str(processes))
  memory = group.directories.get("memory")
  if memory is None:
    return
  if group.version == 2:
    (memory / "memory.max").write_text(str(limits.memory_bytes))
    _write_if_present(memory / "memory.swap.max", "0")
    _write_if_present(memory / "memory.oom.group", "1")
    return
  (memory / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))
  if not _write_if_present(memory / "memory.memsw.limit_in_bytes", str(limits.memory_bytes)):
    _write_if_present(memory / "memory.swappiness", "0")


def _own_paths(mountinfo: str, membership: str) -> dict[str, pathlib.Path]:
  """Controller ("" for version 2) to this process's directory in that hierarchy."""
  own = {}
  for line in membership.splitlines():
    _, controllers, path = line.split(":", 2)
    own.update(dict.fromkeys(controllers.split(","), path))
  found = {}
  for line in mountinfo.splitlines():
    head, _, tail = line.partition(" - ")
    root, mount_point = head.split()[3:5]
    kind, _, options = tail.split(maxsplit=2)
    names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
    for name in names:
      if name in own:
        # A container sees a subtree as the mount's root; `own` may still name the full path.
        inner = own[name].removeprefix(root) if root != "/" else own[name]
        found[name] = pathlib.Path(mount_point) / inner.lstrip("/")
  return found


def _version2_candidates(own: dict[str, pathlib.Path]) -> list[pathlib.Path]:
  """Own group first, then those above: a group that holds processes cannot have children with
  controllers, so a delegated parent is the usual place."""
  if "" not in own:
    return []
  above = [path for path in own[""].parents if (path / "cgroup.procs").exists()]
  return [own[""], *above]


def _usable(parent: pathlib.Path, controller: str) -> bool:
  probe = parent / f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-probe{next(_counter)}"
  wanted = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpuacct": "cpuacct.usage"}
  try:
    probe.mkdir()
  except OSError:
    return False
  try:
    return os.access(probe / wanted[controller], os.W_OK) and _can_enter(probe)
  finally:
    _rmdir_patiently(probe)


def _usable_version2(parent: pathlib.Path) -> bool:
  for name in ("memory", "pids", "cpu"):
    _write_if_present(parent / "cgroup.subtree_control", f"+{name}")
  probe = parent / f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-probe{next(_counter)}"
  try:
    probe.mkdir()
  except OSError:
    return False
  try:
    limits = all(os.access(probe / name, os.W_OK) for name in ("memory.max", "pids.max"))
    return limits and _can_enter(probe)
  finally:
    _rmdir_patiently(probe)


def _can_enter(group: pathlib.Path) -> bool:
  """Tries to move a process there, which needs more rights than making the directory."""
  script = 'echo 0 > "$1"'
  entered = subprocess.run(
    ["/bin/sh", "-c", script, "sh", str(group / "cgroup.procs")],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
  )
  return entered.returncode == 0


def _rmdir_patiently(path: pathlib.Path) -> None:
  for _ in range(100):
    if _rmdir(path):
      return
    time.sleep(0.002)


def _rmdir(path: pathlib.Path) -> bool:
  """True when it is gone; False when processes are still leaving it."""
  try:
    path.rmdir()
  except FileNotFoundError:
    return True
  except OSError as error:
    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
      raise
    return False
  return True


def _write_if_present(path: pathlib.Path, value: str) -> bool:
  try:
    with open(path, "r+") as file:  # never creates
      file.write(value)
  except OSError:
    return False
  return True


def _keyed(path: pathlib.Path) -> dict[str, int]:
  return {key: int(value) for key, value in (row.split() for row in path.open())}


def _start_time(pid: int) -> str | None:
  """Clock ticks after boot at which the process began; tells two users of one pid apart."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  return stat.rpartition(")")[2].split()[19]
