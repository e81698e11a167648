"""Continuous batching on the host: prompts are prefilled once, samples enter free slots, ended ones leave."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.post_training.rollout import decode as device
from wootz.post_training.rollout.sampling import SamplingSettings

LENGTH_BUCKET = 32  # cache lengths are multiples of this, so that few shapes are compiled
PREFILL_TOKENS = 256  # prompt tokens prefilled together; a longer prompt goes alone
MIN_SLOTS = 16  # a batch shrinks to no fewer slots: a step of half as many would take nearly as long
STEPS_PER_CALL = 8  # tokens per slot between two looks by the host


@dataclasses.dataclass(frozen=True)
class Request:
  """Samples wanted of one prompt. Sample i depends on prompt, seed, i and settings, on nothing else."""

  id: str
  prompt: np.ndarray  # int32 [P], P >= 1
  num_samples: int
  seed: int  # of this request; sample i folds in i
  max_new_tokens: int
  temperature: float = 1.0  # 0: greedy
  top_k: int = 0  # 0: no limit
  top_p: float = 1.0  # 1: no limit
  stop_ids: tuple[int, ...] = ()  # sampled and kept, then the sample ends
  stop_strings: tuple[str, ...] = ()  # the sample ends with the token that completes one
  first_sample: int = 0  # index of the first sample: requests may share a seed and differ in this


@dataclasses.dataclass(frozen=True)
class Sample:
  """One finished completion of N tokens."""

  request_id: str
  sample_index: int
  tokens: np.ndarray  # int32 [N], end token included
  logprobs: np.ndarray  # float32 [N], nats, of the distribution sampled from
  finish_reason: str  # "stop" or "length"
  stop_string: str | None = None  # the one that ended it


@dataclasses.dataclass(eq=False)  # told apart by identity
class _Prompt:
  """A prompt, and once prefilled its place in a packed row of prompts."""

  tokens: np.ndarray
  samples_waiting: int = 0
  prefilled: Any = None  # keys and values of the whole row
  start: int = 0

  @property
  def prefill_length(self) -> int:
    """All but the last token, which the first decode step feeds."""
    return len(self.tokens) - 1


@dataclasses.dataclass(frozen=True)
class _Pending:
  request: Request
  sample_index: int
  prompt: _Prompt


def generate(
  params: Tree,
  config: ModelConfig,
  requests: Sequence[Request],
  *,
  num_slots: int,
  decode_text: Callable[[Sequence[int]], str] | None = None,
  dtype: Any = jnp.float32,
) -> Iterator[Sample]:
  """Yields every sample of every request, each as soon as it has ended.

  Args:
    params: in the rollout layout (`transformer.unstack_layers`).
    config: the model's facts; prompt and new tokens together stay within `max_positions`.
    requests: at least one prompt token each. A prompt that fills the window is refused.
    num_slots: samples decoded side by side.
    decode_text: ids to text, needed by requests with stop strings.
    dtype: of the computation and of the cache.
  """
  if num_slots < 1:
    raise ValueError(f"num_slots {num_slots} must be at least 1")
  _check(requests, config, decode_text)
  if not requests:
    return
  waiting = deque(_pending_samples(requests))
  room = max(len(r.prompt) + _new_tokens(r, config) for r in requests)
  width = min(_round_up(room, LENGTH_BUCKET), _round_up(config.max_positions, LENGTH_BUCKET))
  new_tokens = _round_up(max(min(r.max_new_tokens, config.max_positions) for r in requests), LENGTH_BUCKET)
  count = _slot_bucket(min(num_slots, len(waiting)), num_slots)
  slots = device.empty_slots(config, num_slots=count, length=width, new_tokens=new_tokens, dtype=dtype)
  running: list[_Pending | None] = [None] * count
  prefill = functools.partial(device.prefill, params, config=config, dtype=dtype)
  while waiting or any(running):
    slots = _fill(slots, running, waiting, prefill, config)
    slots, running = _shrink(slots, running, waiting)
    # With others waiting, come back once a quarter of the slots is free; else run on.
    patience = max(1, len(running) // 4) if waiting else len(running)
    slots = device.decode(params, slots, STEPS_PER_CALL, patience, config=config, dtype=dtype)
    slots, ended = _collect(slots, running, decode_text)
    yield from ended


def _check(requests, config: ModelConfig, decode_text) -> None:
  for r in requests:
    where = f"request {r.id!r}"
    if len(r.prompt) < 1:
      raise ValueError(f"{where}: the prompt is empty; at least a start token is needed")
    if len(r.prompt) >= config.max_positions:
      raise ValueError(f"{where}: prompt of {len(r.prompt)} tokens leaves no room in the model's window of "
                       f"{config.max_positions}")
    if np.min(r.prompt) < 0 or np.max(r.prompt) >= config.vocab_size:
      raise ValueError(f"{where}: prompt ids from {np.min(r.prompt)} to {np.max(r.prompt)} lie outside the "
                       f"vocabulary of {config.vocab_size}; was it encoded by another tokenizer?")
    if r.max_new_tokens < 1 or r.num_samples < 1:
      raise ValueError(f"{where}: max_new_tokens {r.max_new_tokens} and num_samples {r.num_samples} "
                       "must be at least 1")
    if r.temperature < 0 or not 0 < r.top_p <= 1:
      raise ValueError(f"{where}: temperature {r.temperature} must be >= 0 and top_p {r.top_p} in (0, 1]")
    if len(r.stop_ids) > device.MAX_STOP_IDS:
      raise ValueError(f"{where}: {len(r.stop_ids)} stop ids, at most {device.MAX_STOP_IDS} fit")
    if r.stop_strings and decode_text is None:
      raise ValueError(f"{where} has stop strings, which need decode_text")
    if any(not text for text in r.stop_strings):
      raise ValueError(f"{where}: a stop string is empty")


def _pending_samples(requests) -> Iterator[_Pending]:
  """Requests with the same prompt share one prefill."""
  prompts: dict[bytes, _Prompt] = {}
  for request in requests:
    tokens = np.asarray(request.prompt, np.int32)
    prompt = prompts.setdefault(tokens.tobytes(), _Prompt(tokens))
    for index in range(request.num_samples):
      prompt.samples_waiting += 1
      yield _Pending(request, request.first_sample + index, prompt)


def _new_tokens(request: Request, config: ModelConfig) -> int:
  return min(request.max_new_tokens, config.max_positions - len(request.prompt))


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _slot_bucket(needed: int, most: int) -> int:
  """The smallest of most, most/2, most/4, ... that still holds `needed`, not below MIN_SLOTS."""
  size = most
  while size // 2 >= max(needed, MIN_SLOTS):
    size //= 2
  return size


def _fill(slots, running, waiting, prefill, config):
  """Lets waiting samples into free slots, one device call per packed row of prompts involved."""
  free = [index for index, pending in enumerate(running) if pending is None]
  entering = [(slot, waiting.popleft()) for slot in free[:len(waiting)]]
  _prefill_missing([pending.prompt for _, pending in entering], waiting, prefill)
  rows: dict[int, list] = {}
  for slot, pending in entering:
    running[slot] = pending
    rows.setdefault(id(pending.prompt.prefilled), []).append((slot, pending))
  for group in rows.values():
    longest = max(pending.prompt.prefill_length for _, pending in group)
    width = min(_round_up(longest or 1, 2 * LENGTH_BUCKET), slots.length)
    slots = device.enter(slots, group[0][1].prompt.prefilled, _entry(group, len(running), config),
                         width=width)
  for _, pending in entering:
    pending.prompt.samples_waiting -= 1
    if not pending.prompt.samples_waiting:
      pending.prompt.prefilled = None  # the last sample has its copy
  return slots


def _prefill_missing(needed, waiting, prefill) -> None:
  """Prefills the prompts that are not yet; what room is left in the last row goes to those that come next."""
  upcoming = (pending.prompt for pending in waiting)
  while missing := [prompt for prompt in needed if prompt.prefilled is None]:
    _prefill_row(_next_row(itertools.chain(missing, upcoming)), prefill)


def _next_row(prompts: Iterable[_Prompt]) -> list[_Prompt]:
  """The first of the prompts not yet prefilled, and those after it that fit a row with it."""
  row: dict[_Prompt, None] = {}
  used = 0
  for prompt in prompts:
    if prompt.prefilled is not None or prompt in row:
      continue
    if row and used + prompt.prefill_length > PREFILL_TOKENS:
      break
    row[prompt] = None
    used += prompt.prefill_length
  return list(row)


def _prefill_row(prompts: Sequence[_Prompt], prefill) -> None:
  length = _round_up(sum(prompt.prefill_length for prompt in prompts) or 1, PREFILL_TOKENS)
  tokens, positions, segment_ids = np.zeros((3, length), np.int32)
  start = 0
  for number, prompt in enumerate(prompts, start=1):
    end = start + prompt.prefill_length
    tokens[start:end], segment_ids[start:end] = prompt.tokens[:-1], number
    positions[start:end] = np.arange(end - start)
    prompt.start, start = start, end
  prefilled = prefill(tokens, positions, segment_ids)
  for prompt in prompts:
    prompt.prefilled = prefilled


def _entry(group, num_slots: int, config: ModelConfig) -> device.Entry:
  """The arrays of samples that enter together, padded to the number of slots so that shapes stay few."""
  def column(values, dtype, fill=0):
    values = list(values)
    return np.asarray(values + [fill] * (num_slots - len(values)), dtype)

  pendings = [pending for _, pending in group]
  requests = [pending.request for pending in pendings]
  stop_ids = np.full((num_slots, device.MAX_STOP_IDS), -1, np.int32)
  for row, request in enumerate(requests):
    stop_ids[row, :len(request.stop_ids)] = request.stop_ids
  return device.Entry(
    slot=column((slot for slot, _ in group), np.int32, fill=num_slots),
    start=column((p.prompt.start for p in pendings), np.int32),
    token=column((p.prompt.tokens[-1] for p in pendings), np.int32),
    position=column((p.prompt.prefill_length for p in pendings), np.int32),
    limit=column((_new_tokens(r, config) for r in requests), np.int32),
    seeds=_seed_keys(column((r.seed % 2**32 for r in requests), np.uint32),
                     column((p.sample_index for p in pendings), np.int32)),
    settings=SamplingSettings(
      temperature=column((r.temperature for r in requests), np.float32),
      top_k=column((r.top_k for r in requests), np.int32),
      top_p=column((r.top_p for r in requests), np.float32)),
    stop_ids=jnp.asarray(stop_ids))


@jax.jit
def _seed_keys(seeds, sample_indexes):
  return jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))(
    seeds, sample_indexes)


def _shrink(slots, running, waiting):
  """Moves the last samples into a smaller batch once half the slots would idle to the end."""
  alive = [index for index, pending in enumerate(running) if pending is not None]
  size = _slot_bucket(len(alive), len(running))
  if waiting or size == len(running):
    return slots, running
  spare = [index for index, pending in enumerate(running) if pending is None]
  keep = (alive + spare)[:size]
  return device.gather(slots, np.asarray(keep, np.int32)), [running[index] for index in keep]


def _collect(slots, running, decode_text):
  """Takes ended samples off their slots; looks for stop strings, which only text can show."""
  active, count, stopped, output, logprobs = jax.device_get(
    (slots.active, slots.count, slots.stopped, slots.output, slots.logprobs))
  ended, cut = [], np.zeros(len(running), bool)
  for index, pending in enumerate(running):
    if pending is None:
      continue
    tokens = output[index, :count[index]]
    stop_string, length = _find_stop_string(tokens, pending.request.stop_strings, decode_text)
    if active[index] and stop_string is None:
      continue
    if not np.all(np.isfinite(logprobs[index, :length])):
      raise FloatingPointError(f"request {pending.request.id!r}, sample {pending.sample_index}: the model "
                               "gave non-finite logits; the weights or the cache are broken")
    cut[index] = active[index]
    reason = "stop" if stopped[index] or stop_string is not None else "length"
    ended.append(Sample(pending.request.id, pending.sample_index, tokens[:length].copy(),
                        logprobs[index, :length].copy(), reason, stop_string))
    running[index] = None
  return (device.release(slots, cut) if cut.any() else slots), ended


def _find_stop_string(tokens, stop_strings, decode_text) -> tuple[str | None, int]:
  """The stop string that is complete first and the number of tokens up to its completion."""
  if not stop_strings:
    return None, len(tokens)
  text = decode_text(tokens)
  if not any(stop in text for stop in stop_strings):
    return None, len(tokens)
  for length in range(1, len(tokens) + 1):
    text = decode_text(tokens[:length])
    if found := [stop for stop in stop_strings if stop in text]:
      return min(found, key=lambda stop: text.index(stop) + len(stop)), length
  return None, len(tokens)
