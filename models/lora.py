"""Low-rank adapters (arXiv 2106.09685): declared beside the parameters, merged for sampling and export."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from wootz.models.layers import LoraWeight
from wootz.models.params import ParamSpec, Tree

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
# How many of a weight's dimensions, counted without the layer dimension, are inputs of the linear map.
_INPUT_DIMS = {"output": 2}


def lora_specs(specs: Tree, *, rank: int, targets: Sequence[str] = TARGETS) -> Tree:
  """Declares A ("down", [layers, rank, in]) and B ("up", [layers, out, rank], zero) per target weight."""
  layers = specs["layers"]
  if rank < 1:
    raise ValueError(f"LoRA rank {rank} is below 1; train all parameters instead of rank 0")
  if unknown := [name for name in targets if name not in layers or name not in TARGETS]:
    raise ValueError(f"LoRA targets {unknown} are not weights of a layer: choose from {TARGETS}")

  def adapter(name):
    inputs, outputs = _matrix_sizes(layers[name].shape, name)
    depth = layers[name].shape[0]
    return {"down": ParamSpec((depth, rank, inputs), ("layer", None, None), fan_in=inputs),
            "up": ParamSpec((depth, outputs, rank), ("layer", None, None), init="zeros")}

  return {name: adapter(name) for name in targets}


def _matrix_sizes(shape: tuple[int, ...], name: str) -> tuple[int, int]:
  split = len(shape) - _INPUT_DIMS.get(name, 1)
  return math.prod(shape[split:]), math.prod(shape[1:split])


def attach(params: Tree, adapters: Tree, *, alpha: float) -> Tree:
  """Parameters whose target weights carry their adapter; `transformer.forward` takes them as they are."""
  def carry(name):
    down, up = adapters[name]["down"], adapters[name]["up"]
    return LoraWeight(params["layers"][name], down, up, scale=alpha / down.shape[1])
  return {**params, "layers": {**params["layers"], **{name: carry(name) for name in adapters}}}


def merge(params: Tree, adapters: Tree, *, alpha: float) -> Tree:
  """Plain parameters equal in effect to `attach`: W + alpha / rank * B A, in the weight's dtype."""
  def merged(name):
    base, down, up = params["layers"][name], adapters[name]["down"], adapters[name]["up"]
    update = jnp.einsum("lor,lri->loi", up, down) * (alpha / down.shape[1])
    return (base.astype(jnp.float32) + update.reshape(base.shape)).astype(base.dtype)
  layers = {**params["layers"], **{name: merged(name) for name in adapters}}
  return {**params, "layers": layers}
