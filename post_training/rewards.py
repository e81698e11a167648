"""Rewards as plain numbers, on top of the domains' typed grades."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from wootz.data.records import Task
from wootz.post_training.domains.base import SPLITS, get_domain

RewardFunction = Callable[[Sequence[str], Sequence[str]], Sequence[float | None]]


class NoReward(RuntimeError):
  """The attempt has no score through no fault of its own: try again, or leave it out."""


def code_reward(submission: str, task_id: str, *, domain: str = "python_functions") -> float:
  """The score in [0, 1] of one submission (code, or text with a code block) on one task.

  Runs the submission in a sandbox against the task's hidden tests.

  Raises:
    KeyError: no such task or domain.
    NoReward: the sandbox or the grader failed, which is not a 0.
    SandboxUnavailable: this machine cannot isolate programs; the message names the remedy.
  """
  grade = get_domain(domain).grade(find_task(task_id, domain=domain), submission)
  if grade.score is None:
    raise NoReward(f"task {task_id!r}: {grade.outcome.value}: {grade.reason}")
  return grade.score


def find_task(task_id: str, *, domain: str) -> Task:
  """The task of any split with this id. Raises KeyError showing what ids look like."""
  tasks = _tasks_by_id(domain)
  if task_id not in tasks:
    raise KeyError(f"no task {task_id!r} among the {len(tasks)} of domain {domain!r}; "
                   f"ids look like {next(iter(tasks))!r}")
  return tasks[task_id]


@functools.cache
def _tasks_by_id(domain: str) -> Mapping[str, Task]:
  return {task.id: task for split in SPLITS for task in get_domain(domain).tasks(split)}


def total_rewards(functions: Mapping[str, RewardFunction], submissions: Sequence[str],
                  task_ids: Sequence[str]) -> list[float | None]:
  """The sum over reward functions for each sample; None where every function abstains.

  A function abstains from a sample with None, and then adds nothing there. A 0.0 is a score.

  Raises:
    ValueError: the lists differ in length, or a function gives another number of values than there are
      samples; the message names it.
  """
  if len(submissions) != len(task_ids):
    raise ValueError(f"{len(submissions)} submissions for {len(task_ids)} task ids")
  totals: list[float | None] = [None] * len(submissions)
  for name, function in functions.items():
    values = function(submissions, task_ids)
    if len(values) != len(submissions):
      raise ValueError(f"reward function {name!r} gave {len(values)} values for "
                       f"{len(submissions)} samples")
    for i, value in enumerate(values):
      if value is not None:
        totals[i] = value + (totals[i] or 0.0)
  return totals
