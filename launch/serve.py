"""Serves a model over HTTP with OpenAI's completion protocol. Needs the extra: pip install 'wootz[serve]'.

  python -m wootz.launch.serve --weights=runs/mine --port=8000

POST /v1/chat/completions and /v1/completions (whole or as server-sent events), GET /v1/models, GET /health.
Fields: max_tokens, temperature, top_p, top_k, n, stop, seed, logprobs; others are refused by name. Requests
that wait are run together as the next batch. The engine hands out finished samples only, so a stream brings
each sample's text in one piece, as soon as that sample has ended. Logprobs are those of the distribution
sampled from: after temperature, top_k and top_p. A prompt that fills the window is refused with 400; tokens
asked beyond the window are cut, with finish_reason "length". With a key (--api_key, or the environment's
WOOTZ_API_KEY, which other users of the machine do not see) every route but /health asks for it as a bearer
token.
"""

from __future__ import annotations

import contextlib
import os

from absl import flags

from wootz.launch import program
from wootz.launch.serving.worker import Worker

try:
  import uvicorn

  from wootz.launch.serving.app import Server
except ModuleNotFoundError as error:
  raise ImportError(f"the server needs {error.name}: pip install 'wootz[serve]'") from error

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(path: str, *, name: str, host: str, port: int, api_key: str | None, slots: int,
          default_max_tokens: int, compute_dtype: str) -> int:
  """Serves until interrupted; returns the exit status."""
  weights = program.load_weights(path, compute_dtype=compute_dtype)
  if host not in LOOPBACK and not api_key:
    print(f"wootz: warning: anyone who reaches {host}:{port} can use the model: set WOOTZ_API_KEY")
  with contextlib.closing(Worker(program.generator(weights, slots=slots))) as worker:
    server = Server(weights, worker, name=name, api_key=api_key, default_max_tokens=default_max_tokens)
    print(f"serving {weights.source} as {name!r} on http://{host}:{port}/v1", flush=True)
    uvicorn.run(server.app(), host=host, port=port, log_level="warning")
  return 0


def main() -> None:
  weights = flags.DEFINE_string("weights", "smollm2-135m-instruct", "As for wootz.launch.evaluate.")
  name = flags.DEFINE_string("name", "wootz", "What clients call the model.")
  host = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
  port = flags.DEFINE_integer("port", 8000, "TCP port.", lower_bound=0, upper_bound=65535)
  key = flags.DEFINE_string("api_key", None, "Bearer token to ask for; better set WOOTZ_API_KEY.")
  slots = flags.DEFINE_integer("slots", 32, "Sequences decoded at once.", lower_bound=1)
  limit = flags.DEFINE_integer("default_max_tokens", 256, "Of requests without max_tokens.", lower_bound=1)
  dtype = flags.DEFINE_enum("compute_dtype", "auto", ["auto", "float32", "bfloat16"], "Of computation.")
  program.run(lambda: serve(
    weights.value, name=name.value, host=host.value, port=port.value, slots=slots.value,
    api_key=key.value or os.environ.get("WOOTZ_API_KEY"), default_max_tokens=limit.value,
    compute_dtype=dtype.value))


if __name__ == "__main__":
  main()
