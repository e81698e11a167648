"""What a sandboxed run gives back."""

import dataclasses
import enum
from collections.abc import Mapping


class SandboxUnavailable(RuntimeError):
  """This machine cannot isolate programs; the message says what is missing and how to get it."""


class Outcome(enum.StrEnum):
  """How a run ended. Only INFRA_ERROR is nobody's doing; the others are the program's."""

  OK = "ok"  # exit status 0
  NONZERO_EXIT = "nonzero_exit"
  KILLED = "killed"  # by a signal that no limit explains
  TIMED_OUT = "timed_out"  # wall clock
  CPU_LIMIT = "cpu_limit"
  MEMORY_LIMIT = "memory_limit"
  OUTPUT_LIMIT = "output_limit"  # stdout, stderr or the channel
  DISK_LIMIT = "disk_limit"  # SIGXFSZ, or earlier programs left no room for this run's files
  INFRA_ERROR = "infra_error"  # the sandbox failed, the program is not to blame


@dataclasses.dataclass(frozen=True)
class SandboxResult:
  """One finished run. No process of it is alive any more.

  Attributes:
    outcome: how it ended.
    exit_code: exit status; None when the run was stopped before it had one. A program ended by
      signal n has 128 + n, as in a shell.
    signal: the number n of that signal, else None. A program that exits with a status above 128 by
      itself cannot be told from one that was killed.
    stdout: text; bytes that are not UTF-8 become U+FFFD; a cut ends in a visible mark.
    stderr: as stdout.
    stdout_truncated: True where stdout is cut at the output limit.
    stderr_truncated: True where stderr is cut at the output limit.
    wall_seconds: from the start of the command to its end, without the sandbox's own start.
    cpu_seconds: user and system time of the whole process tree.
    peak_memory_bytes: of the whole tree where a cgroup counts it, else of what was sampled.
    channel: bytes written to the channel, at most `SandboxLimits.channel_bytes`.
    limits_enforced_by: limit name to the mechanism that held it in this run.
    detail: for a stopped run and for INFRA_ERROR, the reason in words; else empty.
  """

  outcome: Outcome
  exit_code: int | None
  signal: int | None
  stdout: str
  stderr: str
  stdout_truncated: bool
  stderr_truncated: bool
  wall_seconds: float
  cpu_seconds: float
  peak_memory_bytes: int
  channel: bytes
  limits_enforced_by: Mapping[str, str]
  detail: str = ""

  @property
  def ok(self) -> bool:
    """True for exit status 0 within all limits."""
    return self.outcome is Outcome.OK


def bounded_text(data: bytes | bytearray, limit: int, truncated: bool) -> str:
  """Decodes at most `limit` bytes; marks what is invalid (U+FFFD) and where it was cut."""
  text = data[:limit].decode("utf-8", errors="replace")
  return f"{text}\n[cut: more than {limit} bytes]" if truncated else text
