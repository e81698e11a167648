from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from wootz.data import packing
from wootz.data.packing import GroupLengths, pack_groups, plan_rows, target_bucket


@st.composite
def group_specs(draw):
  """Groups as (prompt length, [(completion length, fed places)]), and a sufficient row length."""
  groups = draw(st.lists(st.tuples(
    st.integers(1, 6), st.lists(st.tuples(st.integers(1, 7), st.sets(st.integers(0, 6))),
                                min_size=1, max_size=5)), min_size=1, max_size=5))
  longest = max(prompt + length for prompt, completions in groups for length, _ in completions)
  return groups, draw(st.integers(longest, longest + 20))


def make_groups(specs, make_trajectory):
  """Every token id is unique, so a token in a row names its trajectory and place."""
  fresh = iter(range(1, 10**6))
  groups, advantage = [], iter(np.arange(1, 1000) / 8)
  for number, (prompt_length, completions) in enumerate(specs):
    prompt = [next(fresh) for _ in range(prompt_length)]
    groups.append([
      (make_trajectory(task_id=str(number), sample_index=i, prompt=prompt, fed=fed,
                       completion=[next(fresh) for _ in range(length)]), float(next(advantage)))
      for i, (length, fed) in enumerate(completions)])
  return groups


def attended(rows, row, i):
  """Places that place i of a row may attend to, by the rule in the module's docstring."""
  segment, branch = rows.segment_ids[row], rows.branch_ids[row]
  return [j for j in range(i + 1)
          if segment[i] == segment[j] != 0 and branch[j] in (0, branch[i])]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(group_specs(), st.booleans())
def test_each_completion_sees_its_prompt_and_itself_only(make_trajectory, case, share_prompt):
  """From every place the visible tokens and positions are those of the trajectory on its own."""
  specs, row_length = case
  groups = make_groups(specs, make_trajectory)
  rows = pack_groups(groups, row_length=row_length, share_prompt=share_prompt)
  trajectories = {t.tokens[k]: (t, k, a) for group in groups for t, a in group
                  for k in range(t.prompt_length, len(t.tokens))}
  found = Counter()
  for row, i in np.argwhere(rows.branch_ids > 0):
    trajectory, k, advantage = trajectories[rows.tokens[row, i]]
    found[rows.tokens[row, i]] += 1
    seen = attended(rows, row, i)
    np.testing.assert_array_equal(rows.tokens[row, seen], trajectory.tokens[:k + 1])
    np.testing.assert_array_equal(rows.positions[row, seen], np.arange(k + 1))
    before = attended(rows, row, rows.predecessor[row, i])
    np.testing.assert_array_equal(rows.tokens[row, before], trajectory.tokens[:k])
    sampled = trajectory.loss_mask[k]
    assert rows.loss_mask[row, i] == sampled
    assert rows.behavior_logprobs[row, i] == trajectory.behavior_logprobs[k]
    assert rows.advantages[row, i] == (np.float32(advantage) if sampled else 0)
  assert found == Counter(trajectories.keys())  # each completion token stands in exactly one place


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(group_specs())
def test_prompts_and_padding_carry_no_loss(make_trajectory, case):
  """LM-1, LM-2, LM-3: the mask comes from the records, whatever the ids are."""
  specs, row_length = case
  groups = make_groups(specs, make_trajectory)
  rows = pack_groups(groups, row_length=row_length)
  outside = rows.branch_ids == 0
  for field in ("loss_mask", "behavior_logprobs", "advantages", "sequence_ids"):
    assert not getattr(rows, field)[outside].any(), field
  padding = rows.segment_ids == 0
  for field in ("tokens", "positions", "branch_ids", "predecessor"):
    assert not getattr(rows, field)[padding].any(), field
  prompt = outside & ~padding
  for row, i in np.argwhere(prompt):
    assert rows.predecessor[row, i] == (i - 1 if rows.positions[row, i] else 0)
  sequences = {t.tokens[-1]: number for number, t in enumerate(
    (t for group in groups for t, _ in group), 1)}
  for row, i in np.argwhere(np.isin(rows.tokens, list(sequences))):
    assert rows.sequence_ids[row, i] == sequences[rows.tokens[row, i]]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(group_specs())
def test_targets_list_each_place_with_loss_once(make_trajectory, case):
  specs, row_length = case
  rows = pack_groups(make_groups(specs, make_trajectory), row_length=row_length)
  listed = np.zeros_like(rows.loss_mask)
  for row in range(len(rows.tokens)):
    places = rows.target_index[row][rows.target_mask[row]]
    assert len(set(places)) == len(places)
    listed[row, places] = True
  np.testing.assert_array_equal(listed, rows.loss_mask)
  assert not rows.target_index[~rows.target_mask].any()


def test_one_row_by_hand(make_trajectory):
  """Two samples of a three-token prompt and a second group, written out."""
  groups = [[(make_trajectory(prompt=(7, 8, 9), completion=(1, 2)), 1.0),
             (make_trajectory(prompt=(7, 8, 9), completion=(3,), sample_index=1), -1.0)],
            [(make_trajectory(task_id="b", prompt=(5,), completion=(6, 4), fed={0}), 0.5)]]
  rows = pack_groups(groups, row_length=10)
  expected = {
    "tokens": [7, 8, 9, 1, 2, 3, 5, 6, 4, 0], "positions": [0, 1, 2, 3, 4, 3, 0, 1, 2, 0],
    "segment_ids": [1, 1, 1, 1, 1, 1, 2, 2, 2, 0], "branch_ids": [0, 0, 0, 1, 1, 2, 0, 1, 1, 0],
    "predecessor": [0, 0, 1, 2, 3, 2, 0, 6, 7, 0], "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0, 1, 0],
    "advantages": [0, 0, 0, 1, 1, -1, 0, 0, 0.5, 0], "sequence_ids": [0, 0, 0, 1, 1, 2, 0, 3, 3, 0]}
  for field, values in expected.items():
    np.testing.assert_array_equal(getattr(rows, field), [values], err_msg=field)
  np.testing.assert_array_equal(rows.target_index[rows.target_mask], [3, 4, 5, 8])


def test_segments_do_not_weigh(make_trajectory):
  """NM-4: later documents of a row count once, not by their segment number."""
  groups = [[(make_trajectory(task_id=str(i), prompt=(9,), completion=(1, 2)), 1.0)]
            for i in range(2)]
  rows = pack_groups(groups, row_length=7)
  losses = np.array([[0, 1, 1, 0, 3, 3, 9]])
  np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 2, 2, 2, 0]])
  assert rows.loss_mask.dtype == bool
  assert (losses * rows.loss_mask).sum() / rows.loss_mask.sum() == 2.0


def test_positions_pass_the_int16_limit(make_trajectory):
  """PK-3: place 32768 is 32768."""
  rows = pack_groups([[(make_trajectory(prompt=[1] * 32768, completion=(2, 3)), 1.0)]],
                     row_length=32770)
  assert rows.positions[0, 32768:].tolist() == [32768, 32769]


def test_a_long_group_is_split_between_completions(make_trajectory):
  group = [(make_trajectory(prompt=(7, 8), completion=[i] * 4, sample_index=i), float(i))
           for i in range(5)]
  rows = pack_groups([group], row_length=10)
  assert rows.tokens.shape == (3, 10)
  np.testing.assert_array_equal(rows.tokens[:, :2], [[7, 8]] * 3)
  assert sorted(rows.sequence_ids[rows.loss_mask]) == sorted([1, 2, 3, 4, 5] * 4)


def test_a_sample_longer_than_a_row_is_an_error_with_numbers(make_trajectory):
  """The tail of an over-long sample never becomes a text of its own."""
  with pytest.raises(ValueError, match="prompt of 3 tokens with a completion of 5.* 8 tokens.* 7"):
    pack_groups([[(make_trajectory(completion=range(5)), 1.0)]], row_length=7)


@pytest.mark.parametrize("other", [(1, 2, 4), (1, 2)])
def test_different_prompts_in_a_group_are_refused(make_trajectory, other):
  """TK-5: a group is one prompt."""
  with pytest.raises(ValueError, match="share one prompt"):
    pack_groups([[(make_trajectory(), 1.0), (make_trajectory(prompt=other, sample_index=1), 1.0)]],
                row_length=20)


def test_too_few_rows_or_targets_are_refused(make_trajectory):
  group = [(make_trajectory(completion=[5] * 4), 1.0)]
  with pytest.raises(ValueError, match="1 planned rows do not fit into 0"):
    pack_groups([group], row_length=8, num_rows=0)
  with pytest.raises(ValueError, match="4 sampled tokens and num_targets is 3"):
    pack_groups([group], row_length=8, num_targets=3)


lengths = st.lists(st.tuples(st.integers(1, 10), st.lists(st.integers(1, 10), min_size=1)),
                   max_size=12)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(lengths, st.integers(20, 60))
def test_plans_hold_every_completion_once_within_the_row(groups, row_length):
  groups = [GroupLengths(prompt, tuple(completions)) for prompt, completions in groups]
  rows = plan_rows(groups, row_length=row_length)
  assert rows == plan_rows(groups, row_length=row_length)
  members = Counter()
  for row in rows:
    assert 0 < sum(piece.length for piece in row) <= row_length
    for piece in row:
      members.update((piece.group, member) for member in piece.members)
      completions = groups[piece.group].completions
      assert piece.length == groups[piece.group].prompt + sum(completions[m] for m in piece.members)
  assert members == Counter((g, m) for g, group in enumerate(groups)
                            for m in range(len(group.completions)))
  # First fit never leaves two rows that would fit into one.
  used = sorted(sum(piece.length for piece in row) for row in rows)
  assert len(used) < 2 or used[0] + used[1] > row_length


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 500), st.integers(1, 500))
def test_target_buckets_are_few_and_large_enough(count, row_length):
  hypothesis.assume(count <= row_length)
  assert count <= target_bucket(count, row_length) <= row_length
  assert len({target_bucket(n, row_length) for n in range(row_length + 1)}) <= 8


def test_empty_rows_weigh_nothing(make_trajectory):
  rows = pack_groups([[(make_trajectory(), 1.0)]], row_length=8, num_rows=3)
  assert isinstance(rows, packing.PackedRows)
  assert not rows.segment_ids[1:].any() and not rows.target_mask[1:].any()
