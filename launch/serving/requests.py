"""OpenAI's completion protocol: request bodies to engine requests.

Every field is either understood or refused by name; none is ignored, except `user`.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wootz.data import chat
from wootz.data.tokenizer import Tokenizer
from wootz.launch.serving.errors import ApiError
from wootz.models.config import ModelConfig
from wootz.post_training.rollout.engine import Request

MAX_SAMPLES = 128  # prompts times n in one request
MAX_STOPS = 4
_COMMON = {"model": str, "max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "n": int,
           "stop": (str, list), "seed": int, "stream": bool, "stream_options": dict, "user": str}
FIELDS: Mapping[str, Mapping[str, Any]] = {
  "chat": _COMMON | {"messages": list, "max_completion_tokens": int, "logprobs": bool, "top_logprobs": int},
  "text": _COMMON | {"prompt": (str, list), "logprobs": int}}


@dataclasses.dataclass(frozen=True)
class Call:
  """One parsed request body."""

  kind: str  # "chat" or "text"
  requests: tuple[Request, ...]  # one per prompt, their ids are its numbers
  stream: bool
  include_usage: bool
  logprobs: bool
  id: str
  created: int  # seconds since 1970


def parse(kind: str, body: Any, *, model: str, tokenizer: Tokenizer, config: ModelConfig,
          default_max_tokens: int) -> Call:
  """Reads a request body. Raises ApiError naming the field at fault."""
  fields = _typed(kind, body)
  if fields.get("model", model) != model:
    raise ApiError(f"model {fields['model']!r} is not served here, {model!r} is", status=404, param="model",
                   code="model_not_found")
  settings = _settings(fields, default_max_tokens)
  prompts = _prompts(kind, fields, tokenizer)
  if len(prompts) * settings["num_samples"] > MAX_SAMPLES:
    raise ApiError(f"{len(prompts)} prompts x n = {settings['num_samples']}: at most {MAX_SAMPLES} samples "
                   "in one request", param="n")
  for prompt in prompts:
    _check_prompt(prompt, config)
  seed = fields.get("seed", secrets.randbits(32))
  return Call(
    kind=kind, stream=fields.get("stream", False), logprobs=_wants_logprobs(kind, fields),
    include_usage=bool(fields.get("stream_options", {}).get("include_usage")),
    id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}", created=int(time.time()),
    requests=tuple(Request(id=str(number), prompt=np.asarray(prompt, np.int32),
                           seed=seed + number, stop_ids=tokenizer.end_ids, **settings)
                   for number, prompt in enumerate(prompts)))


def _typed(kind: str, body: Any) -> dict[str, Any]:
  """The fields that are set, of the right types; an int serves as a float."""
  if not isinstance(body, dict):
    raise ApiError("the body must be a JSON object")
  fields = {name: value for name, value in body.items() if value is not None}
  for name, value in fields.items():
    if name not in FIELDS[kind]:
      raise ApiError(f"field {name!r} is not supported; supported: {', '.join(FIELDS[kind])}",
                     param=name.encode("utf-8", "replace").decode())
    wanted = FIELDS[kind][name]
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
      names = [each.__name__ for each in (wanted if isinstance(wanted, tuple) else (wanted,))]
      raise ApiError(f"{name} is {value!r}: must be {' or '.join(names)}", param=name)
  return fields


def _settings(fields: Mapping[str, Any], default_max_tokens: int) -> dict[str, Any]:
  """Keywords of an engine request, checked."""
  limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
  given = {limit: default_max_tokens, "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [],
           **fields}
  stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
  rules = {
    limit: (given[limit] >= 1, "at least 1"), "n": (given["n"] >= 1, "at least 1"),
    "temperature": (0 <= given["temperature"] < 1e4, "at least 0, and below 10000"),
    "top_p": (0 < given["top_p"] <= 1, "in (0, 1]"),
    "top_k": (given["top_k"] < 2**31, "below 2**31; 0 or less keeps all tokens"),
    "stop": (len(stops) <= MAX_STOPS and all(isinstance(text, str) and text for text in stops),
             f"a text or up to {MAX_STOPS} texts, none empty")}
  for name, (holds, rule) in rules.items():
    if not holds:
      raise ApiError(f"{name} is {given[name]!r}: must be {rule}", param=name)
  return {"max_new_tokens": given[limit], "num_samples": given["n"], "temperature": given["temperature"],
          "top_p": given["top_p"], "top_k": max(given["top_k"], 0), "stop_strings": tuple(stops)}


def _wants_logprobs(kind: str, fields: Mapping[str, Any]) -> bool:
  name = "top_logprobs" if kind == "chat" else "logprobs"
  if fields.get(name, 0) != 0:
    raise ApiError(f"{name} is {fields[name]}: only the sampled token's own logprob is given, which is "
                   f"{name} 0", param=name)
  return fields.get("logprobs", False) if kind == "chat" else "logprobs" in fields


def _prompts(kind: str, fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
  """Ids of every prompt. A completion's prompt is text, ids, or a list of texts or of ids."""
  name = "messages" if kind == "chat" else "prompt"
  if name not in fields:
    raise ApiError(f"{name} is missing", param=name)
  given = fields[name]
  try:
    if kind == "chat":
      return [chat.render_chat(tokenizer, given)]
    several = isinstance(given, list) and given and isinstance(given[0], (str, list))
    return [_encode(prompt, tokenizer) for prompt in (given if several else [given])]
  except (ValueError, TypeError) as error:
    raise ApiError(f"{name}: {error}", param=name) from error


def _encode(prompt: Any, tokenizer: Tokenizer) -> list[int]:
  if isinstance(prompt, str):
    return tokenizer.encode(prompt, at_start=True)
  if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
    raise ValueError("must be a text, a list of token ids, or a list of such")
  return prompt


def _check_prompt(prompt: Sequence[int], config: ModelConfig) -> None:
  if not prompt:
    raise ApiError("the prompt has no tokens: at least one is needed", param="prompt")
  if len(prompt) >= config.max_positions:
    raise ApiError(f"the prompt has {len(prompt)} tokens, which leaves no room in the model's window of "
                   f"{config.max_positions}", param="prompt", code="context_length_exceeded")
  if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
    raise ApiError(f"the prompt has token ids outside 0..{config.vocab_size - 1}", param="prompt")
