"""What a step will need on each device, known from compilation alone."""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from wootz.sharding.mesh import nearest

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_MEMORY_FIELD = re.compile(r"device_memory_size:\s*(\d+)")


@dataclasses.dataclass(frozen=True)
class Plan:
  """One compiled step, per device: bytes, floating point operations, collectives in the program."""

  arguments: int  # bytes of inputs, donated ones included
  outputs: int  # bytes of results
  aliased: int  # bytes of results that take the place of donated inputs
  temporaries: int  # bytes that live only during the step: activations, gathered weights
  flops: float  # as XLA counts them: the body of a loop counts once, however often it runs
  collectives: dict[str, int]  # instructions of each kind, loops' bodies counted once

  @property
  def peak(self) -> int:
    """Bytes needed at once, at most."""
    return self.arguments + self.outputs - self.aliased + self.temporaries


def plan(step_fn: Any, *abstract_args: Any, donate_argnums: Sequence[int] = (),
         static: Mapping[str, Any] | None = None) -> Plan:
  """Compiles step_fn for arguments that need no memory, and reads off what it will take.

  abstract_args: trees of `jax.ShapeDtypeStruct`s, with shardings to plan for several devices.
  step_fn: a function, or an already jitted one, which brings its own donation and may take `static`
    keyword arguments.
  The mesh for `sharding.rules.constrain` is the ambient one: call within `jax.set_mesh(mesh)`.
  """
  if hasattr(step_fn, "lower"):
    if donate_argnums:
      raise ValueError("step_fn is jitted already: give donate_argnums to its jax.jit")
    jitted = step_fn
  else:
    jitted = jax.jit(step_fn, donate_argnums=donate_argnums)
  compiled = jitted.lower(*abstract_args, **(static or {})).compile()
  memory = compiled.memory_analysis()
  return Plan(
      arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
      aliased=memory.alias_size_in_bytes, temporaries=memory.temp_size_in_bytes,
      flops=float((compiled.cost_analysis() or {}).get("flops", float("nan"))),
      collectives=count_collectives(compiled.as_text()))


def count_collectives(program: str) -> dict[str, int]:
  """How often each kind of collective stands in a compiled program's text, where it does."""
  kinds = "|".join(COLLECTIVES)
  return dict(collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", program)))


def bytes_per_device(tree: Any) -> int:
  """Bytes of a tree of arrays or `jax.ShapeDtypeStruct`s that one device holds."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    total += jax.numpy.dtype(leaf.dtype).itemsize * math.prod(shape)
  return total


# ---- GPUs that are not here ----------------------------------------------------------------------

def gpu_names() -> list[str]:
  """GPUs that can be planned for without having one."""
  files = importlib.resources.files("wootz.sharding").joinpath("targets").iterdir()
  return sorted(file.name.removesuffix(".txtpb") for file in files if file.name.endswith(".txtpb"))


def gpu_memory(name: str) -> int:
  """Bytes of one GPU's memory."""
  found = _MEMORY_FIELD.search(_description(name))
  if found is None:
    raise ValueError(f"the description of GPU {name!r} has no device_memory_size")
  return int(found.group(1))


def gpu_topology(name: str, hosts: int, per_host: int) -> Sequence[jax.Device]:
  """`hosts` x `per_host` GPUs to compile for, in a process without one.

  They take `make_mesh(..., devices=...)`, shardings and `plan`, and run nothing. NCCL joins all of
  them; those of one host are taken to share NVLink.

  Raises ValueError for an unknown GPU, ImportError naming the extra when the compiler is missing.
  """
  description = _description(name)
  _register_compiler()
  shape = f"1x{hosts}x{per_host}"  # partitions x hosts x GPUs of a host
  return topologies.get_topology_desc(
      shape, "cuda", target_config=description, topology=shape).devices


def _description(name: str) -> str:
  if name not in gpu_names():
    raise ValueError(f"GPU {name!r} is unknown{nearest(name, gpu_names())}: one of "
                     f"{', '.join(gpu_names())}")
  files = importlib.resources.files("wootz.sharding")
  return files.joinpath("targets", f"{name}.txtpb").read_text()


def _register_compiler() -> None:
  """Makes the CUDA plugin's compiler known although this machine lacks CUDA's libraries."""
  if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    raise ImportError(
        "planning for GPUs needs the CUDA plugin's compiler, not a GPU: "
        "pip install 'wootz[gpu_target]' (or, without the CUDA libraries, pip install --no-deps "
        f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__})")
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  # jax registers plugins when it first looks for devices; no public call does only that.
  from jax._src import xla_bridge
  register = getattr(xla_bridge, "_discover_and_register_pjrt_plugins", None)
  (register or xla_bridge.discover_pjrt_plugins)()
  jax.devices("cpu")
