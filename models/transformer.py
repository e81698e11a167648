"""The one forward function: training, scoring, prefill and decode all go through it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from wootz.models import attention, layers
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.sharding.rules import constrain

# One layer's keys [B, kv_heads, head_dim, S] and values [B, kv_heads, S, head_dim]: entry s belongs to
# position s. Laid out as attention's two products read them, with nothing to transpose in a decode step.
LayerCache = tuple[jax.Array, jax.Array]

_ATTENDED = "attended"  # the name under which a layer's attention output is kept
_REMAT_POLICIES = {
  # Attention's own products have batch dimensions: not kept, and computed again once by `attention`.
  "elementwise": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(_ATTENDED)),
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
  keep: bool = False,
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
    keep: without a cache, gives back the tokens' own keys and values as one, T positions long.
    compute_dtype: dtype of activations and of the weights as they are used.
    remat: what the backward pass computes again instead of keeping it: "none" keeps all activations,
      "elementwise" keeps the matrix products only, "full" keeps each layer's input only.

  Returns:
    The normed hidden states, [B, T, hidden_size] in compute_dtype, and the updated or new cache (None
    if neither).
  """
  x = params["embedding"][tokens].astype(compute_dtype)
  x = constrain(x, ("batch", "length", "act_embed"))
  angles = layers.rotary_angles(positions, config.head_dim, config.rope_base)

  def layer(x, weights, layer_cache):
    mixed, entries = _attend(x, weights, config, angles, positions, mask, layer_cache)
    x = x + mixed
    normed = layers.rms_norm(x, weights["mlp_norm"], config.norm_eps)
    x = x + layers.gated_mlp(normed, weights["gate"], weights["up"], weights["down"])
    x = constrain(x, ("batch", "length", "act_embed"))
    return x, (entries if keep or layer_cache is not None else None)

  if remat != "none":
    layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[remat])
  x, cache = _run_layers(layer, x, params["layers"], cache)
  return layers.rms_norm(x, params["final_norm"], config.norm_eps), cache


def _run_layers(layer, x, weights, cache):
  if isinstance(weights, tuple):
    caches = cache or (None,) * len(weights)
    updated = []
    layer = jax.jit(layer)  # traced once for all layers
    for layer_weights, layer_cache in zip(weights, caches, strict=True):
      x, layer_cache = layer(x, layer_weights, layer_cache)
      updated.append(layer_cache)
    return x, tuple(updated) if updated[0] is not None else None
  if cache is not None:
    raise ValueError("a cache needs per-layer weights: pass params through unstack_layers first")
  return jax.lax.scan(lambda x, layer_weights: layer(x, layer_weights, None), x, weights)


def _attend(x, weights, config, angles, positions, mask, cache):
  """One attention block: norm, project, rotate, (cache,) attend, project back; and the keys and values."""
  batch, length, _ = x.shape
  normed = layers.rms_norm(x, weights["attention_norm"], config.norm_eps)

  def project(name, heads):
    return layers.linear(normed, weights[name]).reshape(batch, length, heads, config.head_dim)

  query = layers.rotate(project("query", config.num_heads), angles)
  key = layers.rotate(project("key", config.num_kv_heads), angles)
  value = project("value", config.num_kv_heads)
  if cache is not None:
    key, value = _write(cache, key, value, positions)
  else:
    key, value = key.transpose(0, 2, 3, 1), value.swapaxes(1, 2)
  mixed = attention.attention(query, key.astype(x.dtype), value.astype(x.dtype), mask,
                              causal=cache is None)
  mixed = checkpoint_name(mixed, _ATTENDED)
  return layers.linear(mixed.reshape(batch, length, -1), weights["output"]), (key, value)


def _write(cache: LayerCache, key, value, positions) -> LayerCache:
  """Puts keys and values [B, T, kv_heads, head_dim] at their positions [B, T]."""
  rows = jnp.arange(positions.shape[0])[:, None]
  old_keys, old_values = cache
  # Negative indices would wrap to the end of the cache: send them past it, where writes are dropped.
  index = jnp.where(positions < 0, old_values.shape[2], positions)
  return (old_keys.at[rows, :, :, index].set(key.astype(old_keys.dtype), mode="drop"),
          old_values.at[rows, :, index].set(value.astype(old_values.dtype), mode="drop"))


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
