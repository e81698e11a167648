"""Advantages against values worked by hand, and properties that hold for any rewards."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from wootz.post_training.learn import advantages as adv

ONE_OF_FOUR = [[1.0, 0.0, 0.0, 0.0]]
SETTINGS = hypothesis.settings(max_examples=25, deadline=None)
CHOICES = [(b, s) for b in adv.BASELINES for s in adv.SCALES]
_reinforce = jax.jit(adv.reinforce_plus_plus, static_argnames="discount")
_gae = jax.jit(adv.gae, static_argnames=("discount", "gae_lambda"))
_jitted = jax.jit(adv.group_advantages, static_argnames=("baseline", "scale", "ddof"))


def advantages(rewards, valid=None, **kwargs):
  rewards = np.asarray(rewards, np.float32)
  valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
  return np.asarray(_jitted(rewards, valid, **kwargs))


@pytest.mark.parametrize("kwargs, expected", [
    ({}, [1.5, -0.5, -0.5, -0.5]),  # GRPO
    ({"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),  # Dr. GRPO
    ({"ddof": 0}, [1.7320508, -0.57735, -0.57735, -0.57735]),
    ({"baseline": "leave_one_out", "scale": "none"}, [1, -1 / 3, -1 / 3, -1 / 3]),  # RLOO
    # the others of the first sample are flat: not divided; of the rest: mean 1/3, spread sqrt(1/3)
    ({"baseline": "leave_one_out"}, [1, -0.57735, -0.57735, -0.57735]),
    ({"scale": "mean"}, [3, -1, -1, -1]),  # MaxRL
    ({"baseline": "none", "scale": "none"}, [1, 0, 0, 0]),
    ({"baseline": "none"}, [2, 0, 0, 0]),
])
def test_values_by_hand(kwargs, expected):
  np.testing.assert_allclose(advantages(ONE_OF_FOUR, **kwargs)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps, expected", [
    (1e-6, [-1.078, -0.359, 0.359, 1.078]), (1e-3, [-0.0148, -0.0049, 0.0049, 0.0148])])
def test_epsilon_matters_where_the_spread_is_small(eps, expected):
  rewards = [[1.0, 1.00001, 1.00002, 1.00003]]
  np.testing.assert_allclose(advantages(rewards, eps=eps)[0], expected, rtol=0.03)


def test_spread_is_taken_per_group_not_per_batch():
  got = advantages([[0, 1], [0, 10]])
  np.testing.assert_allclose(got, [[-0.70711, 0.70711]] * 2, rtol=1e-4)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", adv.SCALES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.7, 1 / 3, -0.1, 1e-30])
def test_flat_groups_are_exactly_zero(baseline, scale, value):
  assert not advantages(np.full((3, 7), value), baseline=baseline, scale=scale).any()


def test_flatness_is_judged_group_by_group():
  """AD-2: one flat group beside one with spread; then both flat."""
  got = advantages([[1, 1], [0, 1]])
  np.testing.assert_allclose(got, [[0, 0], [-0.70711, 0.70711]], rtol=1e-4)
  assert not advantages([[1, 1], [1, 1]]).any()
  np.testing.assert_array_equal(
      adv.has_spread(np.float32([[1, 1], [0, 1]]), np.ones((2, 2), bool)), [False, True])


def test_rewards_that_differ_by_rounding_only_are_flat():
  rounded = np.float32(0.1) + np.float32(0.2)
  rewards = np.float32([[rounded, np.nextafter(rounded, np.float32(1))]])
  assert rewards[0, 0] != rewards[0, 1]
  assert not advantages(rewards).any()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_group_of_one_is_refused_under_a_group_baseline(baseline):
  """AD-3 (a)."""
  with pytest.raises(ValueError, match="group size 1 .*" + baseline):
    advantages([[1.0]], baseline=baseline)
  assert advantages([[1.0]], baseline="none", scale="none") == 1.0


def test_rows_of_different_length_are_normalised_each_by_its_own_numbers():
  """AD-3 (b), population spread."""
  got = advantages([[1, 2, 3], [4, 8, 99]], [[1, 1, 1], [1, 1, 0]], ddof=0)
  np.testing.assert_allclose(got, [[-1.2247, 0, 1.2247], [-1, 1, 0]], atol=1e-4)


def test_rejected_sample_does_not_move_its_siblings():
  """AD-4."""
  got = advantages([[1, 0, 1]], [[1, 1, 0]], scale="none")
  np.testing.assert_array_equal(got, [[0.5, -0.5, 0]])


@SETTINGS
@hypothesis.given(
    hnp.arrays(np.float32, (2, 5), elements=st.sampled_from([0.0, 0.25, 0.7, 1.0])),
    hnp.arrays(bool, (2, 5)), st.sampled_from(CHOICES),
    st.sampled_from([0.0, 99.0, np.nan, np.inf, -np.inf]))
def test_invalid_samples_are_as_if_absent(rewards, valid, choice, junk):
  baseline, scale = choice
  got = advantages(np.where(valid, rewards, junk), valid, baseline=baseline, scale=scale)
  assert np.isfinite(got).all() and not got[~valid].any()
  for row, keep, result in zip(rewards, valid, got, strict=True):
    if keep.sum() >= 2:
      alone = _reference(row[keep].astype(np.float64), baseline, scale)
      np.testing.assert_allclose(result[keep], alone, rtol=1e-4, atol=1e-6)


def _reference(rewards, baseline, scale):
  """The definitions, sample by sample, for one group without invalid samples."""
  flat = np.ptp(rewards) < 1e-6
  if flat and baseline != "none":
    return np.zeros(rewards.shape)
  result = []
  for i, reward in enumerate(rewards):
    group = np.delete(rewards, i) if baseline == "leave_one_out" else rewards
    advantage = reward if baseline == "none" else reward - group.mean()
    if scale == "std" and group.size > 1 and np.ptp(group) > 1e-6:
      advantage /= group.std(ddof=1) + 1e-6
    if scale == "mean":
      advantage = advantage / rewards.mean() if rewards.mean() > 0 else 0.0
    result.append(advantage)
  return result


@SETTINGS
@hypothesis.given(
    hnp.arrays(np.float32, (2, 5), elements=st.floats(-1, 1, width=16)),
    hnp.arrays(bool, (2, 5)), st.permutations(range(5)), st.sampled_from(CHOICES))
def test_order_within_a_group_does_not_matter(rewards, valid, order, choice):
  kwargs = dict(zip(("baseline", "scale"), choice, strict=True))
  got = advantages(rewards, valid, **kwargs)[:, order]
  moved = advantages(rewards[:, order], valid[:, order], **kwargs)
  np.testing.assert_allclose(got, moved, rtol=1e-3, atol=1e-4)


def test_mean_scale_is_zero_where_the_mean_is_not_positive():
  assert not advantages([[0, 0], [-1, 1], [-3, 1]], scale="mean").any()


def test_a_missing_reward_of_a_valid_sample_is_not_hidden():
  assert np.isnan(advantages([[np.nan, 1.0, 0.0]])).any()


def test_without_jit_gives_the_same():
  valid = np.ones((1, 4), bool)
  np.testing.assert_allclose(
      adv.group_advantages(np.float32(ONE_OF_FOUR), valid), advantages(ONE_OF_FOUR), rtol=1e-5)


@pytest.mark.parametrize("kwargs, message", [
    ({"baseline": "median"}, "median.*leave_one_out"), ({"scale": "var"}, "var.*std"),
    ({"ddof": 2}, "ddof")])
def test_unknown_choices_are_named(kwargs, message):
  with pytest.raises(ValueError, match=message):
    advantages(ONE_OF_FOUR, **kwargs)


def test_shapes_are_checked():
  with pytest.raises(ValueError, match=r"\[groups, samples\]"):
    adv.group_advantages(np.zeros(3), np.ones(3, bool))


# ---- token level ---------------------------------------------------------------------------------

@pytest.mark.parametrize("reward_at", [3, 4])
def test_gae_skips_observations(reward_at):
  """AD-5: A o o A o; the final reward may stand on the last observation."""
  mask = np.array([[1, 0, 0, 1, 0]], bool)
  rewards = np.zeros((1, 5), np.float32)
  rewards[0, reward_at] = 1
  got, returns = _gae(rewards, np.zeros((1, 5)), mask, discount=1.0, gae_lambda=0.5)
  np.testing.assert_allclose(got, [[0.5, 0, 0, 1, 0]])
  np.testing.assert_allclose(returns, [[0.5, 0, 0, 1, 0]])


def test_gae_by_hand_with_values_and_discount():
  # last: 1 - .6 = .4; first: 0 + .9*.6 - .5 = .04, plus .9*.5*.4 = .22
  got, returns = _gae(
      np.float32([[0, 1]]), np.float32([[0.5, 0.6]]), np.ones((1, 2), bool), discount=0.9,
      gae_lambda=0.5)
  np.testing.assert_allclose(got, [[0.22, 0.4]], rtol=1e-5)
  np.testing.assert_allclose(returns, [[0.72, 1.0]], rtol=1e-5)


@SETTINGS
@hypothesis.given(hnp.arrays(np.float32, (6,), elements=st.floats(-1, 1, width=16)),
                  hnp.arrays(np.float32, (6,), elements=st.floats(-1, 1, width=16)),
                  hnp.arrays(bool, (6,)))
def test_gae_equals_plain_gae_of_the_policy_tokens_alone(rewards, values, mask):
  rewards = np.where(mask, rewards, 0)
  got, _ = _gae(rewards[None], np.where(mask, values, np.nan)[None], mask[None], discount=0.9)
  kept_rewards, kept_values, running, expected = rewards[mask], values[mask], 0.0, []
  for i in reversed(range(mask.sum())):
    following = kept_values[i + 1] if i + 1 < mask.sum() else 0.0
    running = kept_rewards[i] + 0.9 * following - kept_values[i] + 0.9 * 0.95 * running
    expected.insert(0, running)
  np.testing.assert_allclose(np.asarray(got)[0][mask], expected, atol=1e-5)
  assert not np.asarray(got)[0][~mask].any()


def test_reinforce_plus_plus_by_hand():
  # returns 1 1 1 and 0 0 0 over six tokens: mean .5, population spread .5
  mask = np.array([[1, 1, 0, 1], [1, 1, 1, 0]], bool)
  rewards = np.float32([[0, 0, np.nan, 1], [0, 0, 0, np.nan]])
  np.testing.assert_allclose(
      _reinforce(rewards, mask), [[1, 1, 0, 1], [-1, -1, -1, 0]], rtol=1e-5)
  # discount .5: returns .5, 1 -> mean .75, spread .25
  np.testing.assert_allclose(
      _reinforce(np.float32([[0, 1]]), np.ones((1, 2), bool), discount=0.5), [[-1, 1]],
      rtol=1e-4)


def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero():
  rewards = np.zeros((2, 3), np.float32)
  rewards[:, 2] = 0.7
  assert not np.asarray(_reinforce(rewards, np.ones((2, 3), bool))).any()
