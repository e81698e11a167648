"""The device mesh: five named axes, always all of them, in one fixed order.

data    copies of the model, each with its share of the batch; only gradients cross it
fsdp    shares of the batch *and* of every parameter (ZeRO stage 3, arXiv 1910.02054)
expert  experts of a mixture
seq     parts of one sequence
tensor  parts of one matrix multiplication (arXiv 1909.08053): the most talkative, so the innermost
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "fsdp", "expert", "seq", "tensor")

# There is one rule table (sharding.rules), so a way to shard is a shape of the mesh; -1: the rest.
PRESETS: dict[str, dict[str, int]] = {
  "data": {"data": -1},
  "fsdp": {"fsdp": -1},
  "hybrid": {"data": -1, "fsdp": 8},  # parameters stay within a machine of 8
  "fsdp_tensor": {"fsdp": -1, "tensor": 8},
}


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Mesh over `devices` (default: all) with the sizes of `axes`; axes not named have size 1.

  One size may be -1: it takes what the others leave. All axes are of type Auto, so that XLA places
  the collectives that the rule table's shardings imply.

  Raises ValueError for an unknown axis, a size below 1, or sizes whose product is not the number of
  devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = mesh_shape(axes, len(devices))
  return jax.make_mesh(
      tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes),
      devices=devices)


def mesh_shape(axes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Size of each of MESH_AXES, -1 filled in; errors as in `make_mesh`."""
  for name, size in axes.items():
    if name not in MESH_AXES:
      raise ValueError(f"mesh axis {name!r} is unknown{nearest(name, MESH_AXES)}: "
                       f"one of {', '.join(MESH_AXES)}")
    if size < 1 and size != -1:
      raise ValueError(f"mesh axis {name}={size}: a size is 1 or more, or -1 for the rest")
  sizes = {name: axes.get(name, 1) for name in MESH_AXES}
  open_axes = [name for name, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ValueError(f"mesh axes {' and '.join(open_axes)} are both -1: only one can take the rest")
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and num_devices % fixed == 0:
    sizes[open_axes[0]] = num_devices // fixed
  if math.prod(sizes.values()) != num_devices:
    needed = f"a multiple of {fixed}" if open_axes else str(fixed)
    raise ValueError(f"mesh {format_mesh(axes)} needs {needed} devices, there are {num_devices}: "
                     "change a size, or let one axis be -1")
  return sizes


def parse_mesh(text: str) -> dict[str, int]:
  """Reads "fsdp=4,tensor=2", or the name of a preset."""
  if text in PRESETS:
    return dict(PRESETS[text])
  axes: dict[str, int] = {}
  for part in text.split(","):
    name, equals, size = part.strip().partition("=")
    if not equals or not size.removeprefix("-").isdigit() or name in axes:
      raise ValueError(f"mesh {text!r}: {part.strip()!r} is not a new axis=size; write e.g. "
                       f"fsdp=4,tensor=2, or a preset: {', '.join(PRESETS)}")
    axes[name] = int(size)
  return axes


def format_mesh(axes: Mapping[str, int]) -> str:
  """The inverse of `parse_mesh`."""
  return ",".join(f"{name}={size}" for name, size in axes.items())


def nearest(name: str, known: Sequence[str]) -> str:
  """", did you mean 'x'?" for an error message, or nothing when no known name is close."""
  close = difflib.get_close_matches(name, known, n=1)
  return f" (did you mean {close[0]!r}?)" if close else ""
