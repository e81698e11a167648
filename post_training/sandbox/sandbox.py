"""Runs untrusted programs under bubblewrap.

Every run has its own user, pid, network, ipc, uts, cgroup and mount namespaces, no network, an
empty environment but for a handful of harmless variables, and a read-only file system but for a
bounded work directory. When this process is root, bubblewrap itself is started as an otherwise
unused host user, so that a program that broke out would still be nobody. Programs never run
unprotected: without bubblewrap or namespaces, opening a Sandbox raises SandboxUnavailable.
"""

import contextlib
import dataclasses
import errno
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Self

from wootz.post_training.sandbox import process, view, workspace
from wootz.post_training.sandbox.cgroups import Cgroup, CgroupParents, cgroup_parents, create_cgroup
from wootz.post_training.sandbox.limits import (
  SandboxLimits,
  nproc_is_per_sandbox,
  prlimit_command,
)
from wootz.post_training.sandbox.result import (
  Outcome,
  SandboxResult,
  SandboxUnavailable,
  bounded_text,
)
from wootz.post_training.sandbox.tools import NAMESPACE_REMEDY, bwrap_version, find_bwrap
from wootz.post_training.sandbox.usage import TreeUsage, tree_usage

__all__ = ["Outcome", "Sandbox", "SandboxLimits", "SandboxResult", "SandboxUnavailable"]

_STOPPED = {
  "wall": (Outcome.TIMED_OUT, "stopped after its wall time of {timeout:g} s"),
  "cpu": (Outcome.CPU_LIMIT, "used more than {limits.cpu_seconds:g} s of processor time"),
  "memory": (Outcome.MEMORY_LIMIT, "used more than {limits.memory_bytes} bytes of memory"),
  "output": (
    Outcome.OUTPUT_LIMIT,
    "wrote more than {limits.output_bytes} bytes of output or {limits.channel_bytes} of channel",
  ),
}
_SIGNAL_OUTCOMES = {24: Outcome.CPU_LIMIT, 25: Outcome.DISK_LIMIT}  # SIGXCPU, SIGXFSZ


class Sandbox:
  """A work directory and the right to run programs in it, isolated from everything else.

  Use as a context manager. Runs of one Sandbox share its work directory and go one after another,
  from whichever threads; for runs at the same time, open several Sandboxes.
  """

  def __init__(
    self,
    image: str | os.PathLike | None = None,
    timeout: float = 60.0,
    limits: SandboxLimits | None = None,
    *,
    use_cgroups: bool = True,
  ):
    """Checks the arguments; nothing is started before the sandbox is entered.

    Args:
      image: directory with a root file system, or None for the host's own /usr.
      timeout: default wall seconds of a run.
      limits: bounds of each run.
      use_cgroups: False falls back on rlimits and sampling, as on machines without cgroups.

    Raises:
      ValueError: a bad image or timeout.
    """
    self._timeout = _positive("timeout", timeout)
    self._limits = limits if limits is not None else SandboxLimits()
    self._view = view.choose_view(image)
    self._use_cgroups = use_cgroups
    self._lock = threading.Lock()
    self._workspace: workspace.Workspace | None = None
    self._finalizer: weakref.finalize | None = None

  def __enter__(self) -> Self:
    self.open()
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def open(self) -> None:
    """Makes the work directory; tries isolation once per process and image.

    Raises:
      SandboxUnavailable: bubblewrap or what it needs of the kernel is missing.
    """
    if self._workspace is not None:
      return
    find_bwrap()
    limits = self._limits
    space = workspace.open_workspace(
      limits.workdir_bytes, limits.workdir_entries, self._view.binds()
    )
    self._finalizer = weakref.finalize(self, space.close)
    view.prepare_view(self._view, space)
    self._workspace = space
    try:
      _try_isolation(self)
    except SandboxUnavailable:
      self.close()
      raise

  def close(self) -> None:
    """Frees the work directory. Safe to call twice."""
    with self._lock:
      if self._finalizer is not None:
        self._finalizer()
      self._workspace = None

  def run(
    self,
    files: Mapping[str, str | bytes] | None = None,
    cmd: str | Sequence[str] = "",
    stdin: bytes | str | None = None,
    channel: bool = False,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
  ) -> SandboxResult:
    """Writes `files`, runs `cmd` in /work, and returns when no process of it is left.

    Args:
      files: relative path to content, written before the run; earlier files stay.
      cmd: a line for /bin/sh, or the words of a command.
      stdin: input; a program need not read it. None is empty input.
      channel: give the program a pipe to the host; its descriptor number is in the environment
        variable WOOTZ_CHANNEL_FD and its bytes in the result.
      timeout: wall seconds, instead of the sandbox's own.
      env: more environment variables for the program.

    Raises:
      ValueError, TypeError: bad arguments, or a file name that meets a link in the work directory.
      RuntimeError: the sandbox is not open.
    """
    workspace.check_names(files or {})
    command = process.check_command(cmd)
    environment = _checked_environment(env)
    wall = self._timeout if timeout is None else _positive("timeout", timeout)
    data = stdin.encode() if isinstance(stdin, str) else stdin or b""
    with self._lock:
      if self._workspace is None:
        raise RuntimeError("the sandbox is not open: use `with Sandbox(...) as sandbox:`")
      try:
        workspace.write_files(self._workspace, files or {})
      except OSError as error:
        return _unwritten(error)
      job = _Job(self._workspace, self._view, self._limits, wall, self._use_cgroups)
      return job.run(command, data, channel, environment)

  def read_file(self, name: str, max_bytes: int) -> bytes:
    """Reads a regular file from the work directory; links, devices and FIFOs are refused.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no plain file, or larger than `max_bytes`.
    """
    with self._lock:
      if self._workspace is None:
        raise RuntimeError("the sandbox is not open: use `with Sandbox(...) as sandbox:`")
      return workspace.read_file(self._workspace, name, max_bytes)


@dataclasses.dataclass(frozen=True)
class _Job:
  """One run: its place, its bounds, and how they are enforced."""

  space: workspace.Workspace
  view: view.View
  limits: SandboxLimits
  timeout: float
  use_cgroups: bool

  def run(self, command: list[str], stdin: bytes, channel: bool,
          environment: Mapping[str, str]) -> SandboxResult:
    parents = cgroup_parents() if self.use_cgroups else None
    enforced = self._enforced_by(parents)
    bwrap = find_bwrap()
    disable = bwrap_version(bwrap) >= (0, 8)
    options = view.bwrap_options(self.view, self.space, disable_userns=disable)
    try:
      with _run_cgroup(parents, self.limits) as group:
        meter = _Meter(group, self.limits)
        ended = process.run_process(
          bwrap, self._prefix(group), options, command, environment,
          stdin=stdin, channel=channel, timeout=self.timeout,
          output_limit=self.limits.output_bytes, channel_limit=self.limits.channel_bytes,
          admit=group.admit if group is not None else None, over_limit=meter.over_limit,
        )
        return self._result(ended, meter, enforced)
    except (OSError, process.SandboxFailure) as error:
      self.space.kill_strays()
      return _infra_error(f"{type(error).__name__}: {error}", enforced)

  def _prefix(self, group: Cgroup | None) -> list[str]:
    memory = group is None or "memory" not in group.directories
    processes = nproc_is_per_sandbox(self.space.uid is not None)
    rlimits = prlimit_command(self.limits, memory=memory, processes=processes)
    return [*self.space.enter_command(), *rlimits]

  def _enforced_by(self, parents: CgroupParents | None) -> dict[str, str]:
    grouped = parents.directories() if parents is not None else {}
    name = f"cgroup v{parents.version}" if parents is not None else ""
    held = {"wall": "host", "output": "host", "workdir": "tmpfs", "file_size": "rlimit"}
    held["open_files"] = "rlimit"
    held["cpu"] = f"{name} + rlimit" if "cpuacct" in grouped else "rlimit + sampling"
    held["memory"] = name if "memory" in grouped else "rlimit + sampling"
    nproc = ["rlimit"] if nproc_is_per_sandbox(self.space.uid is not None) else []
    held["processes"] = " + ".join([name] * ("pids" in grouped) + nproc) or "none"
    return held

  def _result(self, ended: process.Ended, meter: "_Meter",
              enforced: dict[str, str]) -> SandboxResult:
    cpu_seconds, peak = meter.totals(ended)
    outcome, detail = _judge(ended, meter, cpu_seconds, self.limits, self.timeout)
    code = ended.exit_code
    limits = self.limits
    return SandboxResult(
      outcome=outcome,
      exit_code=code,
      signal=code - 128 if code is not None and 128 < code <= 192 else None,
      stdout=bounded_text(ended.stdout.data, limits.output_bytes, ended.stdout.overflowed),
      stderr=bounded_text(ended.stderr.data, limits.output_bytes, ended.stderr.overflowed),
      stdout_truncated=ended.stdout.overflowed,
      stderr_truncated=ended.stderr.overflowed,
      wall_seconds=ended.wall_seconds,
      cpu_seconds=cpu_seconds,
      peak_memory_bytes=peak,
      channel=bytes(ended.channel.data[: limits.channel_bytes]),
      limits_enforced_by=enforced,
      detail=detail,
    )


class _Meter:
  """What a run has used so far, from its cgroup where there is one, else from samples."""

  def __init__(self, group: Cgroup | None, limits: SandboxLimits):
    self.group = group
    self.limits = limits
    self.sampled = TreeUsage()

  def over_limit(self, first_pid: int) -> str | None:
    """Name of the limit that is broken now."""
    cpu = self.group.cpu_seconds() if self.group is not None else None
    memory_grouped = self.group is not None and "memory" in self.group.directories
    if cpu is None or not memory_grouped:
      now = tree_usage(first_pid)
      self.sampled = TreeUsage(
        max(self.sampled.cpu_seconds, now.cpu_seconds),
        max(self.sampled.memory_bytes, now.memory_bytes),
      )
    if (self.sampled.cpu_seconds if cpu is None else cpu) > self.limits.cpu_seconds:
      return "cpu"
    if self.out_of_memory():
      return "memory"
    return None

  def out_of_memory(self) -> bool:
    if self.group is not None and "memory" in self.group.directories:
      return self.group.out_of_memory()
    return self.sampled.memory_bytes > self.limits.memory_bytes

  def totals(self, ended: process.Ended) -> tuple[float, int]:
    """(cpu seconds, peak memory in bytes) of the whole run."""
    cpu = self.group.cpu_seconds() if self.group is not None else None
    peak = self.group.peak_memory_bytes() if self.group is not None else None
    if cpu is None:
      cpu = max(self.sampled.cpu_seconds, ended.cpu_seconds)
    if peak is None:
      peak = max(self.sampled.memory_bytes, ended.max_rss_bytes)
    return cpu, peak


def _judge(ended: process.Ended, meter: _Meter, cpu_seconds: float, limits: SandboxLimits,
           timeout: float) -> tuple[Outcome, str]:
  """(outcome, detail); memory first, since a tree that ran out of it ends in many ways.

  Raises:
    process.SandboxFailure: the command was never run.
  """
  stopped = "memory" if meter.out_of_memory() else ended.stopped
  if stopped is None and ended.failure is not None:
    raise process.SandboxFailure(f"bubblewrap could not run the command: {ended.failure}")
  if stopped is None and ended.exit_code == 137 and cpu_seconds > limits.cpu_seconds:
    stopped = "cpu"
  if stopped is not None:
    outcome, words = _STOPPED[stopped]
    return outcome, words.format(limits=limits, timeout=timeout)
  code = ended.exit_code
  if code == 0:
    return Outcome.OK, ""
  if code is not None and 128 < code <= 192:
    return _SIGNAL_OUTCOMES.get(code - 128, Outcome.KILLED), ""
  return Outcome.NONZERO_EXIT, ""


@contextlib.contextmanager
def _run_cgroup(parents: CgroupParents | None, limits: SandboxLimits):
  if parents is None:
    yield None
    return
  group = create_cgroup(parents, limits)
  try:
    yield group
  finally:
    group.destroy()


def _unwritten(error: OSError) -> SandboxResult:
  """A work directory without room or permission is the doing of the programs before."""
  if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM):
    return dataclasses.replace(
      _infra_error(f"earlier programs left no room for the run's files: {error}", {}),
      outcome=Outcome.DISK_LIMIT,
    )
  return _infra_error(f"files could not be written: {error}", {})


def _infra_error(detail: str, enforced: dict[str, str]) -> SandboxResult:
  return SandboxResult(
    outcome=Outcome.INFRA_ERROR, exit_code=None, signal=None, stdout="", stderr="",
    stdout_truncated=False, stderr_truncated=False, wall_seconds=0.0, cpu_seconds=0.0,
    peak_memory_bytes=0, channel=b"", limits_enforced_by=enforced, detail=detail,
  )


def _positive(name: str, value: float) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
    raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
  return float(value)


def _checked_environment(env: Mapping[str, str] | None) -> dict[str, str]:
  for name, value in (env or {}).items():
    if not (name.isidentifier() and name.isascii()) or "\0" in value:
      raise ValueError(f"environment variable {name!r} is no plain name, or its value has a NUL")
  return {**view.ENVIRONMENT, **(env or {})}


_isolation_tried: set[tuple] = set()


def _try_isolation(sandbox: Sandbox) -> None:
  """Runs an empty program once per process and view, so that a machine that forbids namespaces is
  told from one that loses a run now and then."""
  key = (sandbox._view, sandbox._use_cgroups)
  if key in _isolation_tried:
    return
  result = sandbox.run(cmd=["/bin/sh", "-c", ":"])
  if result.outcome is not Outcome.OK:
    raise SandboxUnavailable(
      f"an empty program could not be run in bubblewrap: {result.detail or result.stderr}. "
      + NAMESPACE_REMEDY
    )
  _isolation_tried.add(key)
