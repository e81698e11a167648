"""Estimates against values computed by hand or with scipy 1.17.1."""

import itertools

import numpy as np
import pytest

from wootz.post_training.evaluate.statistics import (
  bootstrap_mean,
  paired_bootstrap,
  pass_at_k,
  wilson_interval,
)


@pytest.mark.parametrize("n, c, k, expected", [  # 1 - scipy.stats.hypergeom(n, c, k).pmf(0)
  (10, 3, 1, 0.3), (10, 3, 5, 0.9166666666666666), (4, 1, 2, 0.5),
  (16, 5, 8, 0.9871794871794872), (8, 0, 4, 0.0), (8, 6, 4, 1.0),
])
def test_pass_at_k_values(n, c, k, expected):
  assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
  solved = [True, False, False, True, False, False]
  draws = [any(draw) for draw in itertools.combinations(solved, 3)]
  assert pass_at_k(6, 2, 3) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("n, c, k", [(3, 0, 4), (0, 0, 1), (3, 3, 4), (3, 1, 0), (3, 4, 1)])
def test_pass_at_k_refuses_what_cannot_be_estimated(n, c, k):
  """RW (inspect_ai 8afe47927): fewer than k samples, none right, must not give 1.0."""
  with pytest.raises(ValueError):
    pass_at_k(n, c, k)


@pytest.mark.parametrize("successes, trials, confidence, low, high", [
  # scipy.stats.binomtest(successes, trials).proportion_ci(confidence, "wilson")
  (8, 10, 0.95, 0.4901624715366418, 0.9433178485456248),
  (0, 20, 0.95, 0.0, 0.16112515805281935),
  (20, 20, 0.95, 0.8388748419471808, 1.0),
  (172, 256, 0.95, 0.6121878040809798, 0.7264802452726269),
  (64, 256, 0.90, 0.20825560937519783, 0.2969733923268386),
])
def test_wilson_values(successes, trials, confidence, low, high):
  interval = wilson_interval(successes, trials, confidence=confidence)
  assert interval.estimate == successes / trials
  assert interval.low == pytest.approx(low, abs=1e-12)
  assert interval.high == pytest.approx(high, abs=1e-12)


@pytest.mark.parametrize("successes, trials", [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(successes, trials):
  with pytest.raises(ValueError):
    wilson_interval(successes, trials)


@pytest.mark.parametrize("confidence, low, high", [(0.95, 0.24, 0.365), (0.90, 0.245, 0.355)])
def test_bootstrap_of_zeros_and_ones_has_binomial_quantiles(confidence, low, high):
  """scipy.stats.binom.ppf(tails, 200, 0.3) / 200; the resampled mean is exactly binomial."""
  interval = bootstrap_mean([1.0] * 60 + [0.0] * 140, confidence=confidence, resamples=20_000)
  assert interval.estimate == pytest.approx(0.3)
  assert interval.low == pytest.approx(low, abs=0.0051)  # one step of 1/200
  assert interval.high == pytest.approx(high, abs=0.0051)


def test_bootstrap_value_by_scipy():
  """scipy.stats.bootstrap(..., method="percentile", n_resamples=200000): 0.0333 to 0.3750."""
  gains = [.1, -.3, .5, .2, .0, .7, -.1, .4, .3, .25, .6, -.2]
  interval = bootstrap_mean(gains, resamples=50_000)
  assert interval.low == pytest.approx(0.0333, abs=0.006)
  assert interval.high == pytest.approx(0.3750, abs=0.006)


def test_bootstrap_is_decided_by_its_seed():
  values = np.linspace(0, 1, 30) ** 2
  assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
  assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_pairing_removes_what_both_share():
  generator = np.random.default_rng(0)
  before = generator.random(100)
  interval = paired_bootstrap(before, before + 0.1)
  assert (interval.low, interval.high) == (pytest.approx(0.1), pytest.approx(0.1))
  unpaired = bootstrap_mean(before)
  assert unpaired.high - unpaired.low > 0.1


def test_bootstrap_refuses_missing_values_and_unequal_lengths():
  for values in ([], [0.1, float("nan")]):
    with pytest.raises(ValueError):
      bootstrap_mean(values)
  with pytest.raises(ValueError, match="2 values before and 1 after"):
    paired_bootstrap([0.1, 0.2], [0.3])
