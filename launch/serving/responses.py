"""OpenAI's completion protocol: the engine's samples to response bodies and stream chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wootz.data.tokenizer import Tokenizer
from wootz.launch.serving.requests import Call
from wootz.post_training.rollout.collect import completion_text
from wootz.post_training.rollout.engine import Sample


def response(call: Call, samples: Sequence[Sample], *, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
  """The whole answer, choices in order of prompt and sample."""
  choices = sorted((_choice(call, sample, tokenizer) for sample in samples), key=lambda c: c["index"])
  return _envelope(call, model, choices, chunk=False) | {"usage": usage(call, samples)}


def chunks(call: Call, sample: Sample, *, model: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
  """One finished sample as stream chunks: role, text, reason it ended (chat), or text and reason at once."""
  choice = _choice(call, sample, tokenizer)
  if call.kind == "text":
    return [_envelope(call, model, [choice], chunk=True)]
  message, reason = choice.pop("message"), choice.pop("finish_reason")
  first = {"index": choice["index"], "finish_reason": None}
  parts = [{**first, "delta": {"role": "assistant", "content": ""}},
           {**first, "delta": {"content": message["content"]}, "logprobs": choice["logprobs"]},
           {**first, "delta": {}, "finish_reason": reason}]
  return [_envelope(call, model, [part], chunk=True) for part in parts]


def usage(call: Call, samples: Sequence[Sample]) -> dict[str, int]:
  prompt = sum(len(request.prompt) for request in call.requests)
  completion = sum(len(sample.tokens) for sample in samples)
  return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _envelope(call: Call, model: str, choices: list, *, chunk: bool) -> dict[str, Any]:
  kind = "text_completion" if call.kind == "text" else f"chat.completion{'.chunk' if chunk else ''}"
  return {"id": call.id, "object": kind, "created": call.created, "model": model, "choices": choices}


def usage_chunk(call: Call, samples: Sequence[Sample], *, model: str) -> dict[str, Any]:
  """The last chunk of a stream that asked for usage: no choices."""
  return _envelope(call, model, [], chunk=True) | {"usage": usage(call, samples)}


def _choice(call: Call, sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
  text = completion_text(tokenizer, sample)
  index = int(sample.request_id) * call.requests[0].num_samples + sample.sample_index
  content = ({"text": text} if call.kind == "text" else {"message": {"role": "assistant", "content": text}})
  return {"index": index, **content, "finish_reason": sample.finish_reason,
          "logprobs": _logprobs(call, sample, tokenizer) if call.logprobs else None}


def _logprobs(call: Call, sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
  raw = [tokenizer.to_bytes([token]) for token in sample.tokens]
  words = [piece.decode("utf-8", errors="replace") for piece in raw]
  values = [float(value) for value in sample.logprobs]
  if call.kind == "chat":
    return {"content": [
      {"token": word, "logprob": value, "bytes": list(piece), "top_logprobs": []}
      for word, value, piece in zip(words, values, raw, strict=True)]}
  return {"tokens": words, "token_logprobs": values, "top_logprobs": None,
          "text_offset": [len(tokenizer.decode(sample.tokens[:place], skip_control=True))
                          for place in range(len(words))]}
