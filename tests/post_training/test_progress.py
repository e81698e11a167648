"""The terminal view: harmless to the run, and to the terminal."""

import io
import re
import sys
import time

import pytest

from wootz.post_training.progress import Progress
from wootz.post_training.untrusted_text import printable, snippet

# Sets the window title, clears the screen, turns direction, hides a letter; also rich's own markup.
HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31m\u202ed\u200be [red]f[/red] [link=x]g\r!\u2028h"


class Terminal(io.StringIO):
  """A stream that says it is a terminal."""

  def isatty(self):
    return True


class Closed(Terminal):
  """A terminal that went away."""

  def write(self, text):
    raise BrokenPipeError

  def flush(self):
    raise BrokenPipeError


def _texts_between_controls(shown):
  """Removes what rich itself sends: colours, cursor movements, line clearing."""
  return re.sub(r"\x1b\[\??[0-9;]*[mAKhlGJ]", "", shown).replace("\r", "")


def test_printable_spells_out_what_is_hidden():
  assert printable("a\tb\nc") == "a\tb\nc"
  assert printable("x\r\ny") == "x\ny"
  assert printable("\x1b[31m\x00\x7f\x9b") == "<U+001B>[31m<U+0000><U+007F><U+009B>"
  assert printable("\u202e\u200b\ufeff\ud800\u2028") == (
    "<U+202E><U+200B><U+FEFF><U+D800><U+2028>")
  assert printable("héllo → 漢字 🙂") == "héllo → 漢字 🙂"
  assert printable("abcdef", limit=4) == "abcd [... 2 more characters]"
  assert snippet("one\ntwo three", 8) == "one two…"


def test_plain_line_per_update(monkeypatch):
  monkeypatch.setattr(time, "monotonic", pytest.fail)  # the clock is the argument
  now = iter(range(0, 1000, 10))
  stream = io.StringIO()
  with Progress(4, stream=stream, clock=lambda: next(now)) as progress:
    progress.phase("sampling", done=1, total=8)
    progress.sample("t/1", "solved", "text")
    progress.update(1, {"reward": 0.5, "pass_rate": 0.25, "kl": None, "seconds": 60.0})
    progress.message("saved\x1b[2J")
  lines = stream.getvalue().splitlines()
  # 3 updates of 60 s are left, less the 10 s the clock moved on.
  assert lines == ["update 1/4  reward 0.500  pass 25.0%  seconds 60.0  left 2:50",
                   "saved<U+001B>[2J"]


def test_remaining_time_leaves_out_evaluations():
  times = iter([0.0, *[500.0] * 9])
  progress = Progress(3, stream=io.StringIO(), clock=lambda: next(times))
  assert progress.remaining_seconds() is None
  progress.update(1, {"seconds": 20.0})  # 500 s after the start: an evaluation came first
  assert progress.remaining_seconds() == 40.0


def test_terminal_view_shows_the_state_and_no_control_sequence_of_the_model():
  stream = Terminal()
  with Progress(3, title="demo", stream=stream) as progress:
    progress.phase("sampling", done=3, total=32)
    progress.update(1, {"reward": 0.5, "kl": float("nan")})
    progress.sample("clamp/1" + HOSTILE, "partial" + HOSTILE, HOSTILE)
    progress.message(HOSTILE)
  shown = stream.getvalue()
  for sequence in ("\x1b]", "\x07", "\x9b", "\u202e", "\u200b", "\u2028", "\x1b[2J"):
    assert sequence not in shown
  text = _texts_between_controls(shown)
  assert "\x1b" not in text
  for wanted in ("demo", "1/3", "sampling", "3/32", "0.500", "nan", "<U+001B>]0;owned<U+0007>b",
                 "[red]f[/red]"):
    assert wanted in text


@pytest.mark.parametrize("stream", [Closed(), io.StringIO()])
def test_a_view_that_fails_does_not_end_the_run(stream):
  if type(stream) is io.StringIO:
    stream.close()
  before = sys.stdout
  with Progress(2, stream=stream) as progress:
    progress.phase("sampling")
    progress.sample("t", "solved", "x")
    progress.message("hello")
    progress.update(1, {"reward": 0.1})
    progress.update(2, {"reward": "not a number"})
  assert sys.stdout is before


def test_errors_of_the_run_pass_through():
  with pytest.raises(KeyError), Progress(2, stream=Terminal()):
    raise KeyError("the run's own")
