"""Parameters are declared once; values, abstract trees and shardings follow from the declaration."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays (or of ParamSpec)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """One parameter: its shape, a logical axis name per dimension, and how it begins."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  init: str = "normal"  # "normal" (scaled by fan-in), "ones", "zeros"
  fan_in: int = 0  # inputs summed over by "normal"

  def __post_init__(self) -> None:
    if len(self.shape) != len(self.axes):
      raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


def is_spec(node: Any) -> bool:
  return isinstance(node, ParamSpec)


def map_specs(fn, specs: Tree) -> Tree:
  return jax.tree.map(fn, specs, is_leaf=is_spec)


def abstract_params(specs: Tree, dtype=jnp.float32) -> Tree:
  """Shapes and dtypes without memory, for planning and restoring."""
  return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def init_params(specs: Tree, key: jax.Array, dtype=jnp.float32) -> Tree:
  """Initial values. A parameter's value depends on the key and its own name, not on its siblings."""
  def leaf(path, spec):
    if spec.init == "ones":
      return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
      return jnp.zeros(spec.shape, dtype)
    name = jax.tree_util.keystr(path)
    leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    scale = 1.0 / math.sqrt(spec.fan_in or spec.shape[-1])
    return scale * jax.random.normal(leaf_key, spec.shape, dtype)
  return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_spec)


def count(params: Tree) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_spec))
