"""What an experiment decides: one frozen dataclass of nested sections.

A config is a Python file with `get_config()` that returns a `Config` (see launch/configs/). Every
section checks the types and ranges of its own fields when it is built, and `Config` checks what
spans sections, so a wrong value fails before any work is done, with the key in the message.
The reading of files and of `--config.section.key=value` is in `wootz.launch.config_flags`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

# These keys change neither what is computed nor its result, so a resumed run may change them.
MAY_CHANGE_ON_RESUME = frozenset(
  {"run.directory", "run.resume", "checkpoint.every_updates", "checkpoint.keep"})


class ConfigError(ValueError):
  """A configuration that cannot be run; the message names the key and the remedy."""


def type_name(hint: Any) -> str:
  """An annotation as a person writes it: `int | None`, `tuple[str, ...]`, `'a' | 'b'`."""
  if typing.get_origin(hint) is Literal:
    return " | ".join(repr(choice) for choice in typing.get_args(hint))
  return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def conform(value: Any, hint: Any) -> Any:
  """`value` as an instance of the annotation `hint`; an int serves where a float is asked.

  Raises TypeError when it is none. NaN and infinities are no floats here: no setting means them.
  """
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal and isinstance(value, str) and value in arguments:
    return value
  if origin in (types.UnionType, typing.Union):
    inner = next(argument for argument in arguments if argument is not types.NoneType)
    return None if value is None else conform(value, inner)
  if origin is tuple and isinstance(value, (tuple, list)):
    return tuple(conform(item, arguments[0]) for item in value)
  if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
    if math.isfinite(value):
      return float(value)
  elif origin is None and type(value) is hint:
    return value
  raise TypeError(f"expected {type_name(hint)}, got {value!r}")


def field_types(section: type) -> dict[str, Any]:
  """Field name -> annotation, resolved."""
  return typing.get_type_hints(section)


class _Section:
  """Base of all sections: fields are held to their annotations."""

  label = ""  # the section's name as a prefix of its keys

  def __post_init__(self) -> None:
    for name, hint in field_types(type(self)).items():
      try:
        object.__setattr__(self, name, conform(getattr(self, name), hint))
      except TypeError as error:
        raise ConfigError(f"{self.label}{name}: {error}") from None
    self._check()

  def _check(self) -> None:
    """Ranges of this section's own fields."""

  def _require(self, name: str, accepted: bool, rule: str) -> None:
    if not accepted:
      raise ConfigError(f"{self.label}{name} is {getattr(self, name)!r}: must be {rule}")

  def _require_at_least(self, least: int, *names: str) -> None:
    for name in names:
      self._require(name, getattr(self, name) >= least, f"at least {least}")


@dataclasses.dataclass(frozen=True)
class ModelSection(_Section):
  """Which weights are trained, and how."""

  path: str = "smollm2-135m-instruct"  # a known name, a GGUF file, or a folder in Hugging Face's layout
  lora_rank: int = 0  # 0 trains all parameters
  lora_targets: tuple[str, ...] = ("query", "value")  # parameters that get an adapter
  compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: what suits the platform

  label = "model."

  def _check(self) -> None:
    self._require("path", bool(self.path), "a model name or the path of a GGUF file")
    self._require_at_least(0, "lora_rank")
    if self.lora_rank:
      self._require("lora_targets", bool(self.lora_targets), "non-empty when model.lora_rank > 0")


@dataclasses.dataclass(frozen=True)
class DomainSection(_Section):
  """Where tasks and grades come from."""

  name: str = "python_functions"  # a name in the registry of post_training/domains/base.py

  label = "domain."

  def _check(self) -> None:
    self._require("name", self.name.isidentifier(), "the name of a domain")


@dataclasses.dataclass(frozen=True)
class RolloutSection(_Section):
  """How the policy is sampled during training."""

  tasks_per_update: int = 8  # groups drawn for one update
  samples_per_task: int = 8  # group size
  max_new_tokens: int = 96  # tokens; longer completions are cut
  temperature: float = 1.0  # 1 samples from the model's own distribution
  top_k: int = 0  # tokens kept; 0 keeps all
  top_p: float = 1.0  # probability mass kept; 1 keeps all
  stop_strings: tuple[str, ...] = ()  # a sample ends with the token that completes one of them
  slots: int = 32  # sequences decoded at once
  curriculum: Literal["uniform", "learnable"] = "uniform"  # all alike, or by measured pass rate

  label = "rollout."

  def _check(self) -> None:
    self._require_at_least(1, "tasks_per_update", "samples_per_task", "max_new_tokens", "slots")
    self._require("temperature", self.temperature > 0,
                  "above 0: greedy samples of one task are all equal and teach nothing")
    self._require_at_least(0, "top_k")
    self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")


@dataclasses.dataclass(frozen=True)
class LearnerSection(_Section):
  """How sampled and graded groups become new weights."""

  learning_rate: float = 1e-5  # the schedule's peak
  schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up; others fall to 0
  warmup_updates: int = 0  # updates over which the rate rises from 0
  adam_b1: float = 0.9  # decay of the first moment
  adam_b2: float = 0.999  # decay of the second moment
  adam_eps: float = 1e-8  # added to the root of the second moment
  weight_decay: float = 0.0  # decoupled, per step, times the rate
  max_grad_norm: float = 1.0  # global norm above which gradients are scaled down
  baseline: Literal["mean", "leave_one_out", "none"] = "mean"  # subtracted from a group's rewards
  advantage_scale: Literal["std", "none", "mean"] = "std"  # a group's advantages are divided by it
  aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # loss over tokens
  clip_low: float = 0.2  # probability ratios below 1 - clip_low are clipped
  clip_high: float = 0.28  # probability ratios above 1 + clip_high are clipped
  kl_coefficient: float = 0.0  # weight of the KL to the base model in the loss; 0 leaves it out
  kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # per-token estimate of that KL
  importance_level: Literal["none", "token", "sequence", "geometric"] = "token"  # sampler ratio
  importance_rule: Literal["truncate", "mask"] = "truncate"  # fate of ratios out of bounds
  importance_low: float = 0.0  # lower bound of the sampler ratio
  importance_high: float = 2.0  # upper bound of the sampler ratio
  epochs: int = 1  # passes over the samples of one update
  minibatches: int = 1  # optimizer steps per epoch
  row_length: int = 1024  # tokens of a packed row: a prompt and completions that share it
  rows_per_microbatch: int = 1  # rows per forward; changes memory and speed, not the result
  remat: Literal["none", "elementwise", "full"] = "full"  # what the backward pass computes again

  label = "learner."

  def _check(self) -> None:
    for name in ("learning_rate", "adam_eps", "max_grad_norm", "clip_high", "importance_high"):
      self._require(name, getattr(self, name) > 0, "above 0")
    self._require_at_least(0, "warmup_updates", "weight_decay", "kl_coefficient")
    self._require_at_least(1, "epochs", "minibatches", "row_length", "rows_per_microbatch")
    for name in ("adam_b1", "adam_b2"):
      self._require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
    self._require("clip_low", 0 < self.clip_low < 1, "in (0, 1)")
    self._require("importance_low", 0 <= self.importance_low <= self.importance_high,
                  "between 0 and learner.importance_high")
    if self.importance_rule == "truncate":
      self._require("importance_low", self.importance_low == 0, "0 unless learner.importance_rule is 'mask'")


@dataclasses.dataclass(frozen=True)
class EvaluationSection(_Section):
  """How the weights are judged before and after training."""

  held_out_tasks: int = 256  # tasks of the trained families that training never sees
  unseen_tasks: int = 64  # tasks of the families that training never sees
  samples_per_task: int = 4  # drawn samples beside the greedy one; 0 leaves sampling out
  sampled_tasks: int = 320  # tasks that samples are drawn of, at even distances through all
  pass_at: tuple[int, ...] = (1, 4)  # the k of pass@k
  temperature: float = 0.8  # of the drawn samples
  max_new_tokens: int = 96  # tokens
  stop_strings: tuple[str, ...] = ()  # as rollout.stop_strings

  label = "evaluation."

  def _check(self) -> None:
    self._require_at_least(1, "held_out_tasks", "max_new_tokens")
    self._require_at_least(0, "unseen_tasks", "samples_per_task", "sampled_tasks")
    self._require("temperature", self.temperature > 0, "above 0: greedy is always run beside it")
    if self.samples_per_task:
      self._require("pass_at", all(1 <= k <= self.samples_per_task for k in self.pass_at),
                    f"within 1..evaluation.samples_per_task = {self.samples_per_task}: pass@k "
                    "cannot be estimated from fewer than k samples")


@dataclasses.dataclass(frozen=True)
class CheckpointSection(_Section):
  """What is kept, so that a killed run goes on."""

  every_updates: int = 1  # updates between checkpoints
  keep: int = 2  # newest complete checkpoints kept

  label = "checkpoint."

  def _check(self) -> None:
    self._require_at_least(1, "every_updates", "keep")


@dataclasses.dataclass(frozen=True)
class RunSection(_Section):
  """Where, how long and from which randomness."""

  directory: str = "runs/quickstart"  # everything the run writes
  seed: int = 0  # of all randomness
  updates: int = 10  # rounds of sampling, grading and learning; the schedules' length too
  resume: bool = False  # continue the run in `directory`; without it a used one is refused

  label = "run."

  def _check(self) -> None:
    self._require("directory", bool(self.directory), "the path of a directory")
    self._require("seed", 0 <= self.seed < 2**32, "in [0, 2**32)")
    self._require_at_least(1, "updates")


@dataclasses.dataclass(frozen=True)
class Config(_Section):
  """One experiment."""

  model: ModelSection = ModelSection()
  domain: DomainSection = DomainSection()
  rollout: RolloutSection = RolloutSection()
  learner: LearnerSection = LearnerSection()
  evaluation: EvaluationSection = EvaluationSection()
  checkpoint: CheckpointSection = CheckpointSection()
  run: RunSection = RunSection()

  def _check(self) -> None:
    _check_groups(self.rollout, self.learner)
    if self.learner.warmup_updates >= self.run.updates:
      raise ConfigError(
        f"learner.warmup_updates is {self.learner.warmup_updates} but run.updates is "
        f"{self.run.updates}: the peak rate would never be reached")
    if self.learner.row_length <= self.rollout.max_new_tokens:
      raise ConfigError(
        f"learner.row_length is {self.learner.row_length} tokens, which cannot hold a prompt and "
        f"rollout.max_new_tokens = {self.rollout.max_new_tokens}: raise learner.row_length")

  @property
  def optimizer_steps_per_update(self) -> int:
    """Optimizer steps one update takes; schedules count steps, users count updates."""
    return self.learner.epochs * self.learner.minibatches

  @property
  def optimizer_steps(self) -> int:
    """Optimizer steps of the whole run, when no update is without signal."""
    return self.run.updates * self.optimizer_steps_per_update


def _check_groups(rollout: RolloutSection, learner: LearnerSection) -> None:
  """What the group-relative advantages need of the sampled groups."""
  if rollout.samples_per_task == 1:
    for key in ("baseline", "advantage_scale"):
      if getattr(learner, key) != "none":
        raise ConfigError(
          f"rollout.samples_per_task is 1 with learner.{key} {getattr(learner, key)!r}: a group of "
          "one has nothing to be compared with and would teach nothing. Set "
          "rollout.samples_per_task to 2 or more, or learner.baseline and "
          "learner.advantage_scale to 'none'")
  if learner.minibatches > rollout.tasks_per_update:
    raise ConfigError(
      f"learner.minibatches is {learner.minibatches} but rollout.tasks_per_update is "
      f"{rollout.tasks_per_update}: groups stay whole, so a minibatch would be empty")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Every setting as (dotted key, annotation, value), in the order of declaration."""
  for name, hint in field_types(type(config)).items():
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
      yield from leaves(value, f"{prefix}{name}.")
    else:
      yield prefix + name, hint, value


def to_dict(config: Config) -> dict[str, Any]:
  """Nested plain values, ready for JSON."""
  return dataclasses.asdict(config)


def to_json(config: Config) -> str:
  """The configuration as indented JSON text."""
  return json.dumps(to_dict(config), indent=2)


def from_dict(values: Mapping[str, Any]) -> Config:
  """The inverse of `to_dict`, and of parsed JSON. Raises ConfigError on unknown keys."""
  sections = {}
  for name, section in field_types(Config).items():
    given = values.get(name, {})
    if unknown := sorted(set(given) - set(field_types(section))):
      raise ConfigError(f"unknown key {name}.{unknown[0]}: written by another version?")
    sections[name] = section(**given)
  if unknown := sorted(set(values) - set(sections)):
    raise ConfigError(f"unknown section {unknown[0]}: written by another version?")
  return Config(**sections)


def digest(config: Config) -> str:
  """12 hex digits that two configurations share when they decide the same result."""
  deciding = {key: value for key, _, value in leaves(config) if key not in MAY_CHANGE_ON_RESUME}
  return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Change:
  """One setting in which two configurations differ."""

  key: str  # dotted, for example learner.learning_rate
  before: Any
  after: Any

  def __str__(self) -> str:
    return f"{self.key}: {self.before!r} -> {self.after!r}"


def diff(before: Config, after: Config) -> tuple[Change, ...]:
  """Every setting whose value differs, in the order of declaration."""
  return tuple(Change(key, old, new) for (key, _, old), (_, _, new)
               in zip(leaves(before), leaves(after), strict=True) if old != new)
