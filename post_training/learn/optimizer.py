"""Optimizers and schedules, on optax. A schedule's length counts optimizer updates."""

from __future__ import annotations

import jax
import optax

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate_schedule(kind: str, *, peak: float, warmup_updates: int, total_updates: int,
                           final_fraction: float = 0.0) -> optax.Schedule:
  """Rate by number of updates done: rises from 0 to `peak` over `warmup_updates`, then decays.

  Update u (from 0) uses schedule(u), so with a warm-up of 4 the rates are 0, 1/4, 2/4, 3/4, 1 of the
  peak, and without one the first update uses the peak. Decaying kinds reach peak * final_fraction at
  the last update.
  """
  if kind not in SCHEDULES:
    raise ValueError(f"learning-rate schedule {kind!r} is unknown: one of {', '.join(SCHEDULES)}")
  if not 0 <= warmup_updates < total_updates:
    raise ValueError(f"warm-up of {warmup_updates} updates does not fit a run of {total_updates}")
  steps = max(total_updates - 1 - warmup_updates, 1)
  main = {
    "constant": lambda: optax.constant_schedule(peak),
    "linear": lambda: optax.linear_schedule(peak, peak * final_fraction, steps),
    "cosine": lambda: optax.cosine_decay_schedule(peak, steps, alpha=final_fraction),
  }[kind]()
  warmup = optax.linear_schedule(0.0, peak, max(warmup_updates, 1))
  return optax.join_schedules([warmup, main], [warmup_updates]) if warmup_updates else main


def adamw(schedule: optax.Schedule, *, max_gradient_norm: float, weight_decay: float = 0.0,
          b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
  """AdamW (arXiv 1711.05101) behind clipping by global norm. Norm weights are not decayed."""
  if max_gradient_norm <= 0:
    raise ValueError(f"max_gradient_norm {max_gradient_norm} must be positive (float('inf') clips nothing)")

  def decayed(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

  return optax.chain(optax.clip_by_global_norm(max_gradient_norm),
                     optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay,
                                 mask=decayed))
