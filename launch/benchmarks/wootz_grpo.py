"""Wootz's side of the GRPO benchmark: the parts of the training loop, in its order; see `sides`.

One step is what `wootz.post_training.loop` does in one update: sample and grade, write the trajectories
to the store, read them back packed, learn. The reward is a count of characters, so that the time is the
model's; and no token ends a completion, so that all have their full length.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from wootz.data import chat
from wootz.data.records import Grade, Outcome, Task
from wootz.data.store import TrajectoryStore, TrajectoryWriter
from wootz.launch import assemble
from wootz.launch import config as configs
from wootz.launch.benchmarks import sides
from wootz.launch.program import COMPILATION_CACHE
from wootz.post_training.evaluate import environment
from wootz.post_training.learn import learner as learning
from wootz.post_training.learn import step as steps
from wootz.post_training.rollout.collect import Sampling, collect

ROW_BUCKET = 16


def character_reward(text: str, letters: str) -> float:
  """Share of the characters of `text` that are in `letters`; 0 for an empty text."""
  return sum(map(text.count, letters)) / max(len(text), 1)


@dataclasses.dataclass
class CharacterDomain:
  """A domain whose grade counts characters."""

  tasks_given: tuple[Task, ...]
  letters: str
  name: str = "characters"

  def tasks(self, split: str) -> Sequence[Task]:
    return self.tasks_given

  def check(self) -> None:
    """Counting needs nothing of the machine."""

  def grade(self, task: Task, completion_text: str) -> Grade:
    return Grade(Outcome.PARTIAL, character_reward(completion_text, self.letters))


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a step needs beside the state."""

  domain: CharacterDomain
  policy: Any  # loop.Policy
  learner: learning.Learner
  sampling: Sampling
  packing: learning.Packing
  writer: TrajectoryWriter
  store: TrajectoryStore
  seed: int


def make_config(work: Mapping[str, Any], *, longest_prompt: int) -> configs.Config:
  """The quickstart's kind of run with the benchmark's sizes. A packed row holds one group."""
  row = longest_prompt + work["samples"] * work["new_tokens"]
  return configs.Config(
    model=configs.ModelSection(path=work["model"], compute_dtype="float32"),
    rollout=configs.RolloutSection(
      tasks_per_update=len(work["tasks"]), samples_per_task=work["samples"],
      max_new_tokens=work["new_tokens"], slots=len(work["tasks"]) * work["samples"]),
    learner=configs.LearnerSection(
      learning_rate=work["learning_rate"], row_length=-(-row // ROW_BUCKET) * ROW_BUCKET,
      rows_per_microbatch=min(work["rows"], len(work["tasks"])), remat=work["remat"]),
    run=configs.RunSection(directory="unused", seed=work["seed"], updates=work["total_steps"]))


def make_tasks(work: Mapping[str, Any]) -> tuple[Task, ...]:
  return tuple(Task(id=task["id"], domain=CharacterDomain.name, family="benchmark", split="train",
                    messages=tuple(task["messages"]), payload={}) for task in work["tasks"])


def make_parts(work, config, model, domain, folder: pathlib.Path) -> tuple[Parts, steps.TrainState]:
  """The parts as `wootz.launch.train` builds them, and the state of the base model."""
  recipe = assemble.make_recipe(lora_rank=0)
  learner, _ = assemble.make_learner(model, recipe, config)
  trained, frozen = assemble.initial_weights(model, config.model, seed=config.run.seed)
  model.params.clear()  # the host's copy has served
  parts = Parts(
    domain, assemble.make_policy(model, recipe, trained, frozen, config), learner,
    Sampling(num_samples=work["samples"], temperature=1.0, max_new_tokens=work["new_tokens"]),
    learning.Packing(config.learner.row_length, config.learner.rows_per_microbatch),
    TrajectoryWriter(folder), TrajectoryStore(folder), config.run.seed)
  return parts, steps.init_state(trained, learner.optimizer)


def answers(work: Mapping[str, Any], folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  """What the side is, then the figures of one step after the other."""
  model = assemble.load_base_model(work["model"])
  domain = CharacterDomain(make_tasks(work), work["letters"])
  prompts = [chat.render_chat(model.tokenizer, task.messages) for task in domain.tasks_given]
  config = make_config(work, longest_prompt=max(map(len, prompts)))
  parts, state = make_parts(work, config, model, domain, folder)
  yield {"prompt_ids": prompts, "about": {
    "versions": environment.versions(), "compute_dtype": config.model.compute_dtype,
    "slots": config.rollout.slots, "row_length": config.learner.row_length,
    "rows_per_microbatch": config.learner.rows_per_microbatch, "remat": config.learner.remat}}
  update, idle_since = 0, time.process_time()
  while True:
    cpu_before = time.process_time()
    state, figures = one_step(parts, state, update)
    update += 1
    cpu_after = time.process_time()
    figures |= {"cpu_seconds": cpu_after - cpu_before, "idle_cpu_seconds": cpu_before - idle_since}
    idle_since = cpu_after
    yield figures


def one_step(parts: Parts, state: steps.TrainState, update: int) -> tuple[steps.TrainState, dict[str, float]]:
  """One update as in the training loop, and its figures. The state given is spent."""
  def generate(requests):
    return parts.policy.generate(state.params, parts.policy.frozen,
                                 [dataclasses.replace(request, stop_ids=()) for request in requests])

  started = time.monotonic()
  trajectories, seconds = collect(
    generate, parts.domain.tasks_given, domain=parts.domain, tokenizer=parts.policy.tokenizer,
    kinds=lambda task: (parts.sampling,), seed=parts.seed, update=update, weight_version=update)
  parts.writer.write(trajectories)
  parts.writer.commit()
  parts.store.refresh()
  trained, metrics = learning.learn(
    parts.learner, state, parts.policy.frozen, parts.policy.reference, parts.store, update=update,
    group_size=parts.sampling.num_samples, packing=parts.packing, seed=parts.seed,
    place=parts.policy.place)
  jax.block_until_ready(trained)
  whole = time.monotonic() - started
  return trained, {
    "step_seconds": whole, "sampling_seconds": seconds.sampling,
    "learning_seconds": whole - seconds.sampling,
    "sampled_tokens": sum(int(t.loss_mask.sum()) for t in trajectories),
    "learned_tokens": int(metrics["learned_tokens"]),
    "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
  channel = sides.take_over_output()
  jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  work = json.loads(sys.stdin.readline())
  with tempfile.TemporaryDirectory() as folder:
    sides.serve(answers(work, pathlib.Path(folder) / "trajectories"), channel)


if __name__ == "__main__":
  main()
