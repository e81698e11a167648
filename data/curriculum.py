"""Measured pass rates, and sampling that prefers tasks which are neither always nor never solved.

A group whose samples all pass or all fail has no spread and teaches group-relative methods nothing.
The expected share of groups with spread grows with p (1 - p) for a pass rate p, which is the weight
used here, as in several reports on curricula for reinforcement learning with verifiable rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wootz.data.ordering import name_hashes, uniforms
from wootz.data.records import Outcome, Task, Trajectory
from wootz.data.task_pool import TaskPool, TaskPoolState

MODES = ("uniform", "learnable")

Counts = tuple[int, int]  # attempts with a score, solved ones


@dataclasses.dataclass(frozen=True)
class CurriculumState:
  """What was measured so far, by family and by task. `dataclasses.asdict` is JSON-able."""

  families: Mapping[str, Counts] = dataclasses.field(default_factory=dict)  # "domain/family"
  tasks: Mapping[str, Counts] = dataclasses.field(default_factory=dict)  # "domain/task id"

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> CurriculumState:
    """The state whose `dataclasses.asdict` was saved."""
    return cls(**{kind: {name: tuple(counts) for name, counts in values[kind].items()}
                  for kind in ("families", "tasks")})


def update(state: CurriculumState, trajectories: Iterable[Trajectory]) -> CurriculumState:
  """Counts graded attempts. Attempts without a score (lost, unscorable) count for nothing."""
  families, tasks = dict(state.families), dict(state.tasks)
  for trajectory in trajectories:
    if trajectory.grade.outcome.has_score:
      solved = trajectory.grade.outcome == Outcome.SOLVED
      _count(families, f"{trajectory.domain}/{trajectory.family}", solved)
      _count(tasks, f"{trajectory.domain}/{trajectory.task_id}", solved)
  return CurriculumState(families=families, tasks=tasks)


def _count(table: dict[str, Counts], name: str, solved: bool) -> None:
  attempts, passes = table.get(name, (0, 0))
  table[name] = (attempts + 1, passes + int(solved))


def pass_rates(state: CurriculumState, tasks: Sequence[Task], *,
               prior_attempts: float = 4.0) -> np.ndarray:
  """Estimated pass rate per task, float64 in (0, 1).

  A family's rate is the mean of its Beta posterior from a uniform prior. A task begins at its
  family's rate, worth `prior_attempts` attempts, and moves to its own as it is tried.
  """
  rates = []
  for task in tasks:
    attempts, passes = state.families.get(f"{task.domain}/{task.family}", (0, 0))
    family_rate = (passes + 1) / (attempts + 2)
    attempts, passes = state.tasks.get(f"{task.domain}/{task.id}", (0, 0))
    rates.append((passes + prior_attempts * family_rate) / (attempts + prior_attempts))
  return np.array(rates)


def sampling_weights(state: CurriculumState, tasks: Sequence[Task], *, mode: str = "uniform",
                     floor: float = 0.05) -> np.ndarray:
  """Relative weight per task, float64 in [floor, 1].

  Args:
    mode: "uniform", or "learnable" for 4 p (1 - p) of the estimated pass rate p.
    floor: least weight, so that a task that looked hopeless or mastered is measured again.
  """
  if mode not in MODES:
    raise ValueError(f"curriculum mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
  if mode == "uniform":
    return np.ones(len(tasks))
  rates = pass_rates(state, tasks)
  return np.maximum(4 * rates * (1 - rates), floor)


def draw(pool: TaskPool, pool_state: TaskPoolState, state: CurriculumState, count: int, *,
         step: int, mode: str = "uniform") -> tuple[tuple[Task, ...], TaskPoolState]:
  """`count` different tasks for one step, and the pool's state behind them.

  "uniform" goes through the pool epoch by epoch. "learnable" samples by weight without replacement
  (Efraimidis and Spirakis, 2006), leaves the pool's state alone, and depends on the measured rates,
  the pool's seed and `step` only.
  """
  weights = sampling_weights(state, pool.tasks, mode=mode)
  if mode == "uniform":
    return pool.draw(pool_state, count)
  if not 0 < count <= len(pool.tasks):
    raise ValueError(f"cannot draw {count} different tasks from a pool of {len(pool.tasks)}")
  names = name_hashes([f"{task.domain}/{task.id}" for task in pool.tasks])
  keys = np.log(uniforms(names, pool.seed, "curriculum", step)) / weights
  return tuple(pool.tasks[i] for i in np.lexsort((names, -keys))[:count]), pool_state
