import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from wootz.post_training.rollout import sampling
from wootz.post_training.rollout.sampling import SamplingSettings

_sample = jax.jit(sampling.sample)


def settings(rows, temperature=1.0, top_k=0, top_p=1.0):
  return SamplingSettings(*(jnp.asarray(np.broadcast_to(value, rows), dtype) for value, dtype in (
    (temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32))))


def draw(logits, rows=400, seed=0, **limits):
  """`rows` draws from the same logits [V], each with a key of its own."""
  logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits)))
  tokens, logprobs = _sample(logits, jax.random.split(jax.random.key(seed), rows), settings(rows, **limits))
  return np.asarray(tokens), np.asarray(logprobs)


def reference_distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
  """Probabilities [V] in float64: temperature, then top-k, then top-p of what is left."""
  scaled = np.asarray(logits, np.float64) / temperature
  probabilities = np.exp(scaled - scaled.max())
  order = np.argsort(-scaled, kind="stable")
  if top_k > 0:
    probabilities[order[top_k:]] = 0
  probabilities /= probabilities.sum()
  before = np.cumsum(probabilities[order]) - probabilities[order]
  probabilities[order[before >= top_p]] = 0
  return probabilities / probabilities.sum()


def check_against(logits, expected, rows, **limits):
  """Frequencies by chi-square (rare tokens pooled), support, and the log-probabilities."""
  tokens, logprobs = draw(logits, rows=rows, **limits)
  assert np.all(expected[tokens] > 0), "drawn outside the support"
  np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=2e-5)
  counts = np.bincount(tokens, minlength=len(expected))
  frequent = expected * rows >= 5
  observed, wanted = counts[frequent], expected[frequent] * rows
  if (rest := rows - wanted.sum()) > 1e-6:
    observed, wanted = np.append(observed, rows - observed.sum()), np.append(wanted, rest)
  if len(observed) > 1:
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_sv_4a_equal_logits_are_drawn_equally_by_default():
  """SV-4 a: no default top-k; four equal logits, 400 draws."""
  tokens, logprobs = draw([2.0] * 4)
  counts = np.bincount(tokens, minlength=4)
  assert np.sum((counts - 100.0) ** 2 / 100) < 16
  np.testing.assert_allclose(logprobs, np.log(0.25), atol=1e-6)


def test_sv_4b_temperature_0_and_top_k_1_take_the_first_of_equals():
  """SV-4 b."""
  for limits in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.5}):
    tokens, logprobs = draw([1.0, 5.0, 5.0, 0.0], **limits)
    assert set(tokens) == {1}, limits
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


def test_sv_4c_top_p_1_and_top_k_0_or_minus_1_are_no_limit():
  """SV-4 c."""
  logits = np.random.default_rng(0).normal(size=4)
  plain = draw(logits)
  for limits in ({"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 4}, {"top_k": 1000}):
    for got, expected in zip(draw(logits, **limits), plain, strict=True):
      np.testing.assert_array_equal(got, expected)


def test_sv_4d_a_tiny_top_p_takes_the_largest():
  """SV-4 d."""
  tokens, logprobs = draw([0.0, 1.0, 3.0, 2.9], top_p=1e-9)
  assert set(tokens) == {2}
  np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


@pytest.mark.parametrize("limits", [
  {}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "temperature": 1.7}])
def test_draws_follow_the_distribution(limits):
  """300 tokens, so that there are two blocks and the window is smaller than the vocabulary."""
  logits = np.random.default_rng(1).normal(size=300) * 2
  check_against(logits, reference_distribution(logits, **limits), rows=4000, **limits)


@pytest.mark.parametrize("limits", [
  {"top_p": 0.9}, {"top_k": 200}, {"top_k": 200, "top_p": 0.5}, {"top_k": 129, "top_p": 0.999}])
def test_limits_beyond_the_window_are_exact_too(limits):
  """Nearly flat logits: more tokens stay than the window of 128 holds."""
  logits = np.random.default_rng(2).permutation(np.linspace(0, 0.3, 300))
  expected = reference_distribution(logits, **limits)
  check_against(logits, expected, rows=4000, **limits)


def test_top_p_is_a_share_of_the_top_k_also_where_the_window_would_hold_it():
  """130 tokens at top-k 130 of 300: a third of the mass lies beyond, so shares of the whole would differ."""
  logits = np.where(np.arange(300) < 100, 2.0, np.where(np.arange(300) < 130, 1.0, 0.9))
  limits = {"top_k": 130, "top_p": 0.6}
  expected = reference_distribution(logits, **limits)
  assert np.count_nonzero(expected) < sampling.WINDOW
  check_against(logits, expected, rows=4000, **limits)


def test_every_row_keeps_its_own_settings():
  """SV-5: a greedy, a limited, a free and a cold row side by side, each as if alone."""
  rng = np.random.default_rng(3)
  logits = jnp.asarray(rng.normal(size=(4, 300)) * 3, jnp.float32)
  keys = jax.random.split(jax.random.key(5), 4)
  rows = [{"temperature": 0.0}, {"top_k": 3, "top_p": 0.7}, {}, {"temperature": 0.3, "top_p": 0.95}]
  together = settings(4, *(np.array([row.get(name, default) for row in rows])
                           for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))))
  tokens, logprobs = _sample(logits, keys, together)
  for index, limits in enumerate(rows):
    alone = _sample(logits, keys, settings(4, **limits))  # every row with these settings
    assert tokens[index] == alone[0][index]
    assert float(logprobs[index]) == pytest.approx(float(alone[1][index]), abs=1e-6)


def test_sv_5_keys_differ_by_seed_and_position_and_by_nothing_else():
  """SV-5: 64 positions of 4 samples vary; a rerun is equal; slot and neighbours do not enter."""
  seeds = jax.random.split(jax.random.key(1), 4)
  logits = jnp.where(jnp.arange(300) < 16, jnp.zeros((4, 300)), -jnp.inf)  # 16 equal ones

  def run(order):
    return np.stack([_sample(logits, sampling.row_keys(seeds[order], jnp.full(4, t)), settings(4))[0]
                     for t in range(64)], axis=1)

  tokens = run(np.arange(4))
  np.testing.assert_array_equal(tokens, run(np.arange(4)))
  np.testing.assert_array_equal(tokens[::-1], run(np.arange(4)[::-1]))
  assert len({row.tobytes() for row in tokens}) == 4
  assert all(len(set(row)) > 8 for row in tokens)
  assert len({column.tobytes() for column in tokens.T}) > 60  # of 64, all four equal by chance 1 in 4096


def test_impossible_and_extreme_logits():
  """-inf is never drawn; a gap of 1e4 neither overflows nor hides the rest."""
  tokens, logprobs = draw([-np.inf, 1e4, -np.inf, 1e4 - 1.0], rows=400)
  assert set(tokens) == {1, 3}
  expected = np.log([1 / (1 + np.exp(-1)), 1 / (1 + np.e)])
  np.testing.assert_allclose(logprobs, np.where(tokens == 1, *expected), atol=1e-3)


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_broken_logits_show_in_the_logprob(limits):
  """NaN must not pass as a sample, greedy or not."""
  _, logprobs = draw([0.0, np.nan, 1.0, 2.0], rows=400, **limits)
  assert not np.isfinite(logprobs).any()


def test_inverse_cdf_picks_the_interval_that_the_number_falls_in():
  """Masses 1, 0, 2, 1 at places in different blocks; ends included below, excluded above."""
  masses = np.zeros((6, 600), np.float32)
  masses[:, [3, 300, 599]] = [1.0, 2.0, 1.0]
  uniform = jnp.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0])
  tokens, total = sampling._invert_cdf(jnp.asarray(masses), uniform)
  np.testing.assert_array_equal(tokens, [3, 3, 300, 300, 599, 599])
  np.testing.assert_allclose(total, 4.0)
