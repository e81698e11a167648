"""From the store to the learner: a Grain pipeline of minibatches of packed rows.

    store, update -> groups -> shuffle by (seed, update, epoch) -> minibatches of whole groups
      -> rows planned from lengths -> this process's rows -> micro-batches of equal shape

A minibatch is what one optimizer update learns from. Its content depends on the stored
trajectories, their advantages, the seed and the number of minibatches only; how it is cut into
micro-batches and dealt to processes changes nothing but the cut. A part that is left over is filled
up with empty rows, which weigh nothing, so nothing is dropped and every process runs the same
number of micro-batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from wootz.data import packing
from wootz.data.manifest import Entry
from wootz.data.ordering import name_hashes, shuffled
from wootz.data.packing import GroupLengths, PackedRows, Row, Sample
from wootz.data.store import TrajectoryStore

Key = tuple[str, str, int]  # domain, task id, sample index: `Entry.key`
Advantages = Mapping[Key, float] | Callable[[Entry], float | None]
Group = tuple[tuple[Entry, float], ...]  # the samples of a group with their advantages


class LoaderStateMismatch(ValueError):
  """An iterator state belongs to other data than the loader it was given to."""


@dataclasses.dataclass(frozen=True)
class PlannedMinibatch:
  """Which groups one optimizer update learns from, and the row each completion stands in."""

  epoch: int
  index: int  # within its epoch
  groups: tuple[Group, ...]
  rows: tuple[Row, ...]  # of all processes

  @property
  def num_sequences(self) -> int:
    return sum(len(group) for group in self.groups)

  @property
  def num_targets(self) -> int:
    return sum(entry.sampled_tokens for group in self.groups for entry, _ in group)


@dataclasses.dataclass(frozen=True)
class Minibatch:
  """One optimizer update's data: iterate for this process's micro-batches.

  The counts cover all processes and all micro-batches: as denominators they make an accumulated
  gradient independent of the cut.
  """

  update: int  # the rollout batch that the trajectories were drawn for
  epoch: int
  index: int  # within its epoch
  microbatches: tuple[PackedRows, ...]  # each [rows_per_microbatch, row_length]
  num_groups: int
  num_sequences: int  # completions with at least one sampled token; the highest sequence id
  num_targets: int  # sampled tokens

  def __iter__(self) -> Iterator[PackedRows]:
    return iter(self.microbatches)

  def __len__(self) -> int:
    return len(self.microbatches)


class MinibatchIterator(Iterator[Minibatch]):
  """Yields the minibatches of one update; its state can be saved and given to an equal iterator."""

  def __init__(self, dataset: grain.IterDataset, digest: str, length: int) -> None:
    self._iterator = iter(dataset)
    self._digest = digest
    self._length = length

  def __len__(self) -> int:
    """Minibatches in all epochs, whether consumed or not."""
    return self._length

  def __next__(self) -> Minibatch:
    return next(self._iterator)

  def get_state(self) -> dict[str, Any]:
    """Plain JSON values. Restoring them continues behind the last minibatch that was returned."""
    return {"data": self._digest, "iterator": self._iterator.get_state()}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Raises LoaderStateMismatch when the state was taken over other data or another order."""
    if state.get("data") != self._digest:
      raise LoaderStateMismatch(
        f"the loader's saved state is of data {state.get('data')!r}, this loader reads "
        f"{self._digest!r}: trajectories, advantages, seed, minibatches or epochs have changed")
    self._iterator.set_state(dict(state["iterator"]))


def minibatches(store: TrajectoryStore, update: int, *, advantages: Advantages, row_length: int,
                rows_per_microbatch: int, num_minibatches: int = 1, epochs: int = 1, seed: int = 0,
                process_index: int = 0, process_count: int = 1, share_prompt: bool = True,
                num_threads: int = 1) -> MinibatchIterator:
  """The minibatches to learn from the trajectories of one update, epoch after epoch.

  Args:
    store: read for the records; its facts alone decide the plan.
    update: the update whose trajectories are learned.
    advantages: by (domain, task id, sample index), or a function of the entry. It decides what is
      trained: trajectories that it leaves out (or maps to None) are not read.
    row_length: tokens per packed row.
    rows_per_microbatch: rows of this process in one micro-batch.
    num_minibatches: optimizer updates per epoch. Groups are never cut; the sizes of the minibatches
      differ by at most one group. With fewer groups than this there is one group in each.
    epochs: passes over the groups, each in a new order.
    seed: with `update` and the epoch it fixes the order.
    process_index, process_count: this process takes every process_count-th row of a minibatch.
    share_prompt: False gives each completion its own row and prompt.
    num_threads: readers that pack ahead; 0 packs when asked. The result is the same.

  Raises ValueError where advantages and store do not belong together, or a sample is too long.
  """
  if rows_per_microbatch < 1 or not 0 <= process_index < process_count:
    raise ValueError(f"rows_per_microbatch={rows_per_microbatch}, process {process_index} of "
                     f"{process_count}: want at least one row, and 0 <= index < count")
  groups = weighed_groups(store.groups(update), advantages)
  plan = plan_minibatches(groups, update=update, num_minibatches=num_minibatches, epochs=epochs,
                          seed=seed, row_length=row_length, share_prompt=share_prompt)
  pack = _MinibatchPacker(store, update, row_length, rows_per_microbatch, process_index,
                          process_count)
  dataset = grain.MapDataset.source(_Plan(plan)).map(pack).to_iter_dataset(
    grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads))
  digest = _digest(groups, update=update, num_minibatches=num_minibatches, epochs=epochs, seed=seed)
  return MinibatchIterator(dataset, digest, len(plan))


def weighed_groups(groups: Mapping[str, Sequence[Entry]],
                   advantages: Advantages) -> tuple[Group, ...]:
  """Groups with advantages, in order of name, without what is not trained.

  Trajectories without a sampled token have nothing to learn from and are left out too.

  Raises ValueError when an advantage names no stored trajectory, is not finite, or is given to a
  trajectory without a score; and when the samples of a group do not share their prompt.
  """
  if isinstance(advantages, Mapping):
    known = {entry.key for entries in groups.values() for entry in entries}
    if unknown := sorted(set(advantages) - known):
      raise ValueError(f"{len(unknown)} advantages belong to no trajectory of this update, for "
                       f"example {unknown[0]}")
    look_up = lambda entry: advantages.get(entry.key)  # noqa: E731
  else:
    look_up = advantages
  weighed = []
  for name in sorted(groups):
    pairs = [(entry, look_up(entry)) for entry in groups[name]]
    group = tuple((entry, float(advantage)) for entry, advantage in pairs
                  if advantage is not None and entry.sampled_tokens)
    _check_group(name, group)
    if group:
      weighed.append(group)
  return tuple(weighed)


def _check_group(name: str, group: Group) -> None:
  for entry, advantage in group:
    if entry.score is None:
      raise ValueError(f"group {name}, sample {entry.sample_index}: an advantage was given to a "
                       f"trajectory without a score (outcome {entry.outcome}); leave it out")
    if not np.isfinite(advantage):
      raise ValueError(f"group {name}, sample {entry.sample_index}: advantage {advantage}")
  prompts = {(entry.prompt_length, entry.prompt_crc32) for entry, _ in group}
  if len(prompts) > 1:
    raise ValueError(f"group {name}: its samples have {len(prompts)} different prompts (lengths "
                     f"{sorted(length for length, _ in prompts)}); they must share one prompt")


def plan_minibatches(groups: Sequence[Group], *, update: int, num_minibatches: int, epochs: int,
                     seed: int, row_length: int,
                     share_prompt: bool = True) -> tuple[PlannedMinibatch, ...]:
  """All minibatches of all epochs, from facts alone."""
  if num_minibatches < 1 or epochs < 1:
    raise ValueError(f"num_minibatches={num_minibatches}, epochs={epochs}: both must be at least 1")
  if not groups:
    return ()
  hashes = name_hashes([group[0][0].group for group in groups])
  plan = []
  for epoch in range(epochs):
    order = shuffled(hashes, seed, update, epoch)
    for index, part in enumerate(np.array_split(order, min(num_minibatches, len(groups)))):
      chosen = tuple(groups[i] for i in part)
      rows = packing.plan_rows([_lengths(group) for group in chosen], row_length=row_length,
                               share_prompt=share_prompt)
      plan.append(PlannedMinibatch(epoch, index, chosen, rows))
  return tuple(plan)


def _lengths(group: Group) -> GroupLengths:
  prompt = group[0][0].prompt_length
  return GroupLengths(prompt, tuple(entry.length - prompt for entry, _ in group))


def _digest(groups: Sequence[Group], **order: int) -> str:
  """Names the data and its order: equal exactly when position k means the same minibatch."""
  facts = [(entry.group, entry.sample_index, entry.crc32, advantage)
           for group in groups for entry, advantage in group]
  return hashlib.sha256(json.dumps([facts, order], sort_keys=True).encode()).hexdigest()[:16]


class _Plan:
  """The planned minibatches as a Grain source."""

  def __init__(self, plan: Sequence[PlannedMinibatch]) -> None:
    self._plan = plan

  def __len__(self) -> int:
    return len(self._plan)

  def __getitem__(self, index) -> PlannedMinibatch:
    return self._plan[index]


@dataclasses.dataclass(frozen=True)
class _MinibatchPacker:
  """Reads and packs this process's part of a planned minibatch."""

  store: TrajectoryStore
  update: int
  row_length: int
  rows_per_microbatch: int
  process_index: int
  process_count: int

  def __call__(self, planned: PlannedMinibatch) -> Minibatch:
    mine = planned.rows[self.process_index::self.process_count]
    # The largest share decides for all, so that processes stay in step.
    share = -(-len(planned.rows) // self.process_count)
    samples = self._read(planned, mine)
    microbatches = tuple(
      packing.pack_rows(mine[start:start + self.rows_per_microbatch], samples,
                        row_length=self.row_length, num_rows=self.rows_per_microbatch,
                        num_targets=self.row_length)  # one shape for the whole run
      for start in range(0, share, self.rows_per_microbatch))
    return Minibatch(
      update=self.update, epoch=planned.epoch, index=planned.index, microbatches=microbatches,
      num_groups=len(planned.groups), num_sequences=planned.num_sequences,
      num_targets=planned.num_targets)

  def _read(self, planned: PlannedMinibatch, rows: Sequence[Row]) -> dict[tuple[int, int], Sample]:
    first_ids = np.cumsum([1] + [len(group) for group in planned.groups])
    places = [(piece.group, member) for row in rows for piece in row for member in piece.members]
    pairs = [planned.groups[group][member] for group, member in places]
    trajectories = self.store.read([entry for entry, _ in pairs])
    return {(group, member): Sample(trajectory, advantage, int(first_ids[group]) + member)
            for (group, member), (_, advantage), trajectory
            in zip(places, pairs, trajectories, strict=True)}
