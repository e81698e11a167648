"""The HTTP routes, on top of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from wootz.launch.program import Weights
from wootz.launch.serving import requests, responses
from wootz.launch.serving.errors import ApiError
from wootz.launch.serving.requests import Call
from wootz.launch.serving.worker import Job, Listener, QueueFull, Worker
from wootz.post_training.rollout.engine import Sample

MAX_BODY = 16 * 2**20  # bytes


class Server:
  """The routes, on top of one worker.

  Args:
    weights: what is served.
    worker: runs it; the caller closes it.
    name: of the model, as clients call it.
    api_key: the bearer token asked for; None asks for none.
    default_max_tokens: of requests that set no limit.
  """

  def __init__(self, weights: Weights, worker: Worker, *, name: str, api_key: str | None = None,
               default_max_tokens: int = 256) -> None:
    self._weights, self._worker, self._name = weights, worker, name
    self._key, self._default_max_tokens = api_key, default_max_tokens

  def app(self) -> Starlette:
    routes = [Route("/v1/chat/completions", self.chat, methods=["POST"]),
              Route("/v1/completions", self.text, methods=["POST"]),
              Route("/v1/models", self.models), Route("/health", self.health)]
    handlers: dict[Any, Any] = {ApiError: _error, HTTPException: _http_error, Exception: _unforeseen}
    return Starlette(routes=routes, exception_handlers=handlers)

  async def health(self, _: HttpRequest) -> Response:
    return JSONResponse({"status": "ok" if self._worker.alive else "the engine's thread has died"},
                        200 if self._worker.alive else 503)

  async def models(self, http: HttpRequest) -> Response:
    self._authorise(http)
    return JSONResponse({"object": "list", "data": [
      {"id": self._name, "object": "model", "created": 0, "owned_by": "wootz"}]})

  async def chat(self, http: HttpRequest) -> Response:
    return await self._complete("chat", http)

  async def text(self, http: HttpRequest) -> Response:
    return await self._complete("text", http)

  def _authorise(self, http: HttpRequest) -> None:
    given = http.headers.get("authorization", "")
    if self._key and not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
      raise ApiError("a valid key is needed: send the header Authorization: Bearer KEY", status=401,
                     code="invalid_api_key")

  async def _complete(self, kind: str, http: HttpRequest) -> Response:
    self._authorise(http)
    call = requests.parse(kind, await _json_body(http), model=self._name, config=self._weights.config,
                          tokenizer=self._weights.tokenizer, default_max_tokens=self._default_max_tokens)
    events: asyncio.Queue[Sample | Exception | None] = asyncio.Queue()
    job = Job(call.requests, _listener(events))
    try:
      self._worker.submit(job)
    except QueueFull as error:
      raise ApiError(str(error), status=429, code="queue_full") from error
    if call.stream:
      return StreamingResponse(self._stream(call, job, events), media_type="text/event-stream")
    samples = [sample async for sample in _samples(job, events)]
    return JSONResponse(responses.response(call, samples, model=self._name,
                                           tokenizer=self._weights.tokenizer))

  async def _stream(self, call: Call, job: Job, events: asyncio.Queue) -> AsyncIterator[str]:
    samples = []
    try:
      async for sample in _samples(job, events):
        samples.append(sample)
        for chunk in responses.chunks(call, sample, model=self._name, tokenizer=self._weights.tokenizer):
          yield _event(chunk)
      if call.include_usage:
        yield _event(responses.usage_chunk(call, samples, model=self._name))
    except ApiError as error:  # the status line is sent already
      yield _event(error.body())
    yield "data: [DONE]\n\n"


def _listener(events: asyncio.Queue) -> Listener:
  """Carries what the worker's thread tells into this event loop."""
  loop = asyncio.get_running_loop()

  def tell(event: Sample | Exception | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever asked
      loop.call_soon_threadsafe(events.put_nowait, event)
  return tell


async def _samples(job: Job, events: asyncio.Queue) -> AsyncIterator[Sample]:
  """The job's samples as they end. A client that leaves cancels the job."""
  try:
    while (event := await events.get()) is not None:
      if isinstance(event, Exception):
        raise ApiError(f"the engine failed: {type(event).__name__}", status=500, code="engine_failed")
      yield event
  finally:
    job.cancelled = True


def _event(content: dict[str, Any]) -> str:
  return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _json_body(http: HttpRequest) -> Any:
  body = bytearray()
  async for part in http.stream():
    body += part
    if len(body) > MAX_BODY:
      raise ApiError(f"the body is larger than {MAX_BODY} bytes", status=413)
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ApiError(f"the body is not valid JSON: {error}") from error


async def _error(_: HttpRequest, error: ApiError) -> Response:
  return JSONResponse(error.body(), error.status)


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
  shaped = ApiError(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code)
  return JSONResponse(shaped.body(), error.status_code, headers=error.headers)


async def _unforeseen(_: HttpRequest, error: Exception) -> Response:
  return JSONResponse(ApiError("the server failed; its log says how", status=500).body(), 500)
