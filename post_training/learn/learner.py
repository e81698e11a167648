"""One update of the policy from the stored trajectories of one batch: advantages, minibatches, steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from wootz.data import loader
from wootz.data.manifest import Entry
from wootz.data.packing import PackedRows
from wootz.data.store import TrajectoryStore
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.post_training.learn import step as steps
from wootz.post_training.learn.advantages import group_advantages
from wootz.post_training.learn.grpo import PolicyBatch, grpo_objective
from wootz.post_training.learn.logprobs import target_logprobs
from wootz.post_training.learn.step import TrainState


@dataclasses.dataclass(frozen=True)
class Learner:
  """The functions an update is made of, bound once so that nothing recompiles."""

  loss_fn: steps.LossFn
  score_fn: Callable[[Tree, Tree, PackedRows], tuple[jax.Array, jax.Array]]
  optimizer: optax.GradientTransformation
  advantage_fn: Callable[[np.ndarray, np.ndarray], jax.Array]  # rewards, valid [G, n]
  uses_reference: bool


@dataclasses.dataclass(frozen=True)
class Packing:
  """How a batch is cut for the device; `num_minibatches` and `epochs` alone change the result."""

  row_length: int
  rows_per_microbatch: int
  num_minibatches: int = 1
  epochs: int = 1


def make_learner(
  config: ModelConfig,
  *,
  assemble: Callable[[Tree, Tree], Tree],
  optimizer: optax.GradientTransformation,
  num_sequences: int,
  temperature: float,
  compute_dtype: Any,
  remat: str,
  advantage: dict[str, Any],
  objective: dict[str, Any],
) -> Learner:
  """Binds the GRPO learner.

  Args:
    config: the model's facts.
    assemble: (trained, frozen) -> the model's parameters; the first of the two for full training.
    optimizer: see wootz.post_training.learn.optimizer.
    num_sequences: most completions that one minibatch can hold.
    temperature: that the samples were drawn at; the policy is softmax(logits / temperature).
    compute_dtype, remat: see `transformer.forward`.
    advantage: keywords of `group_advantages`.
    objective: keywords of `grpo_objective`.
  """
  def score_fn(params, frozen, rows):
    return target_logprobs(assemble(params, frozen), config, rows, temperature=temperature,
                           compute_dtype=compute_dtype, remat=remat)

  def loss_fn(params, frozen, batch: PolicyBatch):
    logprobs, entropy = score_fn(params, frozen, batch.rows)
    return grpo_objective(logprobs, entropy, batch, num_sequences=num_sequences, **objective)

  return Learner(loss_fn, score_fn, optimizer, functools.partial(group_advantages, **advantage),
                 uses_reference=objective.get("kl_coefficient", 0.0) > 0)


def entry_advantages(entries: Sequence[Entry], group_size: int, advantage_fn) -> dict[loader.Key, float]:
  """Advantage of every scored sample whose group has spread: flat groups are left out.

  Samples without a score take no part: neither in a baseline nor in the result.
  """
  groups: dict[str, list[Entry]] = {}
  for entry in entries:
    groups.setdefault(entry.group, []).append(entry)
  rewards = np.zeros((len(groups), group_size), np.float32)
  valid = np.zeros((len(groups), group_size), bool)
  for row, members in enumerate(groups.values()):
    for entry in members:
      if entry.score is not None:
        rewards[row, entry.sample_index], valid[row, entry.sample_index] = entry.score, True
  advantages = np.asarray(advantage_fn(rewards, valid))
  return {entry.key: float(advantages[row, entry.sample_index])
          for row, members in enumerate(groups.values()) if np.any(advantages[row] != 0)
          for entry in members if valid[row, entry.sample_index]}


def learn(
  learner: Learner,
  state: TrainState,
  frozen: Tree,
  reference: Tree,
  store: TrajectoryStore,
  *,
  update: int,
  group_size: int,
  packing: Packing,
  seed: int,
  place: Callable[[PackedRows], PackedRows] = lambda rows: rows,
) -> tuple[TrainState, dict[str, float]]:
  """Learns from the stored trajectories of one update.

  Args:
    learner: see `make_learner`.
    state: donated; use the returned one.
    frozen: parameters that are not trained ({} for full training).
    reference: trained part of the reference policy, for the KL; None without one.
    store: holds the update's trajectories.
    update: whose trajectories.
    group_size: samples per task.
    packing: how the batch is cut.
    seed: of the order of minibatches.
    place: puts host arrays onto devices.

  Returns:
    The state, and metrics: means over the optimizer updates weighted by tokens. A batch in which every
    group is flat changes nothing and gives only the counts.
  """
  entries = store.of_update(update)
  advantages = entry_advantages(entries, group_size, learner.advantage_fn)
  counts = _group_counts(entries, advantages)
  if not advantages:
    return state, {**counts, "optimizer_updates": 0.0, "learned_tokens": 0.0}
  minibatches = loader.minibatches(
    store, update, advantages=advantages, row_length=packing.row_length,
    rows_per_microbatch=packing.rows_per_microbatch, num_minibatches=packing.num_minibatches,
    epochs=packing.epochs, seed=seed)
  several = len(minibatches) > 1
  planned = [(minibatch.num_targets, [place(rows) for rows in minibatch]) for minibatch in minibatches]
  scored = [(tokens, [_with_policies(learner, state.params, frozen, reference, rows, several)
                      for rows in microbatches]) for tokens, microbatches in planned]
  parts = []
  for tokens, batches in scored:
    state, metrics = steps.learn_minibatch(state, frozen, batches, loss_fn=learner.loss_fn,
                                           optimizer=learner.optimizer)
    parts.append((tokens, metrics))
  return state, {**counts, **_mean_metrics(parts), "optimizer_updates": float(len(parts))}


def _with_policies(learner, params, frozen, reference, rows, several) -> PolicyBatch:
  """Old logprobs are the learner's own, taken before the first of several updates moves it.

  With a single update they are the current ones, which the loss knows without another forward pass.
  """
  old = steps.score(params, frozen, rows, score_fn=learner.score_fn) if several else None
  ref = (steps.score(reference, frozen, rows, score_fn=learner.score_fn)
         if learner.uses_reference else None)
  return PolicyBatch(rows=rows, old_logprobs=old, reference_logprobs=ref)


def _group_counts(entries, advantages) -> dict[str, float]:
  groups = {entry.group for entry in entries}
  taught = {entry.group for entry in entries if entry.key in advantages}
  return {"flat_groups": 1.0 - len(taught) / max(len(groups), 1)}


def _mean_metrics(parts) -> dict[str, float]:
  total = sum(tokens for tokens, _ in parts)
  means = {name: sum(tokens * metrics[name] for tokens, metrics in parts) / total
           for name in parts[0][1]}
  return {**means, "learned_tokens": float(total)}
