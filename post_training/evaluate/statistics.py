"""Estimates and intervals for evaluations: pass@k, proportions, and differences over tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Interval:
  """An estimate with the ends of its confidence interval, all in the unit of the estimate."""

  estimate: float
  low: float
  high: float


def pass_at_k(n: int, c: int, k: int) -> float:
  """Unbiased probability that at least one of k samples solves, from c solved ones of n.

  1 - C(n-c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").
  Raises ValueError for fewer than k samples, from which it cannot be estimated.
  """
  if not 0 <= c <= n:
    raise ValueError(f"{c} of {n} samples solved: must be between 0 and {n}")
  if not 1 <= k <= n:
    raise ValueError(f"pass@{k} from {n} samples: draw at least {max(k, 1)} samples per task, and "
                     "ask for k of 1 or more")
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson_interval(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
  """Wilson's score interval of a proportion (Wilson 1927); honest at 0 and at all successes.

  Raises ValueError without trials.
  """
  if trials < 1 or not 0 <= successes <= trials:
    raise ValueError(f"{successes} successes of {trials} trials: no proportion")
  z = NormalDist().inv_cdf(0.5 + confidence / 2)
  share = successes / trials
  shrink = 1 + z * z / trials
  center = (share + z * z / (2 * trials)) / shrink
  half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
  # At the ends the bound equals the share exactly; rounding must not push it past.
  return Interval(share, max(0.0, min(share, center - half)), min(1.0, max(share, center + half)))


def bootstrap_mean(values: Sequence[float] | np.ndarray, *, seed: int = 0, confidence: float = 0.95,
                   resamples: int = RESAMPLES) -> Interval:
  """Mean of one value per task, with the percentile bootstrap over tasks.

  Tasks are resampled, not samples: the samples of one task are no independent evidence about the
  domain. Deterministic for a seed. Raises ValueError for no or non-finite values.
  """
  array = np.asarray(values, dtype=np.float64)
  if array.ndim != 1 or array.size == 0 or not np.all(np.isfinite(array)):
    raise ValueError(f"need at least one finite value per task, got {array!r}")
  generator = np.random.default_rng(seed)
  # In slices, so that memory stays small for thousands of tasks.
  means = np.concatenate([
    array[generator.integers(array.size, size=(min(500, resamples - start), array.size))].mean(1)
    for start in range(0, resamples, 500)])
  low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(array.mean()), float(low), float(high))


def paired_bootstrap(before: Sequence[float], after: Sequence[float], *, seed: int = 0,
                     confidence: float = 0.95, resamples: int = RESAMPLES) -> Interval:
  """Mean gain `after - before` over the same tasks in the same order, resampling whole pairs.

  Raises ValueError when the lengths differ or nothing is given.
  """
  if len(before) != len(after):
    raise ValueError(f"{len(before)} values before and {len(after)} after: pair them by task")
  gains = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
  return bootstrap_mean(gains, seed=seed, confidence=confidence, resamples=resamples)
