"""SIGTERM and SIGINT ask a run to save and leave; the run looks at safe places."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again, with --resume


class Preempted(Exception):
  """The run was asked to stop; state is saved where this is caught."""


class StopSignal:
  """Remembers the first SIGTERM or SIGINT. A second one while the first is honoured changes nothing."""

  def __init__(self) -> None:
    self.received: str | None = None
    self._previous: dict[int, object] = {}

  def __enter__(self) -> Self:
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)  # type: ignore[arg-type]

  def _note(self, number: int, frame: FrameType | None) -> None:
    self.received = self.received or signal.Signals(number).name

  def check(self) -> None:
    """Raises Preempted once a signal has come."""
    if self.received:
      raise Preempted(self.received)
