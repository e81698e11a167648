"""Sides of a benchmark: processes that stay, and do one step of the work each time they are told to.

A side reads JSON lines from its standard input and answers on its standard output:

    {work}          ->  {"about": {versions, settings...}, ...}   once all is loaded
    {"do": "step"}  ->  {"step_seconds": ..., ...}                after one step
    {"do": "quit"}  ->  (it ends)

Between answers it waits on its input, so that several sides can take turns on one machine and each
has it to itself during its step. What else a side or its libraries print goes to the error stream.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

_ERROR_LINES = 30  # of a failed side's error stream, shown to the user
_QUIT_SECONDS = 30.0


class SideFailed(RuntimeError):
  """A side ended, or said something that is no answer."""


class Side:
  """The parent's hold on one side. Use it as a context manager: no process is left behind."""

  def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Starts `command` with `environment` added to this process's own."""
    self.name = name
    self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    self._process = subprocess.Popen(
      list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
      text=True, encoding="utf-8", env={**os.environ, **environment})
    assert self._process.stdin and self._process.stdout  # both were asked for
    self._input, self._output = self._process.stdin, self._process.stdout

  def __enter__(self) -> Side:
    return self

  def __exit__(self, *_: Any) -> None:
    try:
      self._say({"do": "quit"})
      self._process.wait(_QUIT_SECONDS)
    except (SideFailed, subprocess.TimeoutExpired):
      pass
    finally:
      self._process.kill()
      self._process.wait()
      for stream in (self._input, self._output, self._errors):
        try:
          stream.close()
        except BrokenPipeError:
          pass  # what was still to be said to a dead process

  def begin(self, work: Mapping[str, Any]) -> dict[str, Any]:
    """Hands over the work; returns once the side is ready, with what it says of itself."""
    return self._ask(work)

  def step(self) -> dict[str, Any]:
    """Has one step done; returns its figures. Raises SideFailed with the end of the error stream."""
    return self._ask({"do": "step"})

  def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
    self._say(message)
    line = self._output.readline()
    if not line:
      raise SideFailed(f"{self.name} ended with exit status {self._process.wait()}. Its last words:\n"
                       f"{self._last_words()}")
    try:
      return json.loads(line)
    except ValueError:
      raise SideFailed(f"{self.name} answered {line[:200]!r}, which is no JSON") from None

  def _say(self, message: Mapping[str, Any]) -> None:
    try:
      self._input.write(json.dumps(message) + "\n")
      self._input.flush()
    except (BrokenPipeError, ValueError):
      raise SideFailed(f"{self.name} does not listen any more. Its last words:\n"
                       f"{self._last_words()}") from None

  def _last_words(self) -> str:
    self._errors.seek(0)
    return "".join(collections.deque(self._errors, maxlen=_ERROR_LINES))


def take_over_output() -> TextIO:
  """The answers' channel of a side; from now on file descriptor 1 is the error stream."""
  channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  return channel


def serve(answers: Iterable[Mapping[str, Any]], channel: TextIO, commands: TextIO = sys.stdin) -> None:
  """Gives the next of `answers`, the first unasked, whenever a command asks for a step."""
  for answer in answers:
    print(json.dumps(answer), file=channel, flush=True)
    if next(_commands(commands), "quit") == "quit":
      return


def _commands(lines: TextIO) -> Iterator[str]:
  while line := lines.readline():
    yield json.loads(line)["do"]
