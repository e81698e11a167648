"""What an evaluation found, task by task, and its summaries."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from wootz.data.records import Outcome, Trajectory
from wootz.post_training.evaluate import statistics
from wootz.post_training.evaluate.statistics import Interval

SPLITS: Mapping[str, str] = {"held_out": "Held-out tasks", "unseen_family": "Unseen families"}


@dataclasses.dataclass(frozen=True)
class SampleResult:
  """One graded completion."""

  score: float | None  # in [0, 1]; None when nobody's (infra_lost, unscorable)
  outcome: str  # a value of wootz.data.records.Outcome
  tokens: int  # sampled tokens
  text: str  # the completion, untrusted
  truncated: bool = False  # cut by the length limit
  reason: str = ""  # the grader's line for a person

  def __post_init__(self) -> None:
    if Outcome(self.outcome).has_score != (self.score is not None):
      raise ValueError(f"outcome {self.outcome!r} with score {self.score!r}: a score belongs to "
                       "every outcome except infra_lost and unscorable")

  @classmethod
  def from_trajectory(cls, trajectory: Trajectory) -> SampleResult:
    """What an evaluation keeps of a graded trajectory."""
    grade = trajectory.grade
    return cls(score=grade.score, outcome=grade.outcome.value, text=trajectory.text,
               tokens=int(trajectory.loss_mask.sum()), reason=grade.reason,
               truncated=trajectory.finish_reason == "length")

  @property
  def solved(self) -> bool:
    return self.outcome == Outcome.SOLVED

  @property
  def scored(self) -> bool:
    return self.score is not None


@dataclasses.dataclass(frozen=True)
class TaskResult:
  """One task: its greedy completion, and those drawn at the evaluation's temperature."""

  task_id: str
  family: str
  split: str  # "held_out" or "unseen_family"
  prompt: str  # what the policy was asked, for people
  greedy: SampleResult
  samples: tuple[SampleResult, ...] = ()


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
  """All tasks of one evaluation of one set of weights."""

  tasks: tuple[TaskResult, ...]
  update: int  # learner updates the weights had received
  temperature: float  # of the drawn samples
  max_new_tokens: int  # tokens, the completion limit
  seconds: float  # wall time spent, sampling and grading

  def __post_init__(self) -> None:
    ids = [task.task_id for task in self.tasks]
    if len(set(ids)) != len(ids):
      twice = next(task_id for task_id in ids if ids.count(task_id) > 1)
      raise ValueError(f"task {twice!r} was evaluated twice")

  @property
  def tokens(self) -> int:
    """Sampled tokens spent, greedy and drawn."""
    return sum(sample.tokens for task in self.tasks for sample in (task.greedy, *task.samples))

  def select(self, *, split: str | None = None, family: str | None = None) -> EvaluationResult:
    """The same evaluation, of the tasks of one split or family only."""
    return dataclasses.replace(self, tasks=tuple(
      task for task in self.tasks
      if split in (None, task.split) and family in (None, task.family)))


@dataclasses.dataclass(frozen=True)
class Summary:
  """Capability beside cost, of a set of tasks. Intervals are None where nothing was scored."""

  tasks: int
  greedy: Interval | None  # share of tasks whose greedy completion solved, Wilson
  pass_at: Mapping[int, Interval | None]  # k -> pass@k of the drawn samples, bootstrap over tasks
  mean_score: float | None  # of the greedy completions
  mean_tokens: float | None  # per completion, greedy and drawn
  truncated_share: float | None  # of all completions
  unscored: int  # completions without a score, which count nowhere


def summarise(result: EvaluationResult, *, pass_at: Sequence[int] = (1, 4),
              confidence: float = 0.95, seed: int = 0) -> Summary:
  """The summary of all tasks in `result`. Tasks with fewer than k scored samples leave pass@k."""
  greedy = [task.greedy for task in result.tasks if task.greedy.scored]
  everything = [sample for task in result.tasks for sample in (task.greedy, *task.samples)]
  return Summary(
    tasks=len(result.tasks),
    greedy=statistics.wilson_interval(sum(sample.solved for sample in greedy), len(greedy),
                                      confidence=confidence) if greedy else None,
    pass_at={k: _pass_at(result.tasks, k, confidence, seed) for k in pass_at},
    mean_score=_mean([sample.score for sample in greedy if sample.score is not None]),
    mean_tokens=_mean([sample.tokens for sample in everything]),
    truncated_share=_mean([float(sample.truncated) for sample in everything]),
    unscored=sum(not sample.scored for sample in everything))


def by_family(result: EvaluationResult) -> dict[str, EvaluationResult]:
  """Family -> its part of the evaluation, in alphabetical order."""
  families = sorted({task.family for task in result.tasks})
  return {family: result.select(family=family) for family in families}


def greedy_gain(before: EvaluationResult, after: EvaluationResult, *, confidence: float = 0.95,
                seed: int = 0) -> Interval | None:
  """Gain in greedy pass@1 over the same tasks, by paired bootstrap; None if no pair was scored.

  Raises ValueError naming a task that only one of the two evaluations holds.
  """
  first = {task.task_id: task.greedy for task in before.tasks}
  second = {task.task_id: task.greedy for task in after.tasks}
  if different := sorted(first.keys() ^ second.keys()):
    raise ValueError(f"task {different[0]!r} is in only one of the two evaluations "
                     f"({len(different)} such tasks): compare the same tasks")
  pairs = [(first[key].solved, second[key].solved) for key in sorted(first)
           if first[key].scored and second[key].scored]
  if not pairs:
    return None
  return statistics.paired_bootstrap(*zip(*pairs, strict=True), confidence=confidence, seed=seed)


def to_json(result: EvaluationResult) -> str:
  """JSON text from which `from_json` builds an equal result."""
  return json.dumps(dataclasses.asdict(result), indent=1, allow_nan=False)


def from_json(text: str) -> EvaluationResult:
  """The inverse of `to_json`. Raises ValueError where the text is no evaluation."""
  try:
    values = json.loads(text)
    tasks = tuple(_task(task) for task in values.pop("tasks"))
    return EvaluationResult(tasks=tasks, **values)
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"no evaluation result, or one of another version: {error}") from error


def _task(values: dict[str, Any]) -> TaskResult:
  greedy = SampleResult(**values.pop("greedy"))
  samples = tuple(SampleResult(**sample) for sample in values.pop("samples"))
  return TaskResult(greedy=greedy, samples=samples, **values)


def _pass_at(tasks: Sequence[TaskResult], k: int, confidence: float, seed: int) -> Interval | None:
  values = []
  for task in tasks:
    scored = [sample.solved for sample in task.samples if sample.scored]
    if len(scored) >= k:
      values.append(statistics.pass_at_k(len(scored), sum(scored), k))
  return statistics.bootstrap_mean(values, confidence=confidence, seed=seed) if values else None


def _mean(values: Sequence[float]) -> float | None:
  return sum(values) / len(values) if values else None
