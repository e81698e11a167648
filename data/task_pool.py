"""Draws tasks in shuffled epochs. The position is a small value that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from wootz.data.ordering import name_hashes, shuffled
from wootz.data.records import Task


@dataclasses.dataclass(frozen=True)
class TaskPoolState:
  """Where a pool stands. Plain values: `dataclasses.asdict` is JSON-able."""

  epoch: int = 0  # epochs completed
  cursor: int = 0  # tasks of this epoch already drawn
  # When a draw runs over the end of an epoch, what it took before the end is held back in the new
  # epoch until the draw is full, so that no draw holds a task twice. Indices of tasks:
  held: tuple[int, ...] = ()
  held_until: int = 0  # the place in the new epoch from which they may come again
  pool: str = ""  # digest of the pool's tasks and seed; "" before the first draw

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> TaskPoolState:
    """The state whose `dataclasses.asdict` was saved."""
    return cls(**dict(values) | {"held": tuple(values["held"])})


@dataclasses.dataclass(frozen=True)
class TaskPool:
  """Tasks in a fixed pseudo-random order per epoch.

  Each task comes exactly once per epoch, in an order that depends on the seed, the epoch and the
  tasks' names, not on the order in which they are given.
  """

  tasks: tuple[Task, ...]
  seed: int = 0
  _hashes: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
  digest: str = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    names = [f"{task.domain}/{task.id}" for task in self.tasks]
    if not names:
      raise ValueError("a task pool needs at least one task")
    if len(set(names)) < len(names):
      twice = next(name for name in sorted(names) if names.count(name) > 1)
      raise ValueError(f"task {twice} is in the pool more than once")
    by_name = sorted(range(len(names)), key=names.__getitem__)
    object.__setattr__(self, "tasks", tuple(self.tasks[i] for i in by_name))
    object.__setattr__(self, "_hashes", name_hashes([names[i] for i in by_name]))
    digest = hashlib.sha256(f"{self.seed}\n".encode() + self._hashes.tobytes()).hexdigest()[:16]
    object.__setattr__(self, "digest", digest)

  def draw(self, state: TaskPoolState, count: int) -> tuple[tuple[Task, ...], TaskPoolState]:
    """The next `count` tasks, no two alike, and the state behind them.

    Raises ValueError when `count` exceeds the pool, or the state is of another pool.
    """
    size = len(self.tasks)
    if not 0 < count <= size:
      raise ValueError(f"cannot draw {count} different tasks from a pool of {size}")
    if state.pool not in ("", self.digest):
      raise ValueError(f"the task pool's saved state is of pool {state.pool}, this is pool "
                       f"{self.digest}: its tasks or its seed have changed")
    order = self._order(state)
    drawn = order[state.cursor:state.cursor + count]
    after = dataclasses.replace(state, cursor=state.cursor + len(drawn), pool=self.digest)
    if after.cursor == size:
      missing = count - len(drawn)
      after = TaskPoolState(epoch=state.epoch + 1, cursor=missing, pool=self.digest,
                            held=tuple(drawn) if missing else (), held_until=missing)
      drawn = drawn + self._order(after)[:missing]
    return tuple(self.tasks[i] for i in drawn), after

  def _order(self, state: TaskPoolState) -> list[int]:
    """Indices of the epoch's tasks in order."""
    order = shuffled(self._hashes, self.seed, state.epoch).tolist()
    held = set(state.held)
    first = [i for i in order if i not in held][:state.held_until]
    early = set(first)
    return first + [i for i in order if i not in early]
