"""The device side of sampling: slots with their own key/value cache; jitted functions fill and step them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from wootz.models import attention, transformer
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.post_training.rollout.sampling import SamplingSettings, row_keys, sample

MAX_STOP_IDS = 8  # end and stop ids a slot can hold


@flax.struct.dataclass
class Slots:
  """S samples in progress, each with room for L positions and C new tokens. A free slot is inactive."""

  cache: tuple[transformer.LayerCache, ...]  # per layer, of L positions
  token: jax.Array  # int32 [S], sampled or fed last, not yet run through the model
  position: jax.Array  # int32 [S], position of `token`
  count: jax.Array  # int32 [S], tokens sampled so far
  limit: jax.Array  # int32 [S], tokens that may be sampled
  active: jax.Array  # bool [S]
  stopped: jax.Array  # bool [S], ended by a stop id
  output: jax.Array  # int32 [S, C], sampled tokens
  logprobs: jax.Array  # float32 [S, C], nats, of the distribution sampled from
  seeds: jax.Array  # typed random keys [S]
  settings: SamplingSettings
  stop_ids: jax.Array  # int32 [S, MAX_STOP_IDS], padded with -1

  @property
  def length(self) -> int:
    """L, the positions that the cache has room for."""
    return self.cache[0][0].shape[-1]


@flax.struct.dataclass
class Entry:
  """What a slot begins with; N of them enter together. A slot index of S or more is nobody's."""

  slot: jax.Array  # int32 [N]
  start: jax.Array  # int32 [N], where the prompt begins among the prefilled tokens
  token: jax.Array  # int32 [N], the prompt's last token: the first decode step feeds it
  position: jax.Array  # int32 [N]
  limit: jax.Array  # int32 [N]
  seeds: jax.Array  # typed random keys [N]
  settings: SamplingSettings
  stop_ids: jax.Array  # int32 [N, MAX_STOP_IDS]


def empty_slots(config: ModelConfig, *, num_slots: int, length: int, new_tokens: int, dtype) -> Slots:
  """All slots free."""
  def zeros(dtype, *shape):
    return jnp.zeros((num_slots, *shape), dtype)

  def layer_cache():
    return (zeros(dtype, config.num_kv_heads, config.head_dim, length),
            zeros(dtype, config.num_kv_heads, length, config.head_dim))

  return Slots(
    cache=tuple(layer_cache() for _ in range(config.num_layers)),
    token=zeros(jnp.int32), position=zeros(jnp.int32), count=zeros(jnp.int32),
    limit=zeros(jnp.int32), active=zeros(bool), stopped=zeros(bool),
    output=zeros(jnp.int32, new_tokens), logprobs=zeros(jnp.float32, new_tokens),
    seeds=jax.random.split(jax.random.key(0), num_slots),
    settings=SamplingSettings(temperature=zeros(jnp.float32), top_k=zeros(jnp.int32),
                              top_p=zeros(jnp.float32)),
    stop_ids=zeros(jnp.int32, MAX_STOP_IDS))


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def prefill(params: Tree, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *,
            config: ModelConfig, dtype) -> Any:
  """Keys and values of prompts packed into a row of T tokens; all int32 [T], segment 0 is padding.

  Packed, prompts of any lengths take one shape and hardly any padding. Gives a cache of one row.
  """
  segments = segment_ids[None]
  _, cache = transformer.forward(
    params, config, tokens[None], positions=positions[None],
    mask=attention.packed_mask(segments, jnp.zeros_like(segments)), keep=True, compute_dtype=dtype)
  return cache


@functools.partial(jax.jit, donate_argnames="slots", static_argnames="width")
def enter(slots: Slots, prefilled: Any, entry: Entry, *, width: int) -> Slots:
  """Copies `width` prefilled positions, no fewer than any prompt has, to the slots; these become active.

  What lies behind a prompt's end is overwritten before it is read.
  """
  index = entry.slot
  places = entry.start[:, None] + jnp.arange(width)

  def copy(cache, packed):
    keys = jnp.take(packed[0][0], places, axis=2, mode="clip").transpose(2, 0, 1, 3)
    values = jnp.take(packed[1][0], places, axis=1, mode="clip").swapaxes(0, 1)
    return (cache[0].at[index, :, :, :width].set(keys, mode="drop"),
            cache[1].at[index, :, :width].set(values, mode="drop"))

  def put(old, new):
    return old.at[index].set(new, mode="drop")

  state = dataclasses.replace(
    slots,
    cache=tuple(map(copy, slots.cache, prefilled)),
    token=put(slots.token, entry.token), position=put(slots.position, entry.position),
    limit=put(slots.limit, entry.limit), seeds=put(slots.seeds, entry.seeds),
    settings=jax.tree.map(put, slots.settings, entry.settings),
    stop_ids=put(slots.stop_ids, entry.stop_ids))
  return dataclasses.replace(state, count=put(slots.count, 0), active=put(slots.active, True),
                             stopped=put(slots.stopped, False))


@functools.partial(jax.jit, donate_argnames="slots", static_argnames=("config", "dtype"))
def decode(params: Tree, slots: Slots, max_steps, max_ended, *, config: ModelConfig, dtype) -> Slots:
  """Samples up to `max_steps` tokens per active slot; returns early once `max_ended` slots have ended."""
  running = jnp.sum(slots.active)

  def unfinished(carry):
    step, slots = carry
    still = jnp.sum(slots.active)
    return (step < max_steps) & (still > 0) & (running - still < max_ended)

  def step(carry):
    return carry[0] + 1, _decode_step(params, carry[1], config, dtype)

  return jax.lax.while_loop(unfinished, step, (0, slots))[1]


def _decode_step(params, slots: Slots, config, dtype) -> Slots:
  # A free slot computes along, at position -1: it writes nothing and nobody reads it.
  positions = jnp.where(slots.active, slots.position, -1)[:, None]
  hidden, cache = transformer.forward(
    params, config, slots.token[:, None], positions=positions,
    mask=attention.cache_mask(positions, slots.length), cache=slots.cache, compute_dtype=dtype)
  logits = transformer.unembed(params, hidden[:, 0])
  drawn, logprobs = sample(logits, row_keys(slots.seeds, slots.position + 1), slots.settings)
  return _record(dataclasses.replace(slots, cache=cache), drawn, logprobs)


def _record(slots: Slots, drawn, logprobs) -> Slots:
  """Appends one sampled token to every active slot and ends those that are done."""
  rows = jnp.arange(drawn.shape[0])
  place = jnp.where(slots.active, slots.count, slots.output.shape[1])  # outside: dropped
  count = slots.count + slots.active
  stopped = slots.active & jnp.any(drawn[:, None] == slots.stop_ids, axis=-1)
  return dataclasses.replace(
    slots,
    token=jnp.where(slots.active, drawn, slots.token),
    position=slots.position + slots.active, count=count,
    active=slots.active & ~stopped & (count < slots.limit), stopped=slots.stopped | stopped,
    output=slots.output.at[rows, place].set(drawn, mode="drop"),
    logprobs=slots.logprobs.at[rows, place].set(logprobs, mode="drop"))


@functools.partial(jax.jit, donate_argnames="slots")
def release(slots: Slots, ended: jax.Array) -> Slots:
  """Frees slots that the host found ended, bool [S]."""
  return dataclasses.replace(slots, active=slots.active & ~ended)


@jax.jit
def gather(slots: Slots, index: jax.Array) -> Slots:
  """The slots at `index` int32 [N], in that order: a smaller batch once few samples are left."""
  return jax.tree.map(lambda leaf: leaf[index], slots)
