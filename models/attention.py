"""Grouped-query attention and the masks that say who may attend to whom."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Not -inf: a row that may attend to nothing (padding) then averages instead of making NaN.
MASKED_SCORE = -1e30
QUERY_BLOCK = 128  # queries that go past their keys together


def attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *,
              causal: bool) -> jax.Array:
  """Softmax attention, in float32 whatever the compute dtype.

  Args:
    query: [B, T, heads, d].
    key: [B, kv_heads, d, S]; each of the kv_heads serves heads / kv_heads query heads. Head first and
      position last, each head's keys are the matrix that its queries are multiplied by as it lies there:
      on CPU a decode step is several times faster so.
    value: [B, kv_heads, S, d].
    mask: bool [B, T, S].
    causal: promises that S = T and that the mask lets no token see a later one of its row. Queries then
      go block by block past the keys up to their block's end, and scores are computed again in the
      backward pass: about half the work, and no [T, T] scores to keep.

  Returns [B, T, heads, d].
  """
  length = query.shape[1]
  if not causal or length <= QUERY_BLOCK:
    return _attend(query, key, value, mask)
  blocks = []
  for start in range(0, length, QUERY_BLOCK):
    end = min(start + QUERY_BLOCK, length)
    blocks.append(jax.checkpoint(_attend)(
      query[:, start:end], key[..., :end], value[:, :, :end], mask[:, start:end, :end]))
  return jnp.concatenate(blocks, axis=1)


def _attend(query, key, value, mask):
  batch, length, heads, head_dim = query.shape
  kv_heads, width = value.shape[1:3]
  # The queries that share a key head become the rows of one matrix per head, so that both products are
  # plain batched ones: einsum over the five dimensions makes XLA transpose the scores instead.
  grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
  rows = grouped.reshape(batch, kv_heads, -1, head_dim)
  scores = jnp.einsum("bkrd,bkds->bkrs", rows, key, preferred_element_type=jnp.float32)
  scores = scores.reshape(batch, kv_heads, -1, length, width) / math.sqrt(head_dim)
  weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED_SCORE), axis=-1)
  weights = weights.astype(value.dtype).reshape(batch, kv_heads, -1, width)
  mixed = jnp.einsum("bkrs,bksd->bkrd", weights, value)
  return mixed.reshape(grouped.shape).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def causal_mask(lengths: jax.Array, width: int) -> jax.Array:
  """Each of the first `lengths` [B] tokens of a row sees itself and those before; bool [B, width, width]."""
  index = jnp.arange(width)
  valid = index < lengths[:, None]
  return (index[:, None] >= index) & valid[:, None, :] & valid[:, :, None]


def packed_mask(segment_ids: jax.Array, branch_ids: jax.Array) -> jax.Array:
  """Who sees whom in packed rows whose completions share one prompt; int32 [B, T] twice, bool [B, T, T].

  A token sees earlier tokens of its own segment that belong to the prompt (branch 0) or to its own
  branch. Segment 0 is padding, which neither sees nor is seen.
  """
  index = jnp.arange(segment_ids.shape[1])
  segment = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] > 0)
  branch = (branch_ids[:, None, :] == 0) | (branch_ids[:, :, None] == branch_ids[:, None, :])
  return segment & branch & (index[:, None] >= index)


def cache_mask(positions: jax.Array, width: int) -> jax.Array:
  """A query at `positions` [B, T] sees cache entries up to and with its own; bool [B, T, width]."""
  return jnp.arange(width) <= positions[:, :, None]
