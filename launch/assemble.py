"""Builds the parts of a run from its configuration; below this nobody sees a config."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wootz.data import chat
from wootz.data.records import Task
from wootz.data.task_pool import TaskPool
from wootz.data.tokenizer import Tokenizer, from_gguf_metadata, from_hf
from wootz.launch.config import Config, ConfigError, LearnerSection, ModelSection, RolloutSection
from wootz.models import gguf, hf, lora, pretrained, published, transformer
from wootz.models.config import ModelConfig
from wootz.models.params import Tree, init_params
from wootz.post_training import loop
from wootz.post_training.domains.base import Domain, get_domain
from wootz.post_training.evaluate import suite
from wootz.post_training.learn import learner as learning
from wootz.post_training.learn import optimizer as optimizers
from wootz.post_training.rollout import engine
from wootz.post_training.rollout.collect import Sampling

KNOWN_MODELS = {"smollm2-135m-instruct": pretrained.fetch_smollm2}


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """What a model file holds."""

  config: ModelConfig
  params: Tree  # float32, layers stacked
  tokenizer: Tokenizer


def load_base_model(path: str) -> BaseModel:
  """A model by known name, GGUF file or Hugging Face folder. ValueError names what it could be."""
  place = pathlib.Path(KNOWN_MODELS[path]() if path in KNOWN_MODELS else path)
  if place.is_dir():
    folder = hf.load_hf(place)
    return BaseModel(folder.config, folder.params, from_hf(place))
  if place.suffix == ".gguf" and place.is_file():
    file = gguf.load_gguf(place)
    return BaseModel(file.config, file.params, from_gguf_metadata(file.metadata))
  raise ValueError(f"model.path {path!r} is neither a known model ({', '.join(KNOWN_MODELS)}), a .gguf "
                   "file nor a folder in Hugging Face's layout")


def compute_dtype(name: str) -> Any:
  """The dtype of activations. "auto": bfloat16 where the hardware multiplies it, float32 on CPU."""
  if name == "auto":
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  return jnp.dtype(name).type


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How the model's parameters come together from a trained and a frozen part."""

  forward_params: Callable[[Tree, Tree], Tree]  # for the learner's forward
  plain_params: Callable[[Tree, Tree], Tree]  # without adapters, for sampling and export


def make_recipe(*, lora_rank: int) -> Recipe:
  """All parameters are trained (rank 0), or adapters beside frozen ones; alpha is twice the rank."""
  if lora_rank == 0:
    return Recipe(lambda trained, frozen: trained, lambda trained, frozen: trained)
  alpha = 2.0 * lora_rank
  return Recipe(lambda trained, frozen: lora.attach(frozen, trained, alpha=alpha),
                lambda trained, frozen: lora.merge(frozen, trained, alpha=alpha))


def initial_weights(model: BaseModel, section: ModelSection, *, seed: int) -> tuple[Tree, Tree]:
  """The trained and the frozen part, on the device, as a run begins."""
  params = jax.tree.map(jnp.asarray, model.params)
  if section.lora_rank == 0:
    return params, {}
  specs = lora.lora_specs(published.family_module(model.config.family).param_specs(model.config),
                          rank=section.lora_rank, targets=section.lora_targets)
  return init_params(specs, jax.random.key(seed)), params


def make_policy(model: BaseModel, recipe: Recipe, trained: Tree, frozen: Tree,
                config: Config) -> loop.Policy:
  """The engine, with the weights brought into the rollout layout at each call.

  `trained` is the base policy's: it is copied when a KL to it is asked for, else not held.
  """
  dtype = compute_dtype(config.model.compute_dtype)

  @jax.jit
  def rollout_layout(trained, frozen):
    params = transformer.unstack_layers(recipe.plain_params(trained, frozen))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

  def generate(trained, frozen, requests):
    return engine.generate(
      rollout_layout(trained, frozen), model.config, requests, num_slots=config.rollout.slots,
      decode_text=functools.partial(model.tokenizer.decode, skip_control=True), dtype=dtype)

  # A copy: the trained parameters' own buffers are donated at the first update.
  reference = jax.tree.map(jnp.copy, trained) if config.learner.kl_coefficient > 0 else None
  return loop.Policy(generate=generate, tokenizer=model.tokenizer, frozen=frozen,
                     reference=reference, place=lambda rows: rows)


def make_learner(model: BaseModel, recipe: Recipe, config: Config) -> tuple[learning.Learner, Any]:
  """The learner, and its learning-rate schedule by optimizer updates."""
  section, rollout = config.learner, config.rollout
  schedule = optimizers.learning_rate_schedule(
    section.schedule, peak=section.learning_rate, total_updates=config.optimizer_steps,
    warmup_updates=section.warmup_updates * config.optimizer_steps_per_update)
  optimizer = optimizers.adamw(
    schedule, max_gradient_norm=section.max_grad_norm, weight_decay=section.weight_decay,
    b1=section.adam_b1, b2=section.adam_b2, eps=section.adam_eps)
  groups = -(-rollout.tasks_per_update // section.minibatches)
  learner = learning.make_learner(
    model.config, assemble=recipe.forward_params, optimizer=optimizer,
    num_sequences=groups * rollout.samples_per_task, temperature=rollout.temperature,
    compute_dtype=compute_dtype(config.model.compute_dtype), remat=section.remat,
    advantage={"baseline": section.baseline, "scale": section.advantage_scale},
    objective=_objective(section, rollout.max_new_tokens))
  return learner, schedule


def _objective(section: LearnerSection, max_new_tokens: int) -> dict[str, Any]:
  correction = {"correction": "none"} if section.importance_level == "none" else {
    "correction": section.importance_rule, "correction_level": section.importance_level,
    "correction_low": section.importance_low, "correction_high": section.importance_high}
  return {"clip_low": section.clip_low, "clip_high": section.clip_high,
          "kl_coefficient": section.kl_coefficient, "kl_estimator": section.kl_estimator,
          "aggregation": section.aggregation,
          "constant": float(max_new_tokens) if section.aggregation == "constant" else None,
          **correction}


def make_suite(config: Config, domain: Domain) -> suite.Suite:
  """What is evaluated. ValueError when the domain has fewer tasks than asked for."""
  section = config.evaluation
  tasks = suite.choose_tasks(domain, held_out=section.held_out_tasks, unseen=section.unseen_tasks)
  return suite.Suite(tasks, section.samples_per_task, section.sampled_tasks, section.temperature,
                     section.max_new_tokens, section.stop_strings)


def make_sampling(section: RolloutSection, *, num_samples: int) -> Sampling:
  """How training tasks are sampled."""
  return Sampling(num_samples=num_samples, temperature=section.temperature,
                  max_new_tokens=section.max_new_tokens, top_k=section.top_k, top_p=section.top_p,
                  stop_strings=section.stop_strings)


def make_plan(config: Config, domain: Domain, schedule: Any) -> loop.Plan:
  """The run in plain values."""
  rollout, learner = config.rollout, config.learner
  return loop.Plan(
    directory=pathlib.Path(config.run.directory), seed=config.run.seed, updates=config.run.updates,
    tasks_per_update=rollout.tasks_per_update,
    sampling=make_sampling(rollout, num_samples=rollout.samples_per_task),
    packing=learning.Packing(learner.row_length, learner.rows_per_microbatch, learner.minibatches,
                             learner.epochs),
    curriculum_mode=rollout.curriculum,
    suite=make_suite(config, domain),
    checkpoint_every=config.checkpoint.every_updates, learning_rate=schedule)


def check_lengths(config: Config, model: BaseModel, tasks: Sequence[Task]) -> None:
  """Raises ConfigError when a prompt and its longest completion do not fit a packed row."""
  longest = max(len(chat.render_chat(model.tokenizer, task.messages)) for task in tasks)
  need = min(longest + config.rollout.max_new_tokens, model.config.max_positions)
  if need > config.learner.row_length:
    raise ConfigError(
      f"learner.row_length is {config.learner.row_length}: the longest prompt has {longest} tokens and "
      f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, so at least {need} are needed")


def make_task_pool(config: Config) -> tuple[Domain, TaskPool]:
  """The domain and its training tasks."""
  domain = get_domain(config.domain.name)
  return domain, TaskPool(tuple(domain.tasks("train")), seed=config.run.seed)
