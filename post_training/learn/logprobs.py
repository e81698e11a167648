"""Log-probabilities of chosen tokens, a chunk of tokens at a time: [B, T, vocabulary] never exists."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wootz.data.packing import PackedRows
from wootz.models import attention, transformer
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.sharding.rules import constrain

CHUNK = 256  # tokens whose logits exist at once, spread over the rows


def target_logprobs(
  params: Tree,
  config: ModelConfig,
  rows: PackedRows,
  *,
  temperature: float = 1.0,
  compute_dtype: Any = jnp.float32,
  remat: str = "none",
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Scores the rows' targets under softmax(logits / temperature).

  Returns:
    logprobs and entropies, float32 [B, N], nats, at `rows.target_index`. Where target_mask is False the
    numbers are finite and mean nothing. The entropies carry no gradient.
  """
  hidden, _ = transformer.forward(
    params, config, rows.tokens, positions=rows.positions,
    mask=attention.packed_mask(rows.segment_ids, rows.branch_ids),
    compute_dtype=compute_dtype, remat=remat)
  # The logits at position t score token t + 1: a target is read off its predecessor's hidden state.
  places = jnp.take_along_axis(rows.predecessor, rows.target_index, axis=1)
  hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
  targets = jnp.take_along_axis(rows.tokens, rows.target_index, axis=1)
  return token_logprobs(params, hidden, targets, rows.target_mask, temperature=temperature, chunk=chunk)


def token_logprobs(params: Tree, hidden: jax.Array, targets: jax.Array, mask: jax.Array, *,
                   temperature: float = 1.0, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
  """Logprob of each target [B, N] and entropy, given the hidden states [B, N, D] that predict them.

  A chunk without any target in `mask` [B, N] is skipped and gives zeros: one shape serves rows with few
  targets and with many.
  """
  rows, count = targets.shape
  chunk = max(1, min(chunk // rows, count))
  padding = -count % chunk

  def in_chunks(array):
    padded = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
    return jnp.moveaxis(padded.reshape(rows, -1, chunk, *array.shape[2:]), 1, 0)

  def skip(piece):
    zeros = jnp.zeros(piece[1].shape, jnp.float32)
    return zeros, zeros

  def score(piece):
    logits = transformer.unembed(params, piece[0]) / temperature
    logits = constrain(logits, ("batch", None, "act_vocab"))
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, piece[1][..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(logits - normaliser[..., None])
    return chosen - normaliser, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)

  @jax.checkpoint
  def score_or_skip(piece):
    return jax.lax.cond(jnp.any(piece[2]), score, skip, piece)

  scored = jax.lax.map(score_or_skip, (in_chunks(hidden), in_chunks(targets), in_chunks(mask)))
  logprobs, entropies = (jnp.moveaxis(part, 0, 1).reshape(rows, -1)[:, :count] for part in scored)
  return logprobs, entropies
