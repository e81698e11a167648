"""Writes report.html: what a run did and what came of it, in one page that needs no network."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from wootz.data.records import Outcome
from wootz.post_training import metrics
from wootz.post_training.evaluate import figures, results
from wootz.post_training.evaluate.results import EvaluationResult, Summary, TaskResult
from wootz.post_training.evaluate.statistics import Interval
from wootz.post_training.untrusted_text import printable

# The files of a run directory that the page is made of; each may be missing.
BEFORE_FILE = "evaluation_before.json"
AFTER_FILE = "evaluation_after.json"
CONFIG_FILE = "config.json"
VERSIONS_FILE = "versions.json"
REPORT_FILE = "report.html"

_TEXT_LIMIT = 4000  # characters shown of one prompt or completion
_CURVES = (  # metric, title, whether it is a share
  ("reward", "Reward", False), ("pass_rate", "Pass rate", True),
  ("flat_groups", "Flat groups", True), ("kl", "KL from the base model", False),
  ("kl_behavior", "KL from the sampling policy", False), ("ratio", "Probability ratio", False),
  ("clip_fraction", "Clip fraction", True), ("entropy", "Entropy", False),
  ("gradient_norm", "Gradient norm", False), ("logprob_gap", "Sampler/learner gap", False),
  ("loss", "Loss", False), ("completion_length", "Completion length", False),
  ("truncated_share", "Truncated", True), ("tokens_per_second", "Tokens per second", False),
)


@dataclasses.dataclass(frozen=True)
class Run:
  """Everything the page shows, as read from a run directory."""

  name: str
  rows: Sequence[Mapping[str, Any]]  # of metrics.read_metrics
  before: EvaluationResult | None
  after: EvaluationResult | None
  config: Mapping[str, Mapping[str, Any]]  # section -> key -> value
  versions: Mapping[str, str]


def load_run(directory: str | os.PathLike[str]) -> Run:
  """Reads a run directory. FileNotFoundError without one, ValueError for a broken file."""
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f"no run directory {directory}")
  return Run(
    name=directory.resolve().name,
    rows=metrics.read_metrics(directory),
    before=_read(directory / BEFORE_FILE, results.from_json, None),
    after=_read(directory / AFTER_FILE, results.from_json, None),
    config=_read(directory / CONFIG_FILE, json.loads, {}),
    versions=_read(directory / VERSIONS_FILE, json.loads, {}))


def write_report(directory: str | os.PathLike[str]) -> pathlib.Path:
  """Writes report.html into a run directory from the files in it, at any time; returns its path.

  Parts whose files are missing yet are left out and said to be. A reader never sees half a page.
  """
  path = pathlib.Path(directory) / REPORT_FILE
  aside = path.with_suffix(".html.new")
  aside.write_text(render(load_run(directory)), encoding="utf-8")
  os.replace(aside, path)
  return path


def write_learning_curve(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
  """Writes a PNG of reward, pass rate and KL over the updates of a run.

  Raises ValueError when the run has none of these metrics yet.
  """
  found = figures.curves(metrics.read_metrics(directory))
  wanted = {"reward": "Reward", "pass_rate": "Pass rate of training samples",
            "kl": "KL from the base model, nats"}
  panels = {title: found[name] for name, title in wanted.items() if name in found}
  if not panels:
    raise ValueError(f"{directory} holds no metrics to draw yet")
  figures.learning_curve_png(panels, path, shares=("Pass rate of training samples",))


def render(run: Run) -> str:
  """The page as HTML text. Everything that came from the model or a file is escaped."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
  environment.filters.update(percent=_percent, points=_points, number=_number, duration=_duration,
                             printable=lambda text: printable(str(text), limit=_TEXT_LIMIT))
  return environment.get_template(REPORT_FILE).render(
    run=run,
    headlines=_headlines(run),
    comparison=_comparison(run),
    curves=_curves(run.rows),
    families=_families(run),
    cost=_cost(run),
    shares=_time_shares(run.rows),
    examples=_examples(run),
    alerts=_alerts(run.rows))


def _read(path: pathlib.Path, parse: Any, missing: Any) -> Any:
  if not path.exists():
    return missing
  try:
    return parse(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _headlines(run: Run) -> list[dict[str, Any]]:
  """One card per split: greedy pass@1 before and after, and the gain with its interval."""
  cards = []
  for split, title in results.SPLITS.items():
    before, after = (None if result is None else result.select(split=split)
                     for result in (run.before, run.after))
    present = after or before
    if present is None or not present.tasks:
      continue
    gain = _gain(before, after)
    cards.append({
      "title": title, "tasks": len(present.tasks), "gain": gain, "verdict": _verdict(gain),
      "before": before and results.summarise(before, pass_at=()).greedy,
      "after": after and results.summarise(after, pass_at=()).greedy})
  return cards


def _gain(before: EvaluationResult | None, after: EvaluationResult | None) -> Interval | None:
  """Gain in greedy pass@1; None where there is nothing, or other tasks, to compare with."""
  if before is None or after is None or (
      {task.task_id for task in before.tasks} != {task.task_id for task in after.tasks}):
    return None
  return results.greedy_gain(before, after)


def _verdict(gain: Interval | None) -> str:
  if gain is None:
    return "not compared: needs both evaluations, of the same tasks"
  if gain.low > 0:
    return "better"
  return "worse" if gain.high < 0 else "no sure change"


def _comparison(run: Run) -> dict[str, Any] | None:
  """The before/after table and figure, per split and measure."""
  rows, drawn = [], []
  for split, title in results.SPLITS.items():
    summaries = [None if result is None else results.summarise(
      result.select(split=split), pass_at=_pass_at(run)) for result in (run.before, run.after)]
    if not any(summary and summary.tasks for summary in summaries):
      continue
    for label, k in [("greedy pass@1", None), *((f"sampled pass@{k}", k) for k in _pass_at(run))]:
      before, after = (_measure(summary, k) for summary in summaries)
      if before or after:
        rows.append({"split": title, "label": label, "before": before, "after": after})
        drawn.append(figures.Comparison(f"{title}\n{label}", before, after))
  return {"rows": rows, "svg": figures.comparison_svg(drawn)} if rows else None


def _measure(summary: Summary | None, k: int | None) -> Interval | None:
  """Sampled pass@k, or with k None greedy pass@1."""
  if summary is None:
    return None
  return summary.greedy if k is None else summary.pass_at[k]


def _pass_at(run: Run) -> tuple[int, ...]:
  """The k of pass@k: as configured, or 1 and the number of samples drawn per task."""
  configured = run.config.get("evaluation", {}).get("pass_at")
  if configured is not None:
    return tuple(configured)
  drawn = max((len(task.samples) for result in (run.before, run.after) if result
               for task in result.tasks), default=0)
  return tuple(sorted({1, drawn})) if drawn else ()


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  found = figures.curves(rows)
  return [{"title": title, "share": share, "last": found[name][1][-1],
           "meaning": metrics.DESCRIPTIONS[name],
           "svg": figures.curve_svg(found[name], share=share),
           "not_finite": _count_not_finite(rows, name)}
          for name, title, share in _CURVES if name in found]


def _count_not_finite(rows: Sequence[Mapping[str, Any]], name: str) -> int:
  values = [row["scalars"].get(name) for row in rows]
  return sum(value is not None and not math.isfinite(value) for value in values)


def _families(run: Run) -> list[dict[str, Any]]:
  before, after = ({} if result is None else results.by_family(result)
                   for result in (run.before, run.after))
  table = []
  for family in sorted(before.keys() | after.keys()):
    first, second = before.get(family), after.get(family)
    present = next(part for part in (second, first) if part is not None)
    split = present.tasks[0].split
    table.append({
      "family": family, "split": results.SPLITS.get(split, split), "tasks": len(present.tasks),
      "before": first and results.summarise(first, pass_at=()),
      "after": second and results.summarise(second, pass_at=()),
      "gain": _gain(first, second)})
  return sorted(table, key=lambda row: (row["split"], row["family"]))


def _total(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
  values = [row["scalars"][name] for row in rows if row["scalars"].get(name) is not None]
  return math.fsum(value for value in values if math.isfinite(value)) if values else None


def _cost(run: Run) -> list[dict[str, Any]]:
  """Tokens and seconds of training and of both evaluations, and their sum."""
  rows: list[dict[str, Any]] = [{"what": "Training", "tokens": _total(run.rows, "sampled_tokens"),
           "learned": _total(run.rows, "learned_tokens"), "seconds": _total(run.rows, "seconds")}]
  for what, result in (("Evaluation before", run.before), ("Evaluation after", run.after)):
    if result is not None:
      rows.append({"what": what, "tokens": result.tokens, "learned": None,
                   "seconds": result.seconds})
  rows = [row for row in rows if row["tokens"] is not None or row["seconds"] is not None]
  if len(rows) > 1:
    rows.append({"what": "Together", **{
      key: math.fsum(row[key] or 0 for row in rows) for key in ("tokens", "learned", "seconds")}})
  return rows


def _time_shares(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Share of the updates' wall time per activity; what is left over is "other"."""
  total = _total(rows, "seconds")
  if not total:
    return []
  parts = {name: _total(rows, f"{name}_seconds") or 0.0
           for name in ("sampling", "grading", "learning")}
  parts["other"] = max(0.0, total - sum(parts.values()))
  whole = sum(parts.values())  # more than `total` when activities overlap
  return [{"name": name, "share": seconds / whole, "seconds": seconds}
          for name, seconds in parts.items()]


def _examples(run: Run, per_kind: int = 2) -> list[dict[str, Any]]:
  """The same tasks before and after: gained, lost, still unsolved and solved both times."""
  before, after = ({} if result is None else {task.task_id: task for task in result.tasks}
                   for result in (run.before, run.after))
  kinds: dict[str, list[dict[str, TaskResult]]] = {
    "newly solved": [], "no longer solved": [], "still unsolved": [], "solved both times": [],
    "evaluated once": []}
  for task_id in sorted(before.keys() | after.keys()):
    pair = {when: tasks[task_id] for when, tasks in (("before", before), ("after", after))
            if task_id in tasks}
    kinds[_kind(pair)].append(pair)
  seen: collections.Counter[str] = collections.Counter()
  return [{"kind": kind, "task": _task(pair), "attempts": [
            {"when": when, "sample": task.greedy, "tone": _tone(task.greedy.outcome)}
            for when, task in pair.items()]}
          for kind, pairs in kinds.items() for pair in _varied(pairs, per_kind, seen)]


def _task(pair: Mapping[str, TaskResult]) -> TaskResult:
  """The task of a pair of attempts; that of the later one, should they differ."""
  return list(pair.values())[-1]


def _kind(pair: Mapping[str, TaskResult]) -> str:
  if len(pair) < 2:
    return "evaluated once"
  return {(False, True): "newly solved", (True, False): "no longer solved",
          (False, False): "still unsolved", (True, True): "solved both times"}[
            pair["before"].greedy.solved, pair["after"].greedy.solved]


def _varied(pairs: Sequence[dict[str, TaskResult]], count: int,
            seen: collections.Counter[str]) -> list[dict[str, TaskResult]]:
  """`count` pairs, each the first of a family shown least so far; `seen` counts what is shown."""
  left = list(pairs)
  chosen: list[dict[str, TaskResult]] = []
  while left and len(chosen) < count:
    place = min(range(len(left)), key=lambda place: seen[_task(left[place]).family])
    chosen.append(left.pop(place))
    seen[_task(chosen[-1]).family] += 1
  return chosen


def _tone(outcome: str) -> str:
  if outcome in (Outcome.SOLVED, Outcome.PARTIAL):
    return {"solved": "good", "partial": "fair"}[outcome]
  return "bad" if Outcome(outcome).has_score else "none"


def _alerts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  return [{"update": row["update"], "text": line} for row in rows
          for line in row["texts"].get("alerts", "").splitlines()]


def _percent(share: float | None) -> str:
  return "–" if share is None else f"{100 * share:.1f} %"


def _points(share: float) -> str:
  return f"{100 * share:+.1f}".replace("-", "−")


def _number(value: float | None) -> str:
  if value is None:
    return "–"
  if not isinstance(value, (int, float)) or not math.isfinite(value):
    return str(value)
  return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _duration(seconds: float | None) -> str:
  if seconds is None:
    return "–"
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
