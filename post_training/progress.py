"""What a person sees in the terminal while a run goes on."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wootz.post_training.untrusted_text import printable, snippet

_RECENT = 5  # updates the remaining time is judged by


@dataclasses.dataclass
class _State:
  """What the view shows now."""

  phase: str = "starting"
  done: int | None = None
  total: int | None = None
  update: int = 0  # updates finished
  metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
  sample: tuple[str, str, str] | None = None  # task id, outcome, text


class _Console(Console):
  """A console whose terminal may go away; rich's own would end the process with status 1."""

  def on_broken_pipe(self) -> None:
    self.quiet = True


class Progress:
  """Live view on a terminal, one plain line per update elsewhere.

      with Progress(total_updates=10, title="wootz train") as progress:
        progress.phase("sampling", done=8, total=32)
        progress.sample("clamp/0173", "solved", text)
        progress.update(1, metrics)

  Showing progress never ends a run: whatever goes wrong in it, a closed pipe included, only ends
  the view. Text from the model is shown without its control characters.
  """

  def __init__(self, total_updates: int, *, title: str = "wootz", first_update: int = 0,
               stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
    """`first_update`: updates already finished, when a run resumes. `clock`: seconds."""
    self._total, self._title, self._clock = total_updates, title, clock
    self._stream = sys.stdout if stream is None else stream
    self._state = _State(update=first_update)
    self._started = self._last = clock()
    self._seconds: collections.deque[float] = collections.deque(maxlen=_RECENT)  # per update
    self._live: Live | None = None

  def __enter__(self) -> Self:
    with self._harmless():
      if self._stream.isatty():
        console = _Console(file=self._stream)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()
    return self

  def __exit__(self, *_: object) -> None:
    with self._harmless():
      if self._live is not None:
        self._live.stop()
    self._live = None

  def phase(self, name: str, *, done: int | None = None, total: int | None = None) -> None:
    """Says what the run does now; on a terminal only. `done` of `total` pieces draw a bar."""
    state = self._state
    state.phase, state.done, state.total = printable(name), done, total

  def sample(self, task_id: str, outcome: str, text: str) -> None:
    """Shows one completion; on a terminal only."""
    self._state.sample = (task_id, outcome, text)

  def message(self, text: str) -> None:
    """Shows a line that stays, in both forms."""
    with self._harmless():
      if self._live is not None:
        self._live.console.print(Text(printable(text)))
      else:
        self._print(printable(text))

  def update(self, number: int, metrics: Mapping[str, float | None]) -> None:
    """Reports that update `number` (counted from 1) is done, with its metrics."""
    self._state.update, self._state.metrics = number, dict(metrics)
    now = self._clock()
    # The metric, where there is one: evaluations between updates are not part of an update.
    self._seconds.append(metrics.get("seconds") or now - self._last)
    self._last = now
    if self._live is None:
      with self._harmless():
        self._print(self._line())

  def remaining_seconds(self) -> float | None:
    """Estimate from the last updates, without evaluations; None before the first one is done."""
    if not self._seconds:
      return None
    pace = sum(self._seconds) / len(self._seconds)
    left = pace * (self._total - self._state.update)
    return max(0.0, left - (self._clock() - self._last))

  def _print(self, text: str) -> None:
    print(text, file=self._stream, flush=True)

  def _line(self) -> str:
    parts = [f"update {self._state.update}/{self._total}"]
    parts += [f"{name} {value}" for name, value in _figures(self._state.metrics)]
    return "  ".join([*parts, f"left {_duration(self.remaining_seconds())}"])

  def _render(self) -> Any:
    try:
      return self._panel()
    except Exception as error:  # raised in the drawing thread it would end the view
      return Text(f"{self._title}: no view ({type(error).__name__})")

  def _panel(self) -> Panel:
    state = self._state
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("update", style="dim"), Text(f"{state.update}/{self._total}"),
                 ProgressBar(total=max(self._total, 1), completed=state.update, width=30),
                 Text(f"{_duration(self._clock() - self._started)} so far, "
                      f"{_duration(self.remaining_seconds())} left", style="dim"))
    share = f"{state.done}/{state.total}" if state.total and state.done is not None else ""
    bar = ProgressBar(total=state.total, completed=state.done or 0, width=30) if share else Text("")
    head.add_row(Text("now", style="dim"), Text(state.phase, style="bold"), bar, Text(share))
    rows: list[Any] = [head]
    if state.metrics:
      rows.append(_figure_table(state.metrics))
    if state.sample is not None:
      rows.append(_sample_view(*state.sample))
    return Panel(Group(*rows), title=Text(self._title, style="bold"), box=box.ROUNDED,
                 title_align="left")

  @contextlib.contextmanager
  def _harmless(self) -> Iterator[None]:
    try:
      yield
    except Exception:  # a view that cannot be shown is no reason to lose a run
      live, self._live = self._live, None
      if live is not None:
        with contextlib.suppress(Exception):
          live.stop()  # gives back the standard streams, which it had redirected


def _figures(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
  """(label, formatted value) of the few metrics worth a glance."""
  shown = (("reward", "reward", "{:.3f}"), ("pass_rate", "pass", "{:.1%}"),
           ("kl", "KL", "{:.4f}"), ("gradient_norm", "grad", "{:.3g}"),
           ("completion_length", "length", "{:.0f}"), ("tokens_per_second", "tok/s", "{:.0f}"),
           ("seconds", "seconds", "{:.1f}"))
  return [(label, pattern.format(metrics[name])) for name, label, pattern in shown
          if metrics.get(name) is not None]


def _figure_table(metrics: Mapping[str, float | None]) -> Table:
  table = Table(box=box.SIMPLE, padding=(0, 2), show_edge=False)
  figures = _figures(metrics)
  for label, _ in figures:
    table.add_column(Text(label, style="dim"), justify="right")
  table.add_row(*(Text(value) for _, value in figures))
  return table


def _sample_view(task_id: str, outcome: str, text: str) -> Group:
  style = {"solved": "green", "partial": "yellow"}.get(outcome, "red")
  title = Text.assemble((f"{printable(task_id)} ", "dim"), (printable(outcome), style))
  lines = [snippet(line, 100) for line in text[:2000].split("\n") if line.strip()][:6]
  return Group(title, Text("\n".join(lines), style="dim"))


def _duration(seconds: float | None) -> str:
  if seconds is None:
    return "?"
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
