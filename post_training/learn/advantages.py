"""Advantages: how much better each sample, or each token, did than was expected.

Definitions differ silently between public implementations (degrees of freedom, epsilon, what the
mean is taken over); here each choice is an argument and is written down. Everything is float32.
Sources: GRPO (arXiv 2402.03300), RLOO (2402.14740), Dr. GRPO (2503.20783), GAE (1506.02438),
REINFORCE++ (2501.03262).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("std", "none", "mean")
_TOLERANCE = 4 * float(jnp.finfo(jnp.float32).eps)  # relative; differences below it are rounding


def group_advantages(
    rewards: jax.Array, valid: jax.Array, *, baseline: str = "mean", scale: str = "std",
    ddof: int = 1, eps: float = 1e-6) -> jax.Array:
  """Advantages of n samples of each of G tasks, [G, n] -> float32 [G, n].

  A sample that is not valid (bool [G, n] False) gets 0 and has no part in its siblings' baseline or
  spread: the others get what they would get in its absence, even where its reward is NaN.

  baseline: what is taken off the reward R. "mean": the group's mean. "leave_one_out": the mean of
    the group's other samples, i.e. n/(n-1) (R - mean). "none": nothing.
  scale: what the difference is divided by. "std": (spread + eps), the spread with `ddof` degrees of
    freedom taken off, from the other samples only under "leave_one_out"; not divided where that
    spread is zero. "mean": the group's mean (MaxRL); 0 where it is not positive. "none": nothing
    (Dr. GRPO).

  A group without spread teaches nothing under a group baseline: its advantages are exactly 0.
  Without a baseline it keeps its rewards.

  Raises ValueError for an unknown choice, for shapes other than [G, n], and for groups of one
  sample under a group baseline, which could never move a weight.
  """
  _check(rewards, valid, baseline, scale, ddof)
  valid = jnp.asarray(valid, bool)
  rewards = jnp.where(valid, jnp.asarray(rewards, jnp.float32), 0.0)
  low, _ = _range(rewards, valid)
  offsets = jnp.where(valid, rewards - low, 0.0)  # exactly 0 in a flat group
  centred = _centre(rewards, offsets, valid, baseline)
  if scale == "mean":
    advantages = _over_mean(centred, rewards, low + _mean(offsets, valid), valid)
  elif scale == "std":
    spread = _spread(offsets, valid, baseline, ddof)
    negligible = spread <= _TOLERANCE * jnp.max(jnp.abs(rewards), axis=-1, keepdims=True)
    advantages = centred / jnp.where(negligible, 1.0, spread + eps)
  else:
    advantages = centred
  keep = valid if baseline == "none" else valid & has_spread(rewards, valid)[:, None]
  return jnp.where(keep, advantages, 0.0)


def has_spread(rewards: jax.Array, valid: jax.Array) -> jax.Array:
  """Whether a group's valid samples differ in reward beyond rounding, [G, n] -> bool [G]."""
  valid = jnp.asarray(valid, bool)
  rewards = jnp.where(valid, jnp.asarray(rewards, jnp.float32), 0.0)
  low, high = _range(rewards, valid)
  size = jnp.max(jnp.abs(rewards), axis=-1, keepdims=True)
  return ~((high - low) <= _TOLERANCE * size)[:, 0]  # a NaN reward stays visible: it is not flat


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, *, discount: float = 1.0,
    gae_lambda: float = 0.95) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimates and returns over policy tokens only, both float32 [B, T].

  One sequence per row. Tokens the policy did not sample (mask False) are skipped as if they had
  been deleted and put back with 0; a reward that stands on one belongs to the last policy token
  before it, so an outcome reward on a trailing observation is not lost. After the last policy token
  the value is 0.
  """
  mask = jnp.asarray(mask, bool)
  rewards = _token_rewards(rewards, mask)
  values = jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)

  def step(carry, token):
    pending, next_value, next_advantage = carry
    reward, value, sampled = token
    delta = reward + pending + discount * next_value - value
    advantage = delta + discount * gae_lambda * next_advantage
    kept = (jnp.zeros_like(pending), value, advantage)
    skipped = (pending + reward, next_value, next_advantage)
    carry = jax.tree.map(lambda a, b: jnp.where(sampled, a, b), kept, skipped)
    return carry, jnp.where(sampled, advantage, 0.0)

  zero = jnp.zeros(rewards.shape[0], jnp.float32)
  tokens = (rewards.T, values.T, mask.T)
  _, advantages = jax.lax.scan(step, (zero, zero, zero), tokens, reverse=True)
  return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def reinforce_plus_plus(
    rewards: jax.Array, mask: jax.Array, *, discount: float = 1.0, eps: float = 1e-8) -> jax.Array:
  """Discounted return of each policy token, whitened over all policy tokens of the batch. [B, T].

  Whitened: (return - mean) / sqrt(max(variance, eps)) with the population variance; exactly 0 where
  all returns are alike. Rewards on tokens outside the mask count as in `gae`. The baseline form is
  this one applied to rewards from which the group's mean has been taken off.
  """
  mask = jnp.asarray(mask, bool)
  no_values = jnp.zeros(mask.shape, jnp.float32)
  returns, _ = gae(rewards, no_values, mask, discount=discount, gae_lambda=1.0)
  flat, kept = returns.reshape(1, -1), mask.reshape(1, -1)
  low, _ = _range(flat, kept)
  offsets = jnp.where(kept, flat - low, 0.0)
  centred = jnp.where(kept, offsets - _mean(offsets, kept), 0.0)
  variance = _mean(jnp.square(centred), kept)
  whitened = centred * jax.lax.rsqrt(jnp.maximum(variance, eps))
  return jnp.where(kept & has_spread(flat, kept)[:, None], whitened, 0.0).reshape(mask.shape)


def _check(rewards, valid, baseline, scale, ddof) -> None:
  if baseline not in BASELINES:
    raise ValueError(f"baseline {baseline!r} is unknown: one of {', '.join(BASELINES)}")
  if scale not in SCALES:
    raise ValueError(f"scale {scale!r} is unknown: one of {', '.join(SCALES)}")
  if ddof not in (0, 1):
    raise ValueError(f"ddof {ddof!r}: 0 (population) or 1 (sample)")
  shape = jnp.shape(rewards)
  if len(shape) != 2 or shape != jnp.shape(valid):
    raise ValueError(f"rewards {shape} and valid {jnp.shape(valid)} must both be [groups, samples]")
  if baseline != "none" and shape[1] < 2:
    raise ValueError(f"group size {shape[1]} with baseline {baseline!r} gives advantage 0 always: "
                     "use a group size of 2 or more, or baseline 'none'")


def _token_rewards(rewards, mask):
  """float32 rewards; what is not finite outside the mask is padding and becomes 0."""
  rewards = jnp.asarray(rewards, jnp.float32)
  if rewards.ndim != 2 or rewards.shape != mask.shape:
    raise ValueError(f"rewards {rewards.shape} and mask {mask.shape} must both be [rows, tokens]")
  return jnp.where(mask | jnp.isfinite(rewards), rewards, 0.0)


def _range(values, valid):
  """Lowest and highest valid value of each row, [G, 1]; both 0 in a row without any."""
  some = jnp.any(valid, axis=-1, keepdims=True)
  low = jnp.min(jnp.where(valid, values, jnp.inf), axis=-1, keepdims=True)
  high = jnp.max(jnp.where(valid, values, -jnp.inf), axis=-1, keepdims=True)
  return jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def _mean(values, valid, axis=-1):
  total = jnp.sum(jnp.where(valid, values, 0.0), axis=axis, keepdims=True)
  return total / jnp.maximum(jnp.sum(valid, axis=axis, keepdims=True), 1)


def _centre(rewards, offsets, valid, baseline):
  if baseline == "none":
    return rewards
  centred = offsets - _mean(offsets, valid)
  if baseline == "leave_one_out":
    size = jnp.sum(valid, axis=-1, keepdims=True)
    centred = centred * size / jnp.maximum(size - 1, 1)
  return centred


def _spread(offsets, valid, baseline, ddof):
  """Standard deviation that each sample is measured by; 0 where too few samples define one."""
  if baseline == "leave_one_out":  # row i of each [n, n] holds the group without sample i
    others = valid[:, None, :] & ~jnp.eye(valid.shape[1], dtype=bool)
    return _std(jnp.broadcast_to(offsets[:, None, :], others.shape), others, ddof)[..., 0]
  return _std(offsets, valid, ddof)


def _std(values, valid, ddof):
  squares = jnp.where(valid, jnp.square(values - _mean(values, valid)), 0.0)
  freedom = jnp.sum(valid, axis=-1, keepdims=True) - ddof
  total = jnp.sum(squares, axis=-1, keepdims=True)
  return jnp.where(freedom > 0, jnp.sqrt(total / jnp.maximum(freedom, 1)), 0.0)


def _over_mean(centred, rewards, mean, valid):
  """(R - mean) / mean; a mean of 0 or below says nothing about proportions and gives 0."""
  positive = mean > _TOLERANCE * jnp.max(jnp.abs(rewards), axis=-1, keepdims=True)
  return jnp.where(positive & valid, centred / jnp.where(positive, mean, 1.0), 0.0)
