"""The one forward function: training, scoring, prefill and decode all go through it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wootz.models import attention, layers
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.sharding.rules import constrain

# One layer's keys and values, each [B, kv_heads, S, head_dim]: entry s belongs to position s.
LayerCache = tuple[jax.Array, jax.Array]

_REMAT_POLICIES = {
  "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}
REMAT = ("none", *_REMAT_POLICIES)


def forward(
  params: Tree,
  config: ModelConfig,
  tokens: jax.Array,
  *,
  positions: jax.Array,
  mask: jax.Array,
  cache: Any = None,
  compute_dtype: Any = jnp.float32,
  remat: str = "none",
) -> tuple[jax.Array, Any]:
  """Runs the decoder on B rows of T tokens.

  Args:
    params: tree of the family's `param_specs`; "layers" either stacked (one tree with a leading layer
      dimension, compiled once by scan) or a tuple of per-layer trees (unrolled; see `unstack_layers`).
    tokens: int32 [B, T].
    positions: int32 [B, T], position of each token in its own text, from 0.
    mask: bool, who may attend to whom: [B, T, T] without a cache, where no token may see a later one of
      its row, [B, T, S] with one.
    cache: None, or per-layer `LayerCache`s (a tuple of them, with per-layer params), S positions long. The
      tokens' keys and values are written at their positions before attention reads it. Positions outside
      0..S-1 are not written.
    compute_dtype: dtype of activations and of the weights as they are used.
    remat: what the backward pass computes again instead of keeping it: "none" keeps all activations,
      "elementwise" keeps the matrix products only, "full" keeps each layer's input only.

  Returns:
    The normed hidden states, [B, T, hidden_size] in compute_dtype, and the updated cache (None if none).
  """
  x = params["embedding"][tokens].astype(compute_dtype)
  x = constrain(x, ("batch", "length", "act_embed"))
  angles = layers.rotary_angles(positions, config.head_dim, config.rope_base)

  def layer(x, weights, layer_cache):
    mixed, layer_cache = _attend(x, weights, config, angles, positions, mask, layer_cache)
    x = x + mixed
    normed = layers.rms_norm(x, weights["mlp_norm"], config.norm_eps)
    x = x + layers.gated_mlp(normed, weights["gate"], weights["up"], weights["down"])
    return constrain(x, ("batch", "length", "act_embed")), layer_cache

  if remat != "none":
    layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[remat])
  x, cache = _run_layers(layer, x, params["layers"], cache)
  return layers.rms_norm(x, params["final_norm"], config.norm_eps), cache


def _run_layers(layer, x, weights, cache):
  if isinstance(weights, tuple):
    caches = cache or (None,) * len(weights)
    updated = []
    for layer_weights, layer_cache in zip(weights, caches, strict=True):
      x, layer_cache = layer(x, layer_weights, layer_cache)
      updated.append(layer_cache)
    return x, tuple(updated) if cache is not None else None
  if cache is not None:
    raise ValueError("a cache needs per-layer weights: pass params through unstack_layers first")
  return jax.lax.scan(lambda x, layer_weights: layer(x, layer_weights, None), x, weights)


def _attend(x, weights, config, angles, positions, mask, cache):
  """One attention block: norm, project, rotate, (cache,) attend, project back."""
  batch, length, _ = x.shape
  normed = layers.rms_norm(x, weights["attention_norm"], config.norm_eps)

  def project(name, heads):
    return layers.linear(normed, weights[name]).reshape(batch, length, heads, config.head_dim)

  query = layers.rotate(project("query", config.num_heads), angles)
  key = layers.rotate(project("key", config.num_kv_heads), angles)
  value = project("value", config.num_kv_heads)
  if cache is not None:
    key, value = cache = _write(cache, key, value, positions)
  else:
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
  mixed = attention.attention(query, key.astype(x.dtype), value.astype(x.dtype), mask,
                              causal=cache is None)
  return layers.linear(mixed.reshape(batch, length, -1), weights["output"]), cache


def _write(cache: LayerCache, key, value, positions) -> LayerCache:
  """Puts keys and values [B, T, kv_heads, head_dim] at their positions [B, T]."""
  rows = jnp.arange(positions.shape[0])[:, None]
  # Negative indices would wrap to the end of the cache: send them past it, where writes are dropped.
  index = jnp.where(positions < 0, cache[0].shape[2], positions)

  def put(old, new):
    return old.at[rows, :, index].set(new.astype(old.dtype), mode="drop")

  return put(cache[0], key), put(cache[1], value)


def unembed(params: Tree, hidden: jax.Array) -> jax.Array:
  """Logits, float32 [..., vocab], of hidden states [..., hidden_size]."""
  head = params.get("head", params["embedding"])
  return layers.multiply(hidden, head.astype(hidden.dtype)).astype(jnp.float32)


def unstack_layers(params: Tree) -> Tree:
  """Splits stacked layers into a tuple of per-layer trees: the rollout layout.

  A decode step is short, and slicing each layer out of a stack would copy every weight every step.
  """
  num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
  split = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(num_layers))
  return {**params, "layers": split}
