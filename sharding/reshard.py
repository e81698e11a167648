"""Moving a tree of arrays from one sharding to another, device to device."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

Tree = Any  # a pytree of arrays


def reshard(tree: Tree, shardings: Any, *, donate: bool = False) -> Tree:
  """The same values under other shardings: one for all leaves, or a tree that matches.

  The copies go between devices, never through the host. `donate` gives up the old arrays leaf by
  leaf, so that at most one leaf exists in both layouts at once; they must not be used again.
  """
  if isinstance(shardings, Sharding):
    shardings = jax.tree.map(lambda _: shardings, tree)
  _refuse_mismatch(tree, shardings)
  return jax.tree.map(lambda leaf, target: _move(leaf, target, donate), tree, shardings)


def _move(leaf: jax.Array, target: Sharding, donate: bool) -> jax.Array:
  if not donate or leaf.sharding.is_equivalent_to(target, leaf.ndim):
    return jax.device_put(leaf, target)  # without a copy where it lies there already
  # device_put's own donation keeps buffers whose shards change shape, so they are freed here; a
  # copy that shared any of them would be freed too, hence may_alias=False.
  moved = jax.device_put(leaf, target, may_alias=False).block_until_ready()
  leaf.delete()
  return moved


def bytes_to_move(tree: Tree, shardings: Any) -> int:
  """Bytes that devices must receive: what each is to hold and does not hold already.

  Needs only shapes, dtypes and shardings, so it works on `jax.ShapeDtypeStruct`s too. It is a lower
  bound of the traffic: collectives may move more.
  """
  if isinstance(shardings, Sharding):
    shardings = jax.tree.map(lambda _: shardings, tree)
  _refuse_mismatch(tree, shardings)
  return sum(jax.tree.leaves(jax.tree.map(_missing_bytes, tree, shardings)))


def _missing_bytes(array, target: Sharding) -> int:
  held = array.sharding.devices_indices_map(array.shape)
  wanted = target.devices_indices_map(array.shape)
  elements = sum(_volume(index, array.shape) - _overlap(index, held.get(device), array.shape)
                 for device, index in wanted.items())
  return elements * np.dtype(array.dtype).itemsize


def _volume(index, shape) -> int:
  return math.prod(stop - start for start, stop in _bounds(index, shape))


def _overlap(first, second, shape) -> int:
  if second is None:
    return 0
  pairs = zip(_bounds(first, shape), _bounds(second, shape), strict=True)
  return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def _bounds(index, shape):
  return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def _refuse_mismatch(tree, shardings) -> None:
  expected: Any = jax.tree.structure(tree)
  given: Any = jax.tree.structure(shardings)
  if expected != given:
    raise ValueError(f"shardings {given} do not match the tree {expected}: give one sharding for "
                     "all leaves, or one per leaf")
