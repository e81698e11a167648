"""Losses per policy token and their aggregation, in float32 and nats.

Each function takes arrays and keyword hyperparameters. `mask` is True where the policy sampled the
token; entries outside it do not matter at all, in value or gradient, even where they are NaN or
infinite: inputs are replaced *before* the arithmetic, since a `where` after it leaves 0 * inf = NaN
in the gradient.

Layout of sequences. Without `sequence_ids` the arrays are [B, T] with one sequence per row. With it
they may have any shape, e.g. packed rows [R, L] in which several completions lie: int32, 0 = no
sequence, else 1..`num_sequences` (static), each id one sequence over the whole array.

Sources: PPO (arXiv 1707.06347), dual clip (1912.09729), DAPO (2503.14476), Dr. GRPO (2503.20783),
KL estimators (Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

MODES = ("token_mean", "sequence_mean", "constant")
LEVELS = ("token", "sequence", "geometric")
RULES = ("truncate", "mask")
ESTIMATORS = ("k1", "k2", "k3")
# exp of more overflows products in float32; beyond e^20 a ratio is held, with gradient 0.
_MAX_LOG_RATIO = 20.0


def select(values: jax.Array, mask: jax.Array, fill: float = 0.0) -> jax.Array:
  """float32 `values` where `mask`, else `fill`. Apply it before log, exp or division, not after."""
  return jnp.where(mask, jnp.asarray(values, jnp.float32), fill)


# ---- aggregation ---------------------------------------------------------------------------------

def aggregate_sums(
    per_token: jax.Array, mask: jax.Array, *, mode: str = "token_mean",
    constant: float | None = None, sequence_ids: jax.Array | None = None,
    num_sequences: int | None = None) -> tuple[jax.Array, jax.Array]:
  """(numerator, denominator) of `aggregate`, float32 scalars.

  Both add up over micro-batches, devices and hosts: sum the numerators (or their gradients) and the
  denominators of everything that makes up one optimizer update, then divide once, and neither loss
  nor gradient depends on the cut. A sequence must lie within one micro-batch for the sequence-level
  modes. The denominator depends on masks only, never on parameters.
  """
  _check_aggregate(per_token, mask, mode, constant)
  mask = _in_sequence(mask, sequence_ids)
  sums = functools.partial(
      sequence_sums, mask=mask, sequence_ids=sequence_ids, num_sequences=num_sequences)
  total = jnp.sum(select(per_token, mask))
  if mode == "token_mean":
    return total, jnp.sum(mask, dtype=jnp.float32)
  lengths = sums(mask)
  present = jnp.sum(jnp.sign(lengths))  # not `> 0`, which would hide a NaN
  if constant is not None:
    return total, present * constant
  return jnp.sum(sums(per_token) / jnp.maximum(lengths, 1.0)), present


def aggregate(
    per_token: jax.Array, mask: jax.Array, *, mode: str = "token_mean",
    constant: float | None = None, sequence_ids: jax.Array | None = None,
    num_sequences: int | None = None) -> jax.Array:
  """One number from per-token losses; 0 when nothing is unmasked.

  "token_mean": sum over unmasked tokens / their count. "sequence_mean": mean over sequences of each
  one's token mean. "constant" (Dr. GRPO): sum / (number of sequences * `constant`), the constant
  being the longest allowed completion. Sequences without an unmasked token count nowhere. For data
  that comes in several pieces, see `aggregate_sums`.
  """
  return divide(*aggregate_sums(per_token, mask, mode=mode, constant=constant,
                                sequence_ids=sequence_ids, num_sequences=num_sequences))


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """numerator / denominator, 0 (with gradient 0) where the denominator is 0."""
  empty = denominator == 0
  return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def sequence_sums(
    values: jax.Array, mask: jax.Array, *, sequence_ids: jax.Array | None = None,
    num_sequences: int | None = None) -> jax.Array:
  """Masked sum of each sequence, float32 [S]: S rows, or `num_sequences` ids.

  An id above `num_sequences` makes every sum NaN, since its tokens would silently be left out.
  """
  values = select(values, mask)
  if sequence_ids is None:
    if values.ndim != 2:
      raise ValueError(f"values {values.shape}: [rows, tokens], or give sequence_ids")
    return jnp.sum(values, axis=-1)
  if num_sequences is None:
    raise ValueError("sequence_ids need num_sequences, the highest id that can occur")
  sums = jax.ops.segment_sum(
      values.ravel(), sequence_ids.ravel(), num_segments=num_sequences + 1)[1:]
  return jnp.where(jnp.max(sequence_ids, initial=0) > num_sequences, jnp.nan, sums)


def spread_sequences(
    per_sequence: jax.Array, shape: tuple[int, ...], *,
    sequence_ids: jax.Array | None = None) -> jax.Array:
  """Inverse layout of `sequence_sums`: each token gets its sequence's number, 0 if it has none."""
  if sequence_ids is None:
    return jnp.broadcast_to(per_sequence[:, None], shape)
  return jnp.concatenate([jnp.zeros(1, per_sequence.dtype), per_sequence])[sequence_ids]


# ---- policy terms --------------------------------------------------------------------------------

def ratios(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  """exp(logprobs - old_logprobs) per token; 1 outside the mask."""
  _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  log_ratio = select(logprobs, mask) - select(old_logprobs, mask)
  return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def ppo_clip(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, *,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> jax.Array:
  """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token, to be minimised.

  r = exp(logprobs - old_logprobs); 0 outside the mask. `dual_clip` c > 1 bounds the loss by -c A
  where A < 0. All arrays of one shape; old_logprobs are those of the policy as it was when the
  batch was made.
  """
  _check_clip(clip_low, clip_high, dual_clip)
  _same_shape(logprobs=logprobs, advantages=advantages)
  ratio = ratios(logprobs, old_logprobs, mask)
  advantages = select(advantages, mask)
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
  if dual_clip is not None:
    loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
  return select(loss, mask)


def clipped_tokens(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, *,
    clip_low: float = 0.2, clip_high: float = 0.2) -> jax.Array:
  """bool: tokens whose gradient `ppo_clip` stops, past the bound their advantage pushes to."""
  ratio = ratios(logprobs, old_logprobs, mask)
  advantages = select(advantages, mask)
  above = (advantages > 0) & (ratio > 1.0 + clip_high)
  below = (advantages < 0) & (ratio < 1.0 - clip_low)
  return above | below


def importance_weights(
    old_logprobs: jax.Array, behavior_logprobs: jax.Array, mask: jax.Array, *, level: str = "token",
    rule: str = "truncate", low: float = 0.0, high: float = 2.0,
    sequence_ids: jax.Array | None = None, num_sequences: int | None = None) -> jax.Array:
  """Weights that correct for a sampler differing from the learner; multiply the policy term only.

  w = exp(old_logprobs - behavior_logprobs) by "token", over the "sequence" (the product of its
  tokens'), or its "geometric" mean; a sequence's weight stands on each of its tokens. "truncate":
  min(w, high). "mask": w within [low, high], else 0. Without gradient; 0 outside the mask.
  """
  _check_weights(level, rule, low, high)
  _same_shape(old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
  mask = _in_sequence(mask, sequence_ids)
  sums = functools.partial(
      sequence_sums, mask=mask, sequence_ids=sequence_ids, num_sequences=num_sequences)
  gap = select(old_logprobs, mask) - select(behavior_logprobs, mask)
  if level != "token":
    log_weights = sums(gap)
    if level == "geometric":
      log_weights = log_weights / jnp.maximum(sums(mask), 1.0)
    gap = spread_sequences(log_weights, gap.shape, sequence_ids=sequence_ids)
  weights = jnp.exp(gap)
  if rule == "truncate":
    weights = jnp.minimum(weights, high)
  else:
    weights = jnp.where((weights < low) | (weights > high), 0.0, weights)
  return jax.lax.stop_gradient(select(weights, mask))


# ---- regularisers --------------------------------------------------------------------------------

def kl(
    logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array | None = None, *,
    estimator: str = "k3", unbiased: bool = False) -> jax.Array:
  """Estimate of KL(policy || reference) per sampled token; 0 outside the mask (None: all count).

  With d = logprobs - ref_logprobs: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1 (never negative).
  Add it to the loss with a positive weight to stay near the reference.

  Its gradient, when the tokens were sampled from the policy: of "k2" it is that of the KL;
  differentiating "k1" or "k3" as they stand is not (k1's is 0 on average), because the samples
  depend on the policy too. `unbiased` gives k1 and k3 the missing score-function factor, value
  unchanged, so that their gradient is the KL's on average; it changes nothing for k2. Off-policy
  tokens need the importance ratio as a further factor. For a penalty within the reward take it
  under `jax.lax.stop_gradient`, as k1.
  """
  if estimator not in ESTIMATORS:
    raise ValueError(f"KL estimator {estimator!r} is unknown: one of {', '.join(ESTIMATORS)}")
  mask = jnp.ones(jnp.shape(logprobs), bool) if mask is None else mask
  _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
  logprobs = select(logprobs, mask)
  difference = logprobs - select(ref_logprobs, mask)
  if estimator == "k1":
    estimate = difference
  elif estimator == "k2":
    estimate = jnp.square(difference) / 2
  else:
    held = jnp.maximum(difference, -_MAX_LOG_RATIO)
    estimate = jnp.expm1(-held) + held
  if unbiased and estimator != "k2":
    estimate = estimate * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
  return estimate


def entropy(logits: jax.Array) -> jax.Array:
  """Entropy in nats of softmax(logits), [..., V] -> float32 [...].

  Logits of -inf are outcomes that cannot happen; a row of nothing else has entropy and gradient 0.
  """
  logits = jnp.asarray(logits, jnp.float32)
  possible = logits > -jnp.inf
  logits = jnp.where(possible, logits, jnp.finfo(jnp.float32).min / 2)
  logprobs = jax.nn.log_softmax(logits, axis=-1)
  terms = jnp.where(possible, jnp.exp(logprobs) * logprobs, 0.0)
  return -jnp.sum(terms, axis=-1)


def _in_sequence(mask, sequence_ids):
  mask = jnp.asarray(mask, bool)
  if sequence_ids is None:
    return mask
  if jnp.shape(sequence_ids) != mask.shape:
    raise ValueError(f"sequence_ids {jnp.shape(sequence_ids)} and mask {mask.shape} differ")
  return mask & (sequence_ids > 0)


# ---- checks --------------------------------------------------------------------------------------

def _check_aggregate(per_token, mask, mode, constant) -> None:
  if mode not in MODES:
    raise ValueError(f"aggregation mode {mode!r} is unknown: one of {', '.join(MODES)}")
  _same_shape(per_token=per_token, mask=mask)
  if (mode == "constant") != (constant is not None):
    raise ValueError(f"mode {mode!r} with constant={constant}: 'constant' needs the longest "
                     "allowed completion in tokens, the other modes take none")
  if constant is not None and constant <= 0:
    raise ValueError(f"constant={constant} must be positive: the longest completion in tokens")


def _same_shape(**arrays) -> None:
  """Broadcasting would hide a row of one batch standing against the tokens of another."""
  shapes = {name: jnp.shape(array) for name, array in arrays.items()}
  if len(set(shapes.values())) > 1:
    raise ValueError("shapes differ: " + ", ".join(f"{n} {shape}" for n, shape in shapes.items()))


def _check_clip(clip_low, clip_high, dual_clip) -> None:
  if clip_low < 0 or clip_high < 0:
    raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: both must be 0 or more")
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(f"dual_clip={dual_clip} must be above 1, or None")


def _check_weights(level, rule, low, high) -> None:
  if level not in LEVELS:
    raise ValueError(f"importance level {level!r} is unknown: one of {', '.join(LEVELS)}")
  if rule not in RULES:
    raise ValueError(f"importance rule {rule!r} is unknown: one of {', '.join(RULES)}")
  if rule == "truncate" and low != 0.0:
    raise ValueError(f"low={low} has no meaning for rule 'truncate': leave it 0 or use 'mask'")
  if not (0.0 <= low <= high and high > 0.0):
    raise ValueError(f"importance weights need 0 <= low <= high, high > 0: low={low}, high={high}")
