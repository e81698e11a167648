"""What a domain is: its tasks, and the grader that belongs to them."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from wootz.data.records import Grade, Task

SPLITS = ("train", "held_out", "unseen_family")

# Name -> "module:factory". The module is imported at first use, so that a domain's dependencies
# are needed only by those who train on it.
REGISTRY: dict[str, str] = {
  "python_functions": "wootz.post_training.domains.python_functions.domain:PythonFunctions",
}


@runtime_checkable
class Domain(Protocol):
  """A family of tasks with a grader. Instances are safe to share between threads."""

  name: str

  def tasks(self, split: str) -> Sequence[Task]:
    """The tasks of one of `SPLITS`, in an order that is equal in every run and process."""
    ...

  def check(self) -> None:
    """Raises, naming the remedy, when this machine cannot grade; called before a run begins."""
    ...

  def grade(self, task: Task, completion_text: str) -> Grade:
    """The typed verdict on one completion. A grader that breaks gives `unscorable`, not a 0."""
    ...


def check_split(split: str) -> None:
  """Raises ValueError, naming the splits there are, when `split` is not one of them."""
  if split not in SPLITS:
    raise ValueError(f"no split {split!r}: choose one of {', '.join(SPLITS)}")


@functools.cache
def get_domain(name: str) -> Domain:
  """The domain called `name`, one instance per process. Raises KeyError naming the nearest."""
  if name not in REGISTRY:
    near = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise KeyError(f"no domain {name!r}: {hint}known domains: {', '.join(sorted(REGISTRY))}")
  module, factory = REGISTRY[name].split(":")
  return getattr(importlib.import_module(module), factory)()
