"""The clipped policy objective of GRPO (arXiv 2402.03300) over one micro-batch, as sums that add up."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from wootz.data.packing import PackedRows
from wootz.post_training.learn import losses


@flax.struct.dataclass
class PolicyBatch:
  """One micro-batch: packed rows, and what other policies thought of their targets [B, N]."""

  rows: PackedRows
  old_logprobs: Any = None  # float32 [B, N], the learner's before this batch; None: the current ones
  reference_logprobs: Any = None  # float32 [B, N]; None: no reference


def grpo_objective(
  logprobs: jax.Array,
  entropy: jax.Array,
  batch: PolicyBatch,
  *,
  num_sequences: int,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coefficient: float = 0.0,
  kl_estimator: str = "k3",
  aggregation: str = "token_mean",
  constant: float | None = None,
  correction: str = "none",
  correction_level: str = "token",
  correction_low: float = 0.0,
  correction_high: float = 2.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Numerator of the loss, and sums for the metrics.

  Args:
    logprobs, entropy: float32 [B, N] of the policy being trained, from `target_logprobs`.
    batch: the micro-batch.
    num_sequences: highest sequence id in the whole minibatch (static).
    clip_low, clip_high, dual_clip: see `losses.ppo_clip`.
    kl_coefficient: weight of the KL to the reference, in the loss, per token; k1 and k3 carry the
      score-function factor so that the gradient is that of the KL.
    aggregation, constant: see `losses.aggregate`.
    correction: "none", or the rule ("truncate", "mask") of `losses.importance_weights` for a sampler whose
      logprobs differ from the learner's.

  Returns:
    The numerator, to be divided by the sum of "denominator" over all micro-batches of the update; and
    sums over tokens under the names of METRICS, with "tokens" as their common denominator.
  """
  rows, mask = batch.rows, batch.rows.target_mask
  behavior, advantages, sequence_ids = (
    jnp.take_along_axis(field, rows.target_index, axis=1)
    for field in (rows.behavior_logprobs, rows.advantages, rows.sequence_ids))
  layout: dict[str, Any] = {"sequence_ids": sequence_ids, "num_sequences": num_sequences}
  old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
  clip = {"clip_low": clip_low, "clip_high": clip_high}
  per_token = losses.ppo_clip(logprobs, old, advantages, mask, dual_clip=dual_clip, **clip)
  if correction != "none":
    per_token *= losses.importance_weights(old, behavior, mask, level=correction_level,
                                           rule=correction, low=correction_low,
                                           high=correction_high, **layout)
  sums = _metric_sums(logprobs, old, behavior, entropy, mask)
  sums["clip_fraction"] = _total(losses.clipped_tokens(logprobs, old, advantages, mask, **clip), mask)
  if batch.reference_logprobs is not None:
    penalty = losses.kl(logprobs, batch.reference_logprobs, mask, estimator=kl_estimator,
                        unbiased=True)
    per_token += kl_coefficient * penalty
    sums["kl"] = _total(losses.kl(logprobs, batch.reference_logprobs, mask), mask)
  numerator, sums["denominator"] = losses.aggregate_sums(
    per_token, mask, mode=aggregation, constant=constant, **layout)
  sums["loss"] = numerator
  return numerator, jax.lax.stop_gradient(sums)


def _total(values, mask):
  return jnp.sum(losses.select(values, mask))


def _metric_sums(logprobs, old, behavior, entropy, mask) -> dict[str, jax.Array]:
  gap = losses.select(old, mask) - losses.select(behavior, mask)
  return {
    "tokens": jnp.sum(mask, dtype=jnp.float32),
    "ratio": _total(losses.ratios(logprobs, old, mask), mask),
    "kl_behavior": _total(losses.kl(logprobs, behavior, mask), mask),
    "entropy": _total(entropy, mask),
    "logprob_gap": jnp.sum(jnp.abs(gap)),
  }
