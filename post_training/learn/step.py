"""The learner: gradients accumulated over micro-batches, then one optimizer update; pure and jitted here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from wootz.models.params import Tree
from wootz.post_training.learn.grpo import PolicyBatch


@flax.struct.dataclass
class TrainState:
  """Everything on the device that an update changes."""

  step: jax.Array  # int32, optimizer updates done: the version of the weights
  params: Tree  # what is trained, float32: the model's parameters, or its adapters
  opt_state: optax.OptState


@flax.struct.dataclass
class Accumulated:
  """Sums over the micro-batches of one update so far."""

  gradient: Tree  # of the loss's numerator
  sums: dict[str, jax.Array]  # see `grpo_objective`


# (params, frozen, batch) -> (numerator, sums). Bind it once: each fresh partial recompiles.
LossFn = Callable[[Tree, Tree, PolicyBatch], tuple[jax.Array, dict[str, jax.Array]]]


def init_state(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
  """The state before the first update; `params` are taken over, not copied."""
  return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


@functools.partial(jax.jit, static_argnames="loss_fn")
def nothing_yet(params: Tree, frozen: Tree, batch: PolicyBatch, *, loss_fn: LossFn) -> Accumulated:
  """Zeros in the shape of what `add_microbatch` sums up."""
  _, sums = jax.eval_shape(loss_fn, params, frozen, batch)
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), Accumulated(params, sums))


@functools.partial(jax.jit, static_argnames="loss_fn", donate_argnames="so_far")
def add_microbatch(so_far: Accumulated, params: Tree, frozen: Tree, batch: PolicyBatch, *,
                   loss_fn: LossFn) -> Accumulated:
  """Adds the gradient and the sums of one micro-batch."""
  (_, sums), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, frozen, batch)
  return jax.tree.map(jnp.add, so_far, Accumulated(gradient, sums))


@jax.jit
def gradient_norm(accumulated: Accumulated) -> jax.Array:
  """Global norm of the mean gradient: before clipping."""
  return optax.global_norm(accumulated.gradient) / accumulated.sums["denominator"]


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def apply_update(state: TrainState, accumulated: Accumulated, *,
                 optimizer: optax.GradientTransformation) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimizer update from the accumulated sums: the same however the minibatch was cut.

  Returns the new state, and metrics: means per token, "loss", "gradient_norm" before clipping. Where the
  gradient is not finite the state stays as it is; see `finite` in the metrics.
  """
  sums = dict(accumulated.sums)
  denominator, tokens = sums.pop("denominator"), sums.pop("tokens")
  loss = sums.pop("loss") / denominator
  gradient = jax.tree.map(lambda leaf: leaf / denominator, accumulated.gradient)
  norm = optax.global_norm(gradient)
  finite = jnp.isfinite(norm)
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  updated = TrainState(step=state.step + 1, params=optax.apply_updates(state.params, updates),
                       opt_state=opt_state)
  state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
  metrics = {name: value / tokens for name, value in sums.items()}
  return state, {**metrics, "loss": loss, "gradient_norm": norm, "finite": finite}


@functools.partial(jax.jit, static_argnames="score_fn")
def score(params: Tree, frozen: Tree, rows: Any, *, score_fn) -> jax.Array:
  """Logprobs [B, N] of the rows' targets, without gradient: for old and reference policies."""
  return score_fn(params, frozen, rows)[0]


def learn_minibatch(state: TrainState, frozen: Tree, batches: list[PolicyBatch], *, loss_fn: LossFn,
                    optimizer: optax.GradientTransformation) -> tuple[TrainState, dict[str, float]]:
  """One optimizer update from the micro-batches of a minibatch (at least one, with targets).

  `state` is donated. Raises FloatingPointError, with the state as it was, when the gradient is not finite.
  """
  accumulated = nothing_yet(state.params, frozen, batches[0], loss_fn=loss_fn)
  for batch in batches:
    accumulated = add_microbatch(accumulated, state.params, frozen, batch, loss_fn=loss_fn)
  # Looked at before the update, which takes over the state's buffers: the caller's state stays whole.
  norm = float(gradient_norm(accumulated))
  if not math.isfinite(norm):
    raise FloatingPointError(f"gradient norm {norm} at optimizer update {int(state.step) + 1}: the weights "
                             "were left as they were; look at the batch and the learning rate")
  state, metrics = apply_update(state, accumulated, optimizer=optimizer)
  metrics = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "finite"}
  return state, metrics
