"""Measures Wootz beside a peer that does the same work, by turns, in one run.

  python -m wootz.launch.bench grpo --steps=3 --output=grpo.json

The peer lives in a virtual environment of its own, which is set up on first use. Keep the machine quiet
while this runs. Exit status: 0 measured, 1 could not be, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from wootz.launch.benchmarks import grpo, peer, sides
from wootz.models import pretrained


def main(arguments: Sequence[str] | None = None) -> int:
  options = make_parser().parse_args(arguments)
  try:
    return options.run(options)
  except (grpo.WorkDiffers, sides.SideFailed, OSError, RuntimeError, ValueError) as error:
    print(f"bench: {error}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m wootz.launch.bench", description=__doc__.splitlines()[0])
  benches = parser.add_subparsers(title="benchmarks", required=True, metavar="NAME")
  _add_grpo(benches.add_parser(
    "grpo", help="steps of GRPO on SmolLM2-135M-Instruct, beside TRL's GRPOTrainer, on CPU",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter))
  return parser


def _add_grpo(parser: argparse.ArgumentParser) -> None:
  parser.set_defaults(run=run_grpo)
  add = parser.add_argument
  add("--steps", type=_positive, default=3, help="measured steps of each side")
  add("--warmup", type=int, default=1, help="steps of each side before those; the first one compiles")
  add("--tasks", type=_positive, default=4, help="prompts per step")
  add("--samples", type=_positive, default=8, help="completions per prompt, at least 2")
  add("--new_tokens", type=_positive, default=48, help="tokens of every completion")
  add("--threads", type=_positive, default=2, help="cores that either side may use")
  add("--seed", type=int, default=0, help="of the sampling")
  add("--peer_venv", type=pathlib.Path, default=pathlib.Path(".venv-trl"),
      help="TRL's virtual environment; made here unless there is one")
  add("--peer_batch", type=_positive, default=grpo.Work.peer_batch,
      help="TRL's per_device_train_batch_size")
  add("--peer_checkpointing", action=argparse.BooleanOptionalAction,
      default=grpo.Work.peer_checkpointing, help="TRL's gradient_checkpointing: slower, less memory")
  add("--remat", choices=("none", "elementwise", "full"), default=grpo.Work.remat,
      help="Wootz's learner.remat: more takes less memory")
  add("--rows", type=_positive, default=grpo.Work.rows,
      help="Wootz's learner.rows_per_microbatch; a row is one group")
  add("--output", type=pathlib.Path, help="file for all figures, as JSON")


def _positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{value} must be at least 1")
  return value


def run_grpo(options: argparse.Namespace) -> int:
  if options.samples < 2:
    raise ValueError(f"--samples={options.samples}: a group of one has nothing to be compared with")
  if options.tasks * options.samples % options.peer_batch:
    raise ValueError(f"--peer_batch={options.peer_batch} must divide the {options.tasks * options.samples} "
                     "samples of a step")
  load = os.getloadavg()[0]
  python = peer.peer_python(options.peer_venv, grpo.REQUIREMENTS)
  model = pretrained.fetch_smollm2()
  work = grpo.Work(
    model=str(model), tasks=grpo.first_tasks(options.tasks), samples=options.samples,
    new_tokens=options.new_tokens, warmup_steps=options.warmup, steps=options.steps,
    threads=options.threads, seed=options.seed, remat=options.remat, rows=options.rows,
    peer_batch=options.peer_batch, peer_checkpointing=options.peer_checkpointing)
  grpo.limit_threads(options.threads)
  ours, theirs = grpo.make_sides(options.threads, python)
  with ours, theirs:
    about, steps = grpo.measure(work, (ours, theirs), say=lambda text: print(text, file=sys.stderr))
  report = grpo.as_report(work, about, steps, command=shlex.join(sys.orig_argv), load=load)
  print(grpo.as_text(report))
  if options.output:
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
