"""Drawing one token per row from logits, with the log-probability of the distribution drawn from."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

WINDOW = 128  # top-k and top-p are resolved among this many largest logits, else by a full sort
_BLOCK = 256  # vocabulary entries per block of the two-level search in `_invert_cdf`


@flax.struct.dataclass
class SamplingSettings:
  """Per-row settings, arrays so that new values never recompile; S rows."""

  temperature: jax.Array  # float32 [S]; 0 takes the largest logit
  top_k: jax.Array  # int32 [S]; 0 or below: no limit
  top_p: jax.Array  # float32 [S]; 1 or above: no limit


def row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
  """One random key per row from its own seed key [S] and the position sampled for, int32 [S].

  Neither slot nor step nor neighbours enter, so a sample can be drawn again alone.
  """
  return jax.vmap(jax.random.fold_in)(seeds, positions)


def sample(logits: jax.Array, keys: jax.Array, settings: SamplingSettings):
  """Draws from softmax(logits / temperature) cut to top-k, then top-p of what is left.

  Args:
    logits: float32 [S, V].
    keys: typed random keys [S].
    settings: per-row settings.

  Returns:
    tokens int32 [S] and logprobs float32 [S], nats, of the token under the distribution drawn from
    (0 at temperature 0, where there is only one token). Ties go to the lower id.
  """
  greedy = settings.temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, settings.temperature)[:, None]
  uniform = jax.vmap(jax.random.uniform)(keys)
  vocab = logits.shape[-1]
  limited = ~greedy & (((settings.top_k > 0) & (settings.top_k < vocab)) | (settings.top_p < 1))
  drawn, logprobs = jax.lax.cond(
    jnp.any(limited), _sample_limited, lambda scaled, uniform, *_: _sample_full(scaled, uniform),
    scaled, uniform, settings, limited)
  tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
  certain = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), 0.0, jnp.nan)  # broken logits must show
  return tokens.astype(jnp.int32), jnp.where(greedy, certain, logprobs)


def _sample_full(scaled, uniform):
  peak = jnp.max(scaled, axis=-1, keepdims=True)
  masses = jnp.exp(scaled - peak)
  tokens, total = _invert_cdf(masses, uniform)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - peak[:, 0] - jnp.log(total)


def _invert_cdf(masses, uniform):
  """First index whose cumulative mass exceeds uniform * total; [S, V], [S] give int32 [S], float32 [S].

  Searches blocks, then inside one block: two short cumulative sums instead of one over the vocabulary.
  """
  rows, vocab = masses.shape
  padded = jnp.pad(masses, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
  block_ends = jnp.cumsum(jnp.sum(padded, axis=-1), axis=-1)
  total = block_ends[:, -1]
  # Rounding must not carry the target up to the total, which no cumulative sum exceeds.
  target = jnp.minimum(uniform, 1 - 1e-6) * total
  block = jnp.argmax(block_ends > target[:, None], axis=-1)
  begin = jnp.where(block > 0, jnp.take_along_axis(block_ends, block[:, None] - 1, axis=-1)[:, 0], 0.0)
  inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
  exceeds = begin[:, None] + jnp.cumsum(inside, axis=-1) > target[:, None]
  # Rounding may leave no entry above the target, or point at one of mass zero: take the last real one.
  last_real = _BLOCK - 1 - jnp.argmax((inside > 0)[:, ::-1], axis=-1)
  place = jnp.where(jnp.any(exceeds, axis=-1), jnp.argmax(exceeds, axis=-1), last_real)
  return block * _BLOCK + jnp.minimum(place, last_real), total


def _sample_limited(scaled, uniform, settings, limited):
  """Rows with top-k or top-p draw among the largest logits; the others as if there were no limit."""
  width = min(WINDOW, scaled.shape[-1])
  values, ids = jax.lax.top_k(scaled, width)
  total = jax.nn.logsumexp(scaled, axis=-1)
  kept, spills = _kept(values, total, settings, scaled.shape[-1])
  tokens, logprobs = jax.lax.cond(
    jnp.any(spills & limited), lambda: _draw_by_full_sort(scaled, uniform, total, settings),
    lambda: _draw_kept(values, ids, kept, uniform))
  free_tokens, free_logprobs = _sample_full(scaled, uniform)
  return jnp.where(limited, tokens, free_tokens), jnp.where(limited, logprobs, free_logprobs)


def _kept(values, total, settings, vocab):
  """Which of the W largest values [S, W], sorted, stay; and whether any beyond the window would too."""
  width = values.shape[-1]
  rank = jnp.arange(width)
  top_k = jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
  inside_k = rank < top_k
  # Mass that top-p is a share of: that of the top-k tokens, or of the whole vocabulary.
  window_mass = jax.nn.logsumexp(jnp.where(inside_k, values, -jnp.inf), axis=-1)
  reference = jnp.where(top_k[:, 0] <= width, window_mass, total)
  probabilities = jnp.where(inside_k, jnp.exp(values - reference[:, None]), 0.0)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  share = jnp.where(settings.top_p < 1, settings.top_p, jnp.inf)[:, None]  # sums may round to above 1
  kept = inside_k & ((before < share) | (rank == 0))
  # A top-k that reaches beyond the window has a mass that the window does not know.
  outside = (top_k[:, 0] > width) & (kept[:, -1] | (top_k[:, 0] < vocab))
  return kept, outside


def _draw_kept(values, ids, kept, uniform):
  masses = jnp.where(kept, jnp.exp(values - values[:, :1]), 0.0)
  place, mass = _invert_cdf(masses, uniform)
  chosen = jnp.take_along_axis(values, place[:, None], axis=-1)[:, 0]
  tokens = jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]
  return tokens, chosen - values[:, 0] - jnp.log(mass)


def _draw_by_full_sort(scaled, uniform, total, settings):
  values, ids = jax.lax.top_k(scaled, scaled.shape[-1])
  kept, _ = _kept(values, total, settings, scaled.shape[-1])
  return _draw_kept(values, ids, kept, uniform)
