"""The HTTP server on the tiny model of conftest.py, through starlette's own client."""

import dataclasses
import importlib
import json
import math
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from wootz.launch import program
from wootz.launch.serving import requests
from wootz.launch.serving.app import Server
from wootz.launch.serving.worker import Job, QueueFull, Worker
from wootz.post_training.rollout.engine import Request

MESSAGES = [{"role": "user", "content": "hi"}]
WINDOW = 256  # tokens, of the tiny model


@pytest.fixture(scope="module")
def weights(tiny_model):
  return program.load_weights(tiny_model)


@pytest.fixture(scope="module")
def solution(weights):
  return weights.tokenizer.decode([259])


@pytest.fixture(scope="module")
def worker(weights):
  worker = Worker(program.generator(weights, slots=8))
  yield worker
  worker.close()
  assert not worker.alive


@pytest.fixture(scope="module")
def client(weights, worker):
  return TestClient(Server(weights, worker, name="tiny", default_max_tokens=8).app())


def chat(client, **fields):
  return client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})


def events(response):
  """The parsed data of a stream, which ends with [DONE]."""
  *lines, last, rest = response.text.split("\n\n")
  assert last == "data: [DONE]" and rest == ""
  return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_greedy_chat(client, solution):
  answer = chat(client, temperature=0, max_tokens=5, model="tiny").json()
  assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
  assert answer["choices"] == [{"index": 0, "message": {"role": "assistant", "content": solution},
                                "finish_reason": "stop", "logprobs": None}]
  # <|start|> "user\nhi" <|end|> "\n" <|start|> "assistant\n": 1 + 7 + 1 + 1 + 1 + 10
  assert answer["usage"] == {"prompt_tokens": 21, "completion_tokens": 2, "total_tokens": 23}


def test_samples_are_reproducible_and_carry_their_logprobs(client, solution):
  """SV-5: the samples of one request differ from each other, and a rerun gives the same."""
  answers = [chat(client, n=16, seed=5, logprobs=True).json()["choices"] for _ in range(2)]
  assert answers[0] == answers[1] and [choice["index"] for choice in answers[0]] == list(range(16))
  assert {choice["message"]["content"] for choice in answers[0]} == {"", solution}
  for choice in answers[0]:
    first = choice["logprobs"]["content"][0]
    share = 3 / 4 if choice["message"]["content"] else 1 / 4
    assert first["logprob"] == pytest.approx(math.log(share), abs=1e-4)
    assert bytes(first["bytes"]).decode() == first["token"]


def test_text_completion_of_several_prompts(client, solution):
  answer = client.post("/v1/completions", json={
    "prompt": ["a", "ab"], "n": 2, "temperature": 0, "max_tokens": 1, "logprobs": 0}).json()
  assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
    (index, solution, "length") for index in range(4)]
  assert answer["choices"][0]["logprobs"]["tokens"] == [solution]
  assert answer["usage"]["completion_tokens"] == 4
  ids = client.post("/v1/completions", json={"prompt": [65, 66], "temperature": 0}).json()
  assert ids["choices"][0]["text"] == solution and ids["usage"]["prompt_tokens"] == 2


def test_stop_text_is_left_out(client, solution):
  stop = solution[9:14]
  answer = chat(client, temperature=0, stop=stop).json()["choices"][0]
  assert answer["message"]["content"] == solution.partition(stop)[0] and answer["finish_reason"] == "stop"


def test_chat_stream(client, solution):
  """SV-3: the pieces joined are the whole text."""
  response = chat(client, temperature=0, n=2, stream=True, stream_options={"include_usage": True})
  assert response.headers["content-type"].startswith("text/event-stream")
  *parts, usage = events(response)
  assert all(part["object"] == "chat.completion.chunk" and part["id"] == usage["id"] for part in parts)
  for index in range(2):
    mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
    assert mine[0]["delta"]["role"] == "assistant"
    assert "".join(part["delta"].get("content", "") for part in mine) == solution
    assert [part["finish_reason"] for part in mine] == [None, None, "stop"]
  assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4


def test_text_stream(client, solution):
  parts = events(client.post("/v1/completions", json={"prompt": "a", "temperature": 0, "stream": True}))
  assert [(part["object"], part["choices"][0]["text"]) for part in parts] == [("text_completion", solution)]


def test_window(client):
  """SV-6: tokens asked beyond the window are cut, a prompt that fills it is refused with 400."""
  def complete(length, ask):
    return client.post("/v1/completions", json={"prompt": [0] * length, "max_tokens": ask, "temperature": 0})

  for length, ask in ((WINDOW - 1, 10), (WINDOW - 4, 1)):  # unhindered, the model says two tokens
    answer = complete(length, ask).json()
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"
  assert complete(WINDOW - 2, 10).json()["choices"][0]["finish_reason"] == "stop"
  refused = complete(WINDOW, 1)
  assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("fields, param", [
  ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
  ({"n": 0}, "n"), ({"n": True}, "n"), ({"n": 129}, "n"), ({"max_tokens": 0}, "max_tokens"),
  ({"stop": [""]}, "stop"), ({"stop": list("abcde")}, "stop"), ({"top_logprobs": 2}, "top_logprobs"),
  ({"tools": []}, "tools"), ({"messages": []}, "messages"), ({"messages": [3]}, "messages"),
  ({"messages": [{"role": "king", "content": ""}]}, "messages"), ({"messages": None}, "messages"),
  ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages")])
def test_wrong_fields_are_named(client, fields, param):
  response = client.post("/v1/chat/completions", content=json.dumps({"messages": MESSAGES, **fields}))
  error = response.json()["error"]
  assert response.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == param
  assert error["message"]


@pytest.mark.parametrize("content", ["{", "[]", "[" * 10**5, '{"messages": [], "temperature": NaN}'])
def test_broken_bodies(client, content):
  response = client.post("/v1/chat/completions", content=content)
  assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_errors_have_the_same_shape(client):
  unknown = chat(client, model="other")
  assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
  assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
  assert client.get("/v1/completions").status_code == 405
  ids = client.post("/v1/completions", json={"prompt": [260]})
  assert ids.status_code == 400 and "0..259" in ids.json()["error"]["message"]


def test_key_guards_every_route_but_health(weights, worker):
  guarded = TestClient(Server(weights, worker, name="tiny", api_key="sesame").app())
  assert guarded.get("/health").json() == {"status": "ok"}
  for response in (guarded.get("/v1/models"), chat(guarded), guarded.post("/v1/completions", json={}),
                   guarded.get("/v1/models", headers={"authorization": "Bearer sesam"})):
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
  guarded.headers["authorization"] = "Bearer sesame"
  assert guarded.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_start_token_comes_once(weights):
  """TK-3: a tokenizer that asks for a start token gets one, not two, and no end behind the prompt."""
  tokenizer = dataclasses.replace(weights.tokenizer, add_bos=True)
  arguments = {"model": "tiny", "tokenizer": tokenizer, "config": weights.config, "default_max_tokens": 5}
  (asked,) = requests.parse("text", {"prompt": "ab"}, **arguments).requests
  assert asked.prompt.tolist() == [tokenizer.bos_id, 256]
  (asked,) = requests.parse("chat", {"messages": MESSAGES}, **arguments).requests
  assert asked.prompt[0] == tokenizer.bos_id != asked.prompt[1] and asked.prompt[-1] not in tokenizer.end_ids


def test_without_the_extra_it_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  monkeypatch.delitem(sys.modules, "wootz.launch.serve", raising=False)
  with pytest.raises(ImportError, match=r"needs uvicorn: pip install 'wootz\[serve\]'"):
    importlib.import_module("wootz.launch.serve")


class Gate:
  """An engine whose batches wait until they are let go, and which notes what was in them."""

  def __init__(self):
    self.entered, self.go, self.batches = threading.Semaphore(0), threading.Semaphore(0), []

  def __call__(self, requests):
    self.batches.append([request.id for request in requests])
    self.entered.release()
    self.go.acquire()
    if any(request.seed == 13 for request in requests):
      raise FloatingPointError("broken weights")
    yield from ()


def job(told, seed=0):
  return Job([Request("a", np.array([1]), 1, seed, 1)], told.append)


def test_what_waits_becomes_one_batch_and_a_broken_batch_is_told():
  engine, told = Gate(), [[] for _ in range(4)]
  worker = Worker(engine, max_waiting=3)
  worker.submit(job(told[0]))
  engine.entered.acquire()
  leaver = job(told[1])
  for waiting in (leaver, job(told[2], seed=13), job(told[3])):
    worker.submit(waiting)
  leaver.cancelled = True
  with pytest.raises(QueueFull, match="3 requests are waiting"):
    worker.submit(job([]))
  engine.go.release(2)
  worker.close()
  assert engine.batches == [["0/a"], ["0/a", "1/a"]]  # the leaver's is not run
  assert told[0] == [None] and told[1] == []
  assert isinstance(told[2][0], FloatingPointError) and told[3] == told[2]
