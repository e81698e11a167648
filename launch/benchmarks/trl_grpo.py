"""TRL's side of the GRPO benchmark: `GRPOTrainer` as it is, one optimizer step each time it is told to.

Runs as a script in the peer's virtual environment and imports nothing of this package; the protocol is
described in `wootz.launch.benchmarks.sides`.

Choices, made for speed where TRL leaves one:
- sampling runs on the whole generation batch at once, TRL's default being that steps_per_generation is
  gradient_accumulation_steps; with one iteration TRL then needs no second forward pass for old logprobs.
- bf16 off (TRL turns mixed precision on by default), so that both sides compute in float32.
- gradient checkpointing as told: TRL's default, on, is slower and takes less memory.
- SDPA attention, fused AdamW and the key-value cache are the defaults and stay.
- no token is taken for an end token, so that every completion has its full length.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time

PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "numpy")
NO_TOKEN = -1  # as an end token: none


def character_reward(text: str, letters: str) -> float:
  """Share of the characters of `text` that are in `letters`; 0 for an empty text."""
  return sum(map(text.count, letters)) / max(len(text), 1)


def character_rewards(letters: str):
  def reward(completions, **_):
    return [character_reward(messages[0]["content"], letters) for messages in completions]
  return reward


def make_trainer(work: dict, folder: str):
  """The trainer, over as many copies of the prompts as there are steps."""
  import torch
  from datasets import Dataset
  from transformers import AutoModelForCausalLM, AutoTokenizer
  from trl import GRPOConfig, GRPOTrainer

  torch.set_num_threads(work["threads"])
  torch.set_num_interop_threads(1)
  place, name = os.path.split(work["model"])
  model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
  model.is_quantized = False  # its weights are plain float32 now; the trainer refuses quantised ones
  batch = work["samples"] * len(work["tasks"])
  if batch % work["peer_batch"]:
    raise ValueError(f"--peer_batch {work['peer_batch']} does not divide {batch} samples per step")
  settings = GRPOConfig(
    output_dir=folder, seed=work["seed"], use_cpu=True, bf16=False, fp16=False,
    gradient_checkpointing=work["peer_checkpointing"],
    per_device_train_batch_size=work["peer_batch"],
    gradient_accumulation_steps=batch // work["peer_batch"], max_steps=work["total_steps"],
    num_generations=work["samples"], max_completion_length=work["new_tokens"],
    temperature=1.0, generation_kwargs={"eos_token_id": NO_TOKEN},
    learning_rate=work["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
    beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, scale_rewards="group", num_iterations=1,
    shuffle_dataset=False, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
  rows = [{"prompt": task["messages"]} for task in work["tasks"]] * work["total_steps"]
  trainer = GRPOTrainer(
    model=model, args=settings, train_dataset=Dataset.from_list(rows),
    reward_funcs=character_rewards(work["letters"]),
    processing_class=AutoTokenizer.from_pretrained(place, gguf_file=name, padding_side="left"))
  trainer.eos_token_ids = [NO_TOKEN]
  return trainer


class SamplingClock:
  """Measures `trainer._generate`: tokenizing, generating and decoding of a generation batch."""

  def __init__(self, trainer) -> None:
    self.seconds, self.tokens = 0.0, 0
    self._generate = trainer._generate
    trainer._generate = self

  def __call__(self, prompts):
    started = time.monotonic()
    result = self._generate(prompts)
    self.seconds += time.monotonic() - started
    self.tokens += sum(map(len, result[1]))
    return result

  def take(self) -> tuple[float, int]:
    """Seconds and sampled tokens since the last call."""
    taken, self.seconds, self.tokens = (self.seconds, self.tokens), 0.0, 0
    return taken


def make_callback(channel, clock: SamplingClock):
  """Waits for a command before each optimizer step and reports after it."""
  from transformers import TrainerCallback

  class OnCommand(TrainerCallback):
    started = cpu_before = 0.0

    def on_step_begin(self, args, state, control, **_):
      idle_since = time.process_time()
      line = sys.stdin.readline()
      if not line or json.loads(line)["do"] == "quit":
        sys.exit(0)
      self.started, self.cpu_before = time.monotonic(), time.process_time()
      self.idle = self.cpu_before - idle_since

    def on_step_end(self, args, state, control, **_):
      whole = time.monotonic() - self.started
      sampling, tokens = clock.take()
      tell(channel, {
        "step_seconds": whole, "sampling_seconds": sampling, "learning_seconds": whole - sampling,
        "sampled_tokens": tokens,
        "learned_tokens": tokens,  # every sampled token is in the loss, whatever its advantage
        "cpu_seconds": time.process_time() - self.cpu_before, "idle_cpu_seconds": self.idle,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})

  return OnCommand()


def describe(trainer, work: dict) -> dict:
  import torch
  prompts = [task["messages"] for task in work["tasks"]]
  args = trainer.args
  return {
    "prompt_ids": [list(map(int, ids)) for ids in trainer._tokenize_prompts(prompts)[0]],
    "about": {
      "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
      "threads": torch.get_num_threads(), "attention": trainer.model.config._attn_implementation,
      "dtype": str(trainer.model.dtype), "optimizer": str(getattr(args.optim, "value", args.optim)),
      "loss": args.loss_type, "per_device_train_batch_size": args.per_device_train_batch_size,
      "gradient_accumulation_steps": args.gradient_accumulation_steps,
      "steps_per_generation": args.steps_per_generation,
      "gradient_checkpointing": args.gradient_checkpointing, "bf16": args.bf16}}


def tell(channel, message: dict) -> None:
  print(json.dumps(message), file=channel, flush=True)


def main() -> None:
  channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # what libraries print must not mix with the answers
  work = json.loads(sys.stdin.readline())
  with tempfile.TemporaryDirectory() as folder:
    trainer = make_trainer(work, folder)
    answer = describe(trainer, work)
    trainer.add_callback(make_callback(channel, SamplingClock(trainer)))
    tell(channel, answer)
    trainer.train()


if __name__ == "__main__":
  main()
