"""Losses against values worked by hand, and properties that hold for any batch."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.post_training.learn import losses

SETTINGS = hypothesis.settings(max_examples=25, deadline=None)
LOSSES = np.float32([[1, 2, 0, 0], [3, 1, 2, 6]])
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
JUNK = [np.nan, np.inf, -np.inf, 1e30]
POLICY, REFERENCE = jnp.array([0.3, -0.2, 0.5]), jnp.array([0.0, 0.4, -0.1])
MODES = [("token_mean", None), ("sequence_mean", None), ("constant", 4)]


# ---- aggregation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("mode, constant, expected", [
    ("token_mean", None, 2.5), ("sequence_mean", None, 2.25), ("constant", 4, 1.875)])
def test_aggregate_by_hand(mode, constant, expected):
  assert losses.aggregate(LOSSES, MASK, mode=mode, constant=constant) == expected
  # the same two sequences packed into one row, apart from each other, behind tokens of no sequence
  packed = np.float32([[9, 3, 1, 1, 2, 2, 6, 9]])
  ids = np.int32([[0, 2, 2, 1, 1, 2, 2, 0]])
  mask = np.ones((1, 8), bool)  # id 0 is no sequence, whatever the mask says
  got = losses.aggregate(
      packed, mask, mode=mode, constant=constant, sequence_ids=ids, num_sequences=5)
  assert got == expected


def test_first_answer_token_is_scored_and_nothing_after_the_end():
  """LM-1: the logits at position t score token t + 1."""
  token_mask = np.array([[0, 0, 0, 1, 1]], bool)
  total, count = losses.aggregate_sums(np.float32([[1, 2, 4, 8]]), token_mask[:, 1:])
  assert (total, count) == (12, 2)
  assert losses.aggregate(np.float32([[1, 2, 4, 8]]), token_mask[:, 1:]) == 6


@pytest.mark.parametrize("mode, constant", MODES)
def test_masked_out_answers_leave_numerator_and_denominator(mode, constant):
  """LM-5: a truncated answer is masked; then every answer is."""
  ones, mask = np.ones((2, 6), np.float32), np.zeros((2, 6), bool)
  mask[0, :4] = True
  loss = functools.partial(losses.aggregate, mode=mode, constant=constant)
  assert loss(ones, mask) == 1.0
  value, gradient = jax.value_and_grad(loss)(jnp.ones((2, 6)), np.zeros((2, 6), bool))
  assert value == 0 and not gradient.any()


def test_denominator_is_that_of_one_update():
  """NM-2: two updates of three micro-batches of 10 tokens, loss 1 each."""
  sums = [losses.aggregate_sums(np.ones((2, 5)), np.ones((2, 5), bool)) for _ in range(6)]
  for update in (sums[:3], sums[3:]):
    numerator, denominator = (sum(part) for part in zip(*update, strict=True))
    assert losses.divide(numerator, denominator) == 1.0


def test_means_do_not_depend_on_micro_batches_or_ranks():
  """NM-3."""
  per_sample, ones = np.float32([[1], [3]]), np.ones((2, 1), bool)
  parts = [losses.aggregate_sums(per_sample[i:i + 1], ones[:1]) for i in range(2)]
  assert losses.aggregate(per_sample, ones) == 2.0
  assert losses.divide(*map(sum, zip(*parts, strict=True))) == 2.0
  rank_a = losses.aggregate_sums(np.float32([[4]]), np.ones((1, 1), bool))
  rank_b = losses.aggregate_sums(np.zeros((1, 9), np.float32), np.ones((1, 9), bool))
  np.testing.assert_allclose(losses.divide(rank_a[0] + rank_b[0], rank_a[1] + rank_b[1]), 0.4)


def test_segment_numbers_are_not_weights():
  """NM-4."""
  ids = np.int32([[1, 1, 2, 2, 0]])
  assert losses.aggregate(np.float32([[1, 1, 3, 3, 9]]), ids > 0) == 2.0
  assert losses.aggregate(np.float32([[1, 1, 3, 3, 9]]), ids) == 2.0


def test_nan_outside_the_mask_leaves_value_and_gradient():
  """NM-5 (a), (b), (c)."""
  mask = np.array([[1, 1, 0]], bool)
  assert losses.aggregate(np.float32([[1, 3, np.nan]]), mask) == 2.0

  def mean_log(x):
    return losses.aggregate(jnp.log(losses.select(x, mask, 1.0)), mask)

  np.testing.assert_array_equal(jax.grad(mean_log)(jnp.array([[1.0, 2.0, 0.0]])), [[0.5, 0.25, 0]])
  impossible = jnp.full(4, -jnp.inf)
  assert losses.entropy(impossible) == 0
  np.testing.assert_array_equal(jax.grad(losses.entropy)(impossible), np.zeros(4))


def _policy_loss(arrays, mask, mode, constant):
  """Everything of a GRPO step that is in this module, as one scalar of all its inputs."""
  new, old, behavior, ref, advantages = arrays
  term = losses.ppo_clip(new, old, advantages, mask, dual_clip=3.0)
  for level in losses.LEVELS:
    term = term * losses.importance_weights(old, behavior, mask, level=level)
  for estimator in losses.ESTIMATORS:
    term = term + losses.kl(new, ref, mask, estimator=estimator, unbiased=True)
  return losses.aggregate(term, mask, mode=mode, constant=constant)


_value_and_grad = jax.jit(jax.value_and_grad(_policy_loss), static_argnums=(2, 3))
_ARRAYS = hnp.arrays(np.float32, (5, 3, 4), elements=st.floats(-2, 0, width=16))


@SETTINGS
@hypothesis.given(_ARRAYS, hnp.arrays(bool, (3, 4)), st.sampled_from(MODES), st.sampled_from(JUNK))
def test_masked_entries_never_matter(arrays, mask, mode, junk):
  """NM-5: in value and in gradient, whichever input they stand in."""
  clean, clean_gradient = _value_and_grad(np.where(mask, arrays, 0), mask, *mode)
  value, gradient = _value_and_grad(np.where(mask, arrays, np.float32(junk)), mask, *mode)
  np.testing.assert_array_equal(value, clean)
  np.testing.assert_array_equal(gradient, clean_gradient)
  assert np.isfinite(gradient).all() and not np.asarray(gradient)[:, ~mask].any()


@functools.partial(jax.jit, static_argnums=(3, 4))
@functools.partial(jax.value_and_grad, has_aux=True)
def _packed_sums(per_token, mask, ids, mode, constant):
  return losses.aggregate_sums(
      per_token, mask, mode=mode, constant=constant, sequence_ids=ids, num_sequences=8)


@SETTINGS
@hypothesis.given(
    hnp.arrays(np.float32, (4, 6), elements=st.floats(-4, 4, width=16)), hnp.arrays(bool, (4, 6)),
    st.integers(1, 3), st.sampled_from(MODES))
def test_cut_into_micro_batches_changes_neither_value_nor_gradient(per_token, mask, cut, mode):
  """NM-2, NM-3: two sequences in each of four packed rows, cut after `cut` rows."""
  ids = np.int32([[2 * row + 1] * 3 + [2 * row + 2] * 3 for row in range(4)])
  (whole, count), gradient = _packed_sums(per_token, mask, ids, *mode)
  (first, count_1), gradient_1 = _packed_sums(per_token[:cut], mask[:cut], ids[:cut], *mode)
  (second, count_2), gradient_2 = _packed_sums(per_token[cut:], mask[cut:], ids[cut:], *mode)
  assert count == count_1 + count_2
  np.testing.assert_allclose(first + second, whole, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(np.concatenate([gradient_1, gradient_2]), gradient, rtol=1e-6)
  # and the layout does not matter either: one sequence per row gives the same
  rows = losses.aggregate_sums(
      per_token.reshape(8, 3), mask.reshape(8, 3), mode=mode[0], constant=mode[1])
  np.testing.assert_allclose(rows, (whole, count), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs, message", [
    ({"mode": "mean"}, "mean.*token_mean"), ({"mode": "constant"}, "longest allowed completion"),
    ({"constant": 4}, "token_mean"), ({"mode": "constant", "constant": 0}, "positive"),
    ({"mode": "sequence_mean", "sequence_ids": np.ones((2, 4), int)}, "num_sequences"),
    ({"mode": "sequence_mean", "sequence_ids": np.ones(3, int), "num_sequences": 2}, "differ")])
def test_aggregate_refuses(kwargs, message):
  with pytest.raises(ValueError, match=message):
    losses.aggregate(LOSSES, MASK, **kwargs)


def test_sequence_id_out_of_range_cannot_pass_unseen():
  ids = np.int32([[1, 1, 3, 3], [2, 2, 2, 2]])
  kwargs = {"mode": "sequence_mean", "sequence_ids": ids}
  assert np.isnan(losses.aggregate(LOSSES, MASK, num_sequences=2, **kwargs))
  assert np.isfinite(losses.aggregate(LOSSES, MASK, num_sequences=3, **kwargs))


# ---- policy terms --------------------------------------------------------------------------------

def test_ppo_clip_by_hand():
  ratio = np.float32([[1.5, 1.5, 0.5, 0.5, 1.1, 5.0]])
  advantages = np.float32([[2, -2, 2, -2, 1, -1]])
  mask = np.ones((1, 6), bool)
  got = losses.ppo_clip(np.log(ratio), np.zeros((1, 6)), advantages, mask, clip_high=0.28)
  np.testing.assert_allclose(got, [[-2.56, 3, -1, 1.6, -1.1, 5]], rtol=1e-5)
  got = losses.ppo_clip(np.log(ratio), np.zeros((1, 6)), advantages, mask, dual_clip=3.0)
  np.testing.assert_allclose(got, [[-2.4, 3, -1, 1.6, -1.1, 3]], rtol=1e-5)
  clipped = losses.clipped_tokens(np.log(ratio), np.zeros((1, 6)), advantages, mask)
  np.testing.assert_array_equal(clipped, [[1, 0, 0, 1, 0, 0]])


def test_ppo_gradient_is_the_policy_gradient_at_ratio_one_and_stops_where_clipped():
  def loss(new, old, a):
    return losses.ppo_clip(new, old, a, jnp.ones((1, 4), bool)).sum()

  old, advantages = jnp.full((1, 4), -1.0), jnp.array([[2.0, -3.0, 2.0, -3.0]])
  np.testing.assert_allclose(jax.grad(loss)(old, old, advantages), -advantages, rtol=1e-6)
  moved = old + jnp.log(jnp.array([[1.5, 0.5, 0.5, 1.5]]))
  np.testing.assert_allclose(jax.grad(loss)(moved, old, advantages), [[0, 0, -1, 4.5]], rtol=1e-5)


def test_shapes_that_would_broadcast_are_refused():
  """An advantage per sequence or per column must not stand against a batch of tokens."""
  with pytest.raises(ValueError, match=r"logprobs \(2, 4\), advantages \(4,\)"):
    losses.ppo_clip(LOSSES, LOSSES, LOSSES[0], MASK)
  with pytest.raises(ValueError, match=r"ref_logprobs \(2, 1\)"):
    losses.kl(LOSSES, LOSSES[:, :1], MASK)


@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_extreme_ratios_stay_finite(gap):
  def loss(new):
    advantages, mask = jnp.array([[1.0, -1.0]]), jnp.ones((1, 2), bool)
    return losses.ppo_clip(new, jnp.zeros((1, 2)), advantages, mask, dual_clip=3.0).sum()

  value, gradient = jax.value_and_grad(loss)(jnp.full((1, 2), gap))
  assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("kwargs", [{"clip_low": -0.1}, {"clip_high": -1.0}, {"dual_clip": 1.0}])
def test_ppo_clip_refuses(kwargs):
  with pytest.raises(ValueError, match=next(iter(kwargs))):
    losses.ppo_clip(LOSSES, LOSSES, LOSSES, MASK, **kwargs)


@pytest.mark.parametrize("kwargs, expected", [
    ({}, [[2, 0.5, 0], [1.5, 1.5, 0.4]]),
    ({"rule": "mask", "low": 0.5}, [[0, 0.5, 0], [1.5, 1.5, 0]]),
    ({"level": "sequence"}, [[2, 2, 0], [0.9, 0.9, 0.9]]),  # products 4 * .5 and 1.5 * 1.5 * .4
    ({"level": "geometric"}, [[1.41421, 1.41421, 0], [0.965489] * 3]),  # square and cube root
    ({"level": "geometric", "rule": "mask", "low": 0.5, "high": 1.2}, [[0, 0, 0], [0.965489] * 3])])
def test_importance_weights_by_hand(kwargs, expected):
  mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
  weights = np.float32([[4, 0.5, 7], [1.5, 1.5, 0.4]])
  got = losses.importance_weights(np.log(weights), np.zeros((2, 3)), mask, **kwargs)
  np.testing.assert_allclose(got, expected, rtol=1e-4)
  ids = np.int32([[1, 1, 2, 2, 2, 0]])  # the same two sequences in one row
  flat = losses.importance_weights(
      np.log(np.float32([[4, 0.5, 1.5, 1.5, 0.4, 7]])), np.zeros((1, 6)), ids > 0,
      sequence_ids=ids, num_sequences=3, **kwargs)
  np.testing.assert_allclose(np.ravel(flat)[:5], np.asarray(expected)[mask], rtol=1e-4)
  assert flat[0, 5] == 0


def test_importance_weights_carry_no_gradient():
  def weight(old):
    return losses.importance_weights(old, jnp.zeros((1, 3)), jnp.ones((1, 3), bool)).sum()

  assert not jax.grad(weight)(jnp.full((1, 3), 0.1)).any()


@pytest.mark.parametrize("kwargs, message", [
    ({"level": "row"}, "row.*geometric"), ({"rule": "clip"}, "clip.*truncate"),
    ({"low": 0.5}, "low=0.5.*truncate"), ({"rule": "mask", "low": 3.0}, "low <= high")])
def test_importance_weights_refuse(kwargs, message):
  with pytest.raises(ValueError, match=message):
    losses.importance_weights(LOSSES, LOSSES, MASK, **kwargs)


# ---- regularisers --------------------------------------------------------------------------------

@pytest.mark.parametrize("estimator, expected", [("k1", 0.2), ("k2", 0.02), ("k3", 0.018731)])
def test_kl_by_hand(estimator, expected):
  got = losses.kl(np.float32(-1.0), np.float32(-1.2), estimator=estimator)
  np.testing.assert_allclose(got, expected, rtol=1e-4)


def _expected_kl(logits, estimator, unbiased):
  """Expectation over all three actions, with the sampling probabilities held fixed."""
  logprobs = jax.nn.log_softmax(logits)
  probabilities = jax.lax.stop_gradient(jnp.exp(logprobs))
  terms = losses.kl(logprobs, jax.nn.log_softmax(REFERENCE), estimator=estimator, unbiased=unbiased)
  return jnp.sum(probabilities * terms)


_TRUE_GRADIENT = [0.0224, -0.1794, 0.1570]


@pytest.mark.parametrize("estimator, unbiased, expected", [
    ("k1", False, [0, 0, 0]), ("k3", False, [0.0592, -0.2247, 0.1655]),
    ("k2", False, _TRUE_GRADIENT),
    ("k1", True, _TRUE_GRADIENT), ("k2", True, _TRUE_GRADIENT), ("k3", True, _TRUE_GRADIENT)])
def test_kl_gradients(estimator, unbiased, expected):
  """KL-2."""
  gradient = jax.grad(_expected_kl)(POLICY, estimator, unbiased)
  np.testing.assert_allclose(gradient, expected, atol=1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_value_is_the_exact_one_on_average(estimator):
  np.testing.assert_allclose(_expected_kl(POLICY, estimator, True), 0.1198, atol=1e-4)


def test_kl_pulls_towards_the_reference():
  """KL-1: all advantages 0, weight 1, one plain gradient step of size 1."""
  after = POLICY - jax.grad(_expected_kl)(POLICY, "k2", False)
  np.testing.assert_allclose(_expected_kl(after, "k1", False), 0.0681, atol=1e-4)


@pytest.mark.parametrize("estimator", losses.ESTIMATORS)
def test_kl_of_equals_is_exactly_zero(estimator):
  """KL-1."""
  logprobs = jax.nn.log_softmax(POLICY)
  assert not losses.kl(logprobs, logprobs, estimator=estimator).any()


@SETTINGS
@hypothesis.given(hnp.arrays(np.float32, (16,), elements=st.floats(-30, 30, width=32)))
def test_k3_is_never_negative(difference):
  """KL-2."""
  assert (np.asarray(losses.kl(difference, np.zeros(16))) >= 0).all()
  got = losses.kl(np.float32([-1, 1]), np.zeros(2))
  np.testing.assert_allclose(got, [0.71828, 0.36788], rtol=1e-4)


def test_unknown_estimator_is_named():
  with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
    losses.kl(LOSSES, LOSSES, estimator="k4")


def test_entropy_by_hand():
  np.testing.assert_allclose(losses.entropy(jnp.zeros((2, 8))), np.log(8), rtol=1e-6)
  logits = jnp.log(jnp.array([0.5, 0.25, 0.25, 0.0]))  # 1.5 bits, one outcome impossible
  np.testing.assert_allclose(losses.entropy(logits), 1.5 * np.log(2), rtol=1e-6)
  gradient = jax.grad(losses.entropy)(logits)
  probabilities = np.array([0.5, 0.25, 0.25])  # dH/dx = -p (log p + H)
  expected = -probabilities * (np.log(probabilities) + 1.5 * np.log(2))
  np.testing.assert_allclose(gradient, [*expected, 0], atol=1e-6)
