"""The one table from logical axes, which models speak of, to mesh axes, which machines have.

A mesh axis of size 1 splits nothing, so the same table serves one device, FSDP, tensor parallelism
and their mixtures: what changes is the mesh.
"""

from __future__ import annotations

import collections
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from wootz.sharding.mesh import MESH_AXES, nearest

Rule = str | tuple[str, ...] | None
Rules = Mapping[str, Rule]
Axes = Sequence[str | None]


def make_rules(table: Rules, **changes: Rule) -> Rules:
  """A read-only table: `table` with `changes` to axes that it has.

  Raises ValueError for a mesh axis that does not exist or is named twice, and for a change to an
  unknown logical axis.
  """
  for name in changes:
    if name not in table:
      raise ValueError(f"no rule for logical axis {name!r}{nearest(name, list(table))}")
  rules = {**table, **changes}
  for name, rule in rules.items():
    for mesh_axis in _mesh_axes(rule):
      if mesh_axis not in MESH_AXES:
        raise ValueError(f"rule for {name!r} names mesh axis {mesh_axis!r}"
                         f"{nearest(mesh_axis, MESH_AXES)}: one of {', '.join(MESH_AXES)}")
    _refuse_collisions([rule], f"the rule for {name!r}")
  return types.MappingProxyType(rules)


def _mesh_axes(rule: Rule) -> tuple[str, ...]:
  if rule is None:
    return ()
  return (rule,) if isinstance(rule, str) else tuple(rule)


def _refuse_collisions(rules: Sequence[Rule], where: str) -> None:
  counts = collections.Counter(axis for rule in rules for axis in _mesh_axes(rule))
  if twice := [axis for axis, n in counts.items() if n > 1]:
    raise ValueError(f"mesh axis {', '.join(twice)} would split two dimensions of {where}: "
                     "change one of the rules")


RULES = make_rules({
  # dimensions of parameters
  "layer": None,
  "vocab": "tensor",
  "embed": "fsdp",
  "embed_norm": None,  # norms are small: every device holds them
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "expert": "expert",
  "rank": None,  # of a low-rank update
  # dimensions of activations
  "batch": ("data", "fsdp"),
  "length": "seq",
  "act_embed": None,
  "act_heads": "tensor",
  "act_kv_heads": "tensor",
  "act_mlp": "tensor",
  "act_vocab": "tensor",
})


def partition_spec(axes: Axes, rules: Rules = RULES) -> PartitionSpec:
  """Mesh axes of an array whose dimensions have these logical axes; None is not split.

  Raises ValueError for a logical axis without a rule and for two dimensions on one mesh axis.
  """
  for axis in axes:
    if axis is not None and axis not in rules:
      raise ValueError(f"no rule for logical axis {axis!r} of {tuple(axes)}"
                       f"{nearest(axis, list(rules))}")
  chosen = [None if axis is None else rules[axis] for axis in axes]
  _refuse_collisions(chosen, str(tuple(axes)))
  return PartitionSpec(*chosen)


def shardings(specs: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
  """NamedSharding of each leaf of a tree of declarations, i.e. of objects with `shape` and `axes`.

  Raises ValueError as `partition_spec`, and for a dimension that its mesh axes do not divide; the
  message names the parameter, the dimension and both numbers.
  """
  def leaf(path, spec):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    try:
      partition = partition_spec(spec.axes, rules)
      check_divisible(spec.shape, spec.axes, partition, dict(mesh.shape))
    except ValueError as error:
      raise ValueError(f"parameter {name}: {error}") from error
    return NamedSharding(mesh, partition)

  return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=lambda node: hasattr(node, "axes"))


def check_divisible(
    shape: Sequence[int], axes: Axes, partition: PartitionSpec, mesh_shape: Mapping[str, int],
) -> None:
  """Raises ValueError unless every dimension falls into equal parts on a mesh of these sizes."""
  if len(shape) != len(axes):
    raise ValueError(f"shape {tuple(shape)} has {len(shape)} dimensions, axes {tuple(axes)} name "
                     f"{len(axes)}")
  for index, (size, axis, rule) in enumerate(zip(shape, axes, partition, strict=True)):
    if missing := [name for name in _mesh_axes(rule) if name not in mesh_shape]:
      raise ValueError(f"the mesh {dict(mesh_shape)} has no axis {missing[0]!r}, which {axis!r} is "
                       "split over: make it with wootz.sharding.mesh.make_mesh")
    parts = {name: mesh_shape[name] for name in _mesh_axes(rule)}
    if size % math.prod(parts.values()):
      product = " x ".join(f"{name} {count}" for name, count in parts.items())
      raise ValueError(f"dimension {index} ({axis}) of {size} does not fall into equal parts over "
                       f"{product}: choose mesh sizes that divide {size}")


def constrain(x: jax.Array, axes: Axes, rules: Rules = RULES) -> jax.Array:
  """x, held to the sharding that the rules give these logical axes on the ambient mesh.

  The ambient mesh is that of `jax.set_mesh`. Without one, or on one device, x comes back as it is;
  inside `shard_map`, axes that are already taken apart by hand are left alone.
  Raises ValueError as `shardings`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  by_hand = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
             if kind == AxisType.Manual}
  partition = PartitionSpec(*(_without(rule, by_hand) for rule in partition_spec(axes, rules)))
  try:
    check_divisible(x.shape, axes, partition, dict(mesh.shape))
  except ValueError as error:
    raise ValueError(f"activation {tuple(axes)} {x.shape}: {error}") from error
  return jax.lax.with_sharding_constraint(x, partition)


def _without(rule: Rule, dropped: set[str]) -> Rule:
  return tuple(axis for axis in _mesh_axes(rule) if axis not in dropped) or None
