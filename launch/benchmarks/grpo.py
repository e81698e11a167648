"""The same GRPO steps through TRL and through Wootz, by turns on one machine.

Both sides load the same GGUF file in float32, are given the same chat prompts, and do the same number
of optimizer updates (AdamW, clip 0.2/0.28, token mean, no KL) on groups of equal size and length.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from wootz.launch.benchmarks import figures
from wootz.launch.benchmarks.figures import Quantity
from wootz.launch.benchmarks.sides import Side
from wootz.post_training.domains.base import get_domain

FOLDER = pathlib.Path(__file__).parent
REQUIREMENTS = FOLDER / "trl_requirements.txt"
LETTERS = "aeiou"  # the reward is their share: it varies within every group and costs nothing
QUANTITIES = (
  Quantity("step_seconds", "s", "less"), Quantity("sampling_seconds", "s", "less"),
  Quantity("learning_seconds", "s", "less"), Quantity("sampled_tokens_per_second", "1/s", "more"),
  Quantity("learned_tokens_per_second", "1/s", "more"), Quantity("peak_memory", "GiB", "less"))


class WorkDiffers(RuntimeError):
  """The sides did not do the same work, so their figures cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Work:
  """What both sides are to do, and the few choices that are a side's own."""

  model: str  # path of the GGUF file
  tasks: tuple[Mapping[str, Any], ...]  # id and chat messages
  samples: int  # per task
  new_tokens: int  # of every completion
  warmup_steps: int
  steps: int
  threads: int
  seed: int
  learning_rate: float = 1e-5
  letters: str = LETTERS
  remat: str = "elementwise"  # wootz: what the backward pass computes again
  rows: int = 2  # wootz: packed rows, one group each, in one forward and backward pass
  peer_batch: int = 8  # trl: samples in one forward and backward pass
  peer_checkpointing: bool = False  # trl: recompute activations in the backward pass

  @property
  def tokens(self) -> int:
    """Sampled, and learned from, in one step."""
    return len(self.tasks) * self.samples * self.new_tokens

  def message(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "total_steps": self.warmup_steps + self.steps}


def first_tasks(count: int) -> tuple[dict[str, Any], ...]:
  """The first training tasks of the quickstart's domain: id and messages."""
  tasks = get_domain("python_functions").tasks("train")
  if not 1 <= count <= len(tasks):
    raise ValueError(f"{count} tasks were asked for; there are 1 to {len(tasks)}")
  return tuple({"id": task.id, "messages": [dict(message) for message in task.messages]}
               for task in tasks[:count])


def limit_threads(threads: int) -> None:
  """Holds this process, and those it starts, to `threads` cores: it binds every library alike."""
  cores = sorted(os.sched_getaffinity(0))
  if not 1 <= threads <= len(cores):
    raise ValueError(f"{threads} threads were asked for; this process may use 1 to {len(cores)} cores")
  os.sched_setaffinity(0, cores[:threads])


def make_sides(threads: int, peer_python: pathlib.Path) -> tuple[Side, Side]:
  """Both processes, started: Wootz's first."""
  environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                 "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
                 "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
  ours = Side("wootz", [sys.executable, "-m", "wootz.launch.benchmarks.wootz_grpo"], environment)
  try:
    return ours, Side("trl", [str(peer_python), str(FOLDER / "trl_grpo.py")], environment)
  except OSError:
    ours.__exit__()
    raise


def measure(work: Work, sides: tuple[Side, Side],
            say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, list[dict[str, float]]]]:
  """Alternates warm steps of two started sides.

  Returns what each says of itself, and its measured steps. Raises WorkDiffers when prompts or token
  counts are not equal.
  """
  about: dict[str, Any] = {}
  steps: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
  for side in sides:
    say(f"{side.name}: loading")
    about[side.name] = side.begin(work.message())
  check_prompts({name: told["prompt_ids"] for name, told in about.items()})
  for number in range(-work.warmup_steps, work.steps):
    for side in sides:
      step = derived(side.step())
      check_tokens(side.name, step, work.tokens)
      kind = "warm-up" if number < 0 else f"step {number + 1}"
      say(f"{side.name}: {kind} took {step['step_seconds']:.1f} s ({step['sampling_seconds']:.1f} sampling, "
          f"{step['learning_seconds']:.1f} learning)")
      if number >= 0:
        steps[side.name].append(step)
  return about, steps


def derived(step: Mapping[str, float]) -> dict[str, float]:
  """A side's figures and what follows from them."""
  return {**step,
          "sampled_tokens_per_second": step["sampled_tokens"] / step["sampling_seconds"],
          "learned_tokens_per_second": step["learned_tokens"] / step["learning_seconds"],
          "peak_memory": step["peak_memory_bytes"] / 2**30}


def check_prompts(prompts: Mapping[str, list[list[int]]]) -> None:
  """Raises WorkDiffers, naming the prompt, unless both sides read the same ids."""
  (our_name, ours), (their_name, theirs) = prompts.items()
  if len(ours) != len(theirs):
    raise WorkDiffers(f"{our_name} has {len(ours)} prompts and {their_name} {len(theirs)}")
  for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
    if one != other:
      raise WorkDiffers(f"prompt {index} has {len(one)} ids for {our_name} and {len(other)} for "
                        f"{their_name}, and they are not the same; choose other tasks")


def check_tokens(name: str, step: Mapping[str, float], expected: int) -> None:
  """Raises WorkDiffers unless the step sampled, and learned from, every token it should have."""
  for kind in ("sampled_tokens", "learned_tokens"):
    if step[kind] != expected:
      raise WorkDiffers(f"{name} had {step[kind]:.0f} {kind.replace('_', ' ')} in a step that has "
                        f"{expected}: a completion ended early, or a group had equal rewards")


def as_report(work: Work, about: Mapping[str, Any], steps: Mapping[str, list[dict[str, float]]],
              command: str, load: float) -> dict[str, Any]:
  """Everything that was measured and what it was measured on, as plain values."""
  return {"benchmark": "grpo", "command": command, "load_average_before": load, "work": work.message(),
          "prompt_tokens": [len(ids) for ids in about["wootz"]["prompt_ids"]],
          "about": {name: told["about"] for name, told in about.items()},
          "figures": figures.as_values(steps, QUANTITIES), "steps": dict(steps)}


def as_text(report: Mapping[str, Any]) -> str:
  """The report as a person reads it."""
  work, about = report["work"], report["about"]
  machine = about["wootz"]["versions"]
  return "\n".join([
    f"GRPO, {len(work['tasks'])} tasks x {work['samples']} samples x {work['new_tokens']} tokens, prompts of "
    f"{min(report['prompt_tokens'])} to {max(report['prompt_tokens'])} tokens, float32, {work['threads']} "
    f"threads, seed {work['seed']}, {work['steps']} warm steps of each by turns",
    "", figures.table(report["steps"], QUANTITIES), "",
    f"machine: {machine['processor']}, {machine['usable cores']} cores used, {machine['system']}; "
    f"load average before {report['load_average_before']:.1f}",
    f"cpu seconds a side used while the other had its turn, at most: {_most_idle(report['steps']):.2f}",
    *(f"{name}: {_pairs(told['versions'])}; {_pairs({k: v for k, v in told.items() if k != 'versions'})}"
      for name, told in about.items()),
    f"command: {report['command']}"])


def _most_idle(steps: Mapping[str, list[dict[str, float]]]) -> float:
  return max(step["idle_cpu_seconds"] for measured in steps.values() for step in measured)


def _pairs(values: Mapping[str, Any]) -> str:
  hidden = ("processor", "system", "usable cores", "devices")
  return ", ".join(f"{name} {value}" for name, value in values.items() if name not in hidden)
