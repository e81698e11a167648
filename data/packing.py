"""Packs groups of trajectories into rows in which the samples of a group share their one prompt.

A row of T tokens holds segments one after another. A segment is one prompt, stored once, followed
by completions of that prompt, called branches. Token i may attend to token j exactly when

    segment_ids[i] == segment_ids[j] != 0, j <= i, and branch_ids[j] in {0, branch_ids[i]}

so each completion sees the prompt and itself, as if it stood alone behind its own prompt. Positions
count from the prompt's first token and continue in each completion, so rotary phases are those of
the unshared form. The token that predicts the first token of a completion is the prompt's last
token, not the token before it in the row: `predecessor` says so for every token.

Rows are planned from lengths alone, so a loader can plan an epoch without reading a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import chex
import flax.struct
import numpy as np

from wootz.data.records import Trajectory


@flax.struct.dataclass
class PackedRows:
  """B packed rows of T tokens, and the N places of each row whose logprob is needed."""

  tokens: chex.Array  # int32 [B, T]
  positions: chex.Array  # int32 [B, T], 0 at each prompt's first token
  segment_ids: chex.Array  # int32 [B, T], 1, 2, ... in row order; 0 where padding
  branch_ids: chex.Array  # int32 [B, T], 0 in the prompt, k >= 1 in the segment's k-th completion
  predecessor: chex.Array  # int32 [B, T], index in the row of the token that predicts this one
  loss_mask: chex.Array  # bool [B, T], True where the policy sampled the token
  behavior_logprobs: chex.Array  # float32 [B, T], nats, 0 where not sampled
  advantages: chex.Array  # float32 [B, T], the completion's advantage where sampled, else 0
  sequence_ids: chex.Array  # int32 [B, T], one number >= 1 per completion, 0 elsewhere
  target_index: chex.Array  # int32 [B, N], places with loss in row order, 0 where unused
  target_mask: chex.Array  # bool [B, N], which of target_index are used


@dataclasses.dataclass(frozen=True)
class GroupLengths:
  """The lengths, in tokens, that planning needs of one group."""

  prompt: int
  completions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
  """Completions of one group that stand in one row behind one copy of their prompt."""

  group: int  # index of the group
  members: tuple[int, ...]  # indices of its completions
  length: int  # tokens, prompt included


Row = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
  """A trajectory as the learner weighs it."""

  trajectory: Trajectory
  advantage: float
  sequence_id: int  # >= 1, unique within the optimizer update


def plan_rows(groups: Sequence[GroupLengths], *, row_length: int,
              share_prompt: bool = True) -> tuple[Row, ...]:
  """Places every completion of every group in a row; first-fit decreasing, deterministic.

  A group too long for one row is split between completions, and each part repeats the prompt. With
  `share_prompt=False` each completion gets a row of its own: the form that sharing must equal.

  Raises ValueError when one prompt with one completion is longer than a row.
  """
  pieces = [piece for index, group in enumerate(groups)
            for piece in _split_group(index, group, row_length, share_prompt)]
  if not share_prompt:
    return tuple((piece,) for piece in pieces)
  return tuple(tuple(pieces[i] for i in row)
               for row in _first_fit_decreasing([piece.length for piece in pieces], row_length))


def _split_group(index: int, group: GroupLengths, row_length: int,
                 share_prompt: bool) -> list[Piece]:
  longest = max(group.completions, default=0)
  if group.prompt + longest > row_length:
    raise ValueError(
      f"group {index}: a prompt of {group.prompt} tokens with a completion of {longest} needs "
      f"{group.prompt + longest} tokens and a row has {row_length}: raise row_length, or lower the "
      "limits on prompt and completion")
  if share_prompt:
    parts = _first_fit_decreasing(group.completions, row_length - group.prompt)
  else:
    parts = [[member] for member in range(len(group.completions))]
  return [Piece(index, tuple(sorted(part)),
                group.prompt + sum(group.completions[member] for member in part))
          for part in parts]


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
  """Bins of indices; the longest first, each into the first bin with room; ties by index."""
  bins: list[list[int]] = []
  room: list[int] = []
  for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    place = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
    if place == len(bins):
      bins.append([])
      room.append(capacity)
    bins[place].append(index)
    room[place] -= lengths[index]
  return bins


def target_bucket(count: int, row_length: int, buckets: int = 8) -> int:
  """`count` rounded up to one of `buckets` sizes, so that few shapes are ever compiled."""
  step = -(-row_length // buckets)
  return min(max(-(-count // step), 1) * step, row_length)


def pack_rows(rows: Sequence[Row], samples: Mapping[tuple[int, int], Sample], *, row_length: int,
              num_rows: int | None = None, num_targets: int | None = None) -> PackedRows:
  """Fills planned rows; numpy arrays.

  Args:
    rows: from `plan_rows`.
    samples: by (group, completion), at least those that `rows` mention.
    row_length: T, as planned with.
    num_rows: B; rows beyond the planned ones are empty and weigh nothing. Default: as planned.
    num_targets: N; default: the largest number of sampled tokens of a row, bucketed.

  Raises ValueError when a group's samples do not share their prompt, or B or N is too small.
  """
  num_rows = len(rows) if num_rows is None else num_rows
  if len(rows) > num_rows:
    raise ValueError(f"{len(rows)} planned rows do not fit into {num_rows}")
  arrays = _empty_arrays(num_rows, row_length)
  for number, row in enumerate(rows):
    start = 0
    for segment_id, piece in enumerate(row, 1):
      members = [samples[piece.group, member] for member in piece.members]
      start = _fill_segment({name: array[number] for name, array in arrays.items()}, members,
                            start, segment_id)
  index, mask = _targets(arrays["loss_mask"], num_targets)
  return PackedRows(**arrays, target_index=index, target_mask=mask)


def pack_groups(groups: Sequence[Sequence[tuple[Trajectory, float]]], *, row_length: int,
                share_prompt: bool = True, num_rows: int | None = None,
                num_targets: int | None = None) -> PackedRows:
  """Plans and fills at once: groups of (trajectory, advantage); sequence ids in the order given."""
  lengths: list[GroupLengths] = []
  samples: dict[tuple[int, int], Sample] = {}
  for number, group in enumerate(groups):
    prompts = {trajectory.prompt_length for trajectory, _ in group}
    if len(prompts) != 1:
      raise ValueError(f"group {number} has prompts of {sorted(prompts)} tokens; its samples must "
                       "share one prompt")
    prompt = prompts.pop()
    lengths.append(GroupLengths(prompt, tuple(len(t.tokens) - prompt for t, _ in group)))
    for member, (trajectory, advantage) in enumerate(group):
      samples[number, member] = Sample(trajectory, advantage, len(samples) + 1)
  rows = plan_rows(lengths, row_length=row_length, share_prompt=share_prompt)
  return pack_rows(rows, samples, row_length=row_length, num_rows=num_rows,
                   num_targets=num_targets)


def _empty_arrays(num_rows: int, row_length: int) -> dict[str, np.ndarray]:
  dtypes = {"tokens": np.int32, "positions": np.int32, "segment_ids": np.int32,
            "branch_ids": np.int32, "predecessor": np.int32, "loss_mask": np.bool_,
            "behavior_logprobs": np.float32, "advantages": np.float32, "sequence_ids": np.int32}
  return {name: np.zeros((num_rows, row_length), dtype) for name, dtype in dtypes.items()}


def _fill_segment(row: dict[str, np.ndarray], members: Sequence[Sample], start: int,
                  segment_id: int) -> int:
  """Writes a prompt and its completions from `start` on; returns the first free place."""
  first = members[0].trajectory
  prompt = first.prompt_length
  last_of_prompt = start + prompt - 1
  place = slice(start, start + prompt)
  row["tokens"][place] = first.tokens[:prompt]
  row["positions"][place] = np.arange(prompt)
  row["segment_ids"][place] = segment_id
  row["predecessor"][start + 1:start + prompt] = np.arange(start, last_of_prompt)
  start += prompt
  for branch_id, sample in enumerate(members, 1):
    _check_same_prompt(first, sample.trajectory)
    start = _fill_branch(row, sample, start, segment_id, branch_id, last_of_prompt)
  return start


def _fill_branch(row: dict[str, np.ndarray], sample: Sample, start: int, segment_id: int,
                 branch_id: int, last_of_prompt: int) -> int:
  trajectory, prompt = sample.trajectory, sample.trajectory.prompt_length
  length = len(trajectory.tokens) - prompt
  place = slice(start, start + length)
  mask = trajectory.loss_mask[prompt:]
  row["tokens"][place] = trajectory.tokens[prompt:]
  row["positions"][place] = prompt + np.arange(length)
  row["segment_ids"][place] = segment_id
  row["branch_ids"][place] = branch_id
  row["predecessor"][place] = np.arange(start - 1, start + length - 1)
  row["predecessor"][start:start + min(length, 1)] = last_of_prompt
  row["loss_mask"][place] = mask
  row["behavior_logprobs"][place] = np.where(mask, trajectory.behavior_logprobs[prompt:], 0.0)
  row["advantages"][place] = np.where(mask, sample.advantage, 0.0)
  row["sequence_ids"][place] = sample.sequence_id
  return start + length


def _check_same_prompt(first: Trajectory, other: Trajectory) -> None:
  if not np.array_equal(first.tokens[:first.prompt_length], other.tokens[:other.prompt_length]):
    raise ValueError(f"samples {first.sample_index} and {other.sample_index} of group "
                     f"{first.group} have different prompts ({first.prompt_length} and "
                     f"{other.prompt_length} tokens); samples of a group must share one prompt")


def _targets(loss_mask: np.ndarray, num_targets: int | None) -> tuple[np.ndarray, np.ndarray]:
  """Places with loss, row by row, padded to a common number."""
  counts = loss_mask.sum(axis=1)
  most = int(counts.max(initial=0))
  if num_targets is None:
    num_targets = target_bucket(most, loss_mask.shape[1])
  if most > num_targets:
    raise ValueError(f"a row has {most} sampled tokens and num_targets is {num_targets}")
  mask = np.arange(num_targets)[None] < counts[:, None]
  index = np.zeros(mask.shape, np.int32)
  index[mask] = np.nonzero(loss_mask)[1]
  return index, mask
