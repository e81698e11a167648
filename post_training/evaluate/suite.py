"""Runs the policy on tasks it is not trained on, greedy and sampled, and grades what it wrote."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from wootz.data.records import Task, Trajectory
from wootz.data.tokenizer import Tokenizer
from wootz.post_training.domains.base import Domain
from wootz.post_training.evaluate import results
from wootz.post_training.evaluate.results import EvaluationResult, SampleResult, TaskResult
from wootz.post_training.rollout.collect import Generate, Sampling, collect


@dataclasses.dataclass(frozen=True)
class Suite:
  """Which tasks an evaluation runs, and how it draws."""

  tasks: tuple[Task, ...]
  samples_per_task: int  # drawn beside the greedy one
  sampled_tasks: int  # tasks that samples are drawn of, spread evenly; all where there are fewer
  temperature: float  # of the drawn ones
  max_new_tokens: int
  stop_strings: tuple[str, ...] = ()

  @property
  def num_completions(self) -> int:
    return len(self.tasks) + len(self.sampled) * self.samples_per_task

  @property
  def sampled(self) -> frozenset[str]:
    """Ids of the tasks that samples are drawn of, at even distances, so that all kinds are among them."""
    count = min(self.sampled_tasks, len(self.tasks)) if self.samples_per_task else 0
    return frozenset(self.tasks[index * len(self.tasks) // count].id for index in range(count))


EVALUATION_UPDATE = 0  # label in the seeds: the same draws before and after, so that they pair up


def choose_tasks(domain: Domain, *, held_out: int, unseen: int) -> tuple[Task, ...]:
  """The first tasks of both splits, in the domain's order, which mixes families."""
  chosen: list[Task] = []
  for split, count in (("held_out", held_out), ("unseen_family", unseen)):
    tasks = domain.tasks(split)
    if count > len(tasks):
      raise ValueError(f"{count} {split} tasks are asked for; domain {domain.name!r} has {len(tasks)}")
    chosen += tasks[:count]
  return tuple(chosen)


def evaluate(
  generate: Generate,
  suite: Suite,
  *,
  domain: Domain,
  tokenizer: Tokenizer,
  seed: int,
  update: int,
  on_grade: Callable[[Trajectory], None] = lambda trajectory: None,
) -> EvaluationResult:
  """One greedy completion and the suite's drawn ones of every task, graded.

  Both kinds go to the engine together, so that a task's prompt is prefilled once for all of them.
  """
  started = time.monotonic()
  greedy = Sampling(num_samples=1, temperature=0.0, max_new_tokens=suite.max_new_tokens,
                    stop_strings=suite.stop_strings)
  drawn = Sampling(num_samples=suite.samples_per_task, temperature=suite.temperature,
                   max_new_tokens=suite.max_new_tokens, stop_strings=suite.stop_strings)
  sampled = suite.sampled
  graded, _ = collect(
    generate, suite.tasks, domain=domain, tokenizer=tokenizer, seed=seed,
    kinds=lambda task: (greedy, drawn) if task.id in sampled else (greedy,),
    update=EVALUATION_UPDATE, weight_version=update, on_grade=on_grade)
  by_task: dict[str, list[Trajectory]] = {task.id: [] for task in suite.tasks}
  for trajectory in graded:
    by_task[trajectory.task_id].append(trajectory)
  return EvaluationResult(
    tasks=tuple(_task_result(task, by_task[task.id]) for task in suite.tasks), update=update,
    temperature=suite.temperature, max_new_tokens=suite.max_new_tokens,
    seconds=time.monotonic() - started)


def _task_result(task: Task, trajectories: Sequence[Trajectory]) -> TaskResult:
  greedy, *drawn = (SampleResult.from_trajectory(trajectory) for trajectory in trajectories)
  prompt = "\n\n".join(message["content"] for message in task.messages)
  return TaskResult(task_id=task.id, family=task.family, split=task.split, prompt=prompt,
                    greedy=greedy, samples=tuple(drawn))


def one_line(result: EvaluationResult) -> str:
  """Greedy pass@1 of each split with its interval, for the terminal."""
  parts = []
  for split, title in results.SPLITS.items():
    greedy = results.summarise(result.select(split=split), pass_at=()).greedy
    if greedy is not None:
      parts.append(f"{title.lower()} {100 * greedy.estimate:.1f} % "
                   f"({100 * greedy.low:.1f} to {100 * greedy.high:.1f})")
  return f"greedy pass@1: {', '.join(parts) or 'nothing scored'}; {result.seconds:.0f} s"
