"""Between published weight files (one matrix per name) and the stacked parameter tree."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from flax import traverse_util

from wootz.models.config import ModelConfig
from wootz.models.params import ParamSpec, Tree, is_spec

FAMILIES = ("llama",)


def family_module(name: str) -> ModuleType:
  """The module of a model family; ValueError names the unknown family and the known ones."""
  if name not in FAMILIES:
    raise ValueError(f"unknown model architecture {name!r} (known: {', '.join(FAMILIES)})")
  return importlib.import_module(f"wootz.models.families.{name}")


def published_shape(spec: ParamSpec) -> tuple[int, ...]:
  """The shape of one layer's matrix in a file, where heads and head_dim are one dimension."""
  sizes: list[int] = []
  for size, axis in zip(spec.shape, spec.axes, strict=True):
    if axis == "layer":
      continue
    if axis == "head_dim":
      sizes[-1] *= size
    else:
      sizes.append(size)
  return tuple(sizes)


def flat_specs(config: ModelConfig) -> dict[str, ParamSpec]:
  specs = family_module(config.family).param_specs(config)
  return traverse_util.flatten_dict(specs, sep=".", is_leaf=lambda _, node: is_spec(node))


def layer_names(template: str, spec: ParamSpec) -> list[str]:
  """The file's names of one leaf: one per layer, or the single name."""
  if spec.axes[0] != "layer":
    return [template]
  return [template.format(layer) for layer in range(spec.shape[0])]


def assemble(config: ModelConfig, names: dict[str, str], available: Iterable[str],
             read: Callable[[str, str], np.ndarray], *, dtype: Any, source: str) -> Tree:
  """Builds the parameter tree from a file's tensors.

  Args:
    names: leaf path ("layers.query") to the file's name with "{}" for the layer.
    available: every tensor name in the file.
    read: (tensor name, leaf path) to the matrix in its published shape.
    dtype: of the tree's leaves; None keeps the dtype of each leaf's first tensor.
    source: what to call the file in errors.

  Returns:
    A tree as `param_specs(config)` with numpy leaves, layers stacked first.

  Raises:
    ValueError: a tensor is missing, left over or of another shape, each by name.
  """
  specs = flat_specs(config)
  wanted = {leaf: layer_names(names[leaf], spec) for leaf, spec in specs.items()}
  _check_names([name for group in wanted.values() for name in group], available, source)
  leaves = {}
  for leaf, spec in specs.items():
    leaves[leaf] = _stack(leaf, spec, wanted[leaf], read, dtype, source)
  return traverse_util.unflatten_dict(leaves, sep=".")


def _check_names(wanted: list[str], available: Iterable[str], source: str) -> None:
  available = set(available)
  if missing := sorted(set(wanted) - available):
    raise ValueError(f"{source} lacks {len(missing)} tensors: {_some(missing)}")
  if leftover := sorted(available - set(wanted)):
    raise ValueError(f"{source} holds {len(leftover)} tensors this model family does not know: "
                     f"{_some(leftover)}")


def _some(names: list[str], limit: int = 8) -> str:
  return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _stack(leaf, spec, names, read, dtype, source) -> np.ndarray:
  shape = published_shape(spec)
  first = read(names[0], leaf)
  stacked = np.empty((len(names), *shape), dtype or first.dtype)
  for index, name in enumerate(names):
    matrix = read(name, leaf) if index else first
    if matrix.shape != shape:
      raise ValueError(f"{source}: tensor {name!r} has shape {matrix.shape}, the configuration "
                       f"says {shape}")
    if dtype is None and matrix.dtype != stacked.dtype:
      raise ValueError(f"{source}: tensor {name!r} is {matrix.dtype}, its sibling {names[0]!r} is "
                       f"{stacked.dtype}: name one dtype to load them all in")
    stacked[index] = matrix
  return stacked.reshape(spec.shape)


def disassemble(config: ModelConfig, names: dict[str, str], params: Tree
                ) -> Iterator[tuple[str, np.ndarray]]:
  """The inverse of `assemble`: (file's name, matrix) in the tree's order, one at a time."""
  leaves = traverse_util.flatten_dict(params, sep=".")
  specs = flat_specs(config)
  if leaves.keys() != specs.keys():
    raise ValueError("parameters and configuration differ in leaves: "
                     f"{sorted(leaves.keys() ^ specs.keys())}")
  for leaf, spec in specs.items():
    if tuple(leaves[leaf].shape) != spec.shape:
      raise ValueError(f"parameter {leaf!r} has shape {tuple(leaves[leaf].shape)}, the "
                       f"configuration says {spec.shape}")
    shape = published_shape(spec)
    file_names = layer_names(names[leaf], spec)
    stacked = np.asarray(leaves[leaf]).reshape(len(file_names), *shape)
    yield from zip(file_names, stacked, strict=True)
