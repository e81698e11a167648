"""What one learner step needs on each device, without running it and without the devices.

    python -m wootz.launch.plan --model=smollm2-135m --devices=8 --mesh=fsdp=8 --batch=8
    python -m wootz.launch.plan --model=llama-3-8b --devices=64 --mesh=fsdp=-1 --batch=64 \
        --sequence=4096 --hardware=h100

Prints parameters, optimizer state, gradients and temporaries per device, their peak, and whether
that fits. Nothing is allocated: the learner's programs are compiled from shapes. With --hardware it
is compiled by the GPU's own compiler (extra `wootz[gpu_target]`), otherwise for as many imagined
CPU devices.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from wootz.data.packing import PackedRows
from wootz.models import params, transformer
from wootz.models.config import ModelConfig
from wootz.models.families import llama
from wootz.post_training.learn.grpo import PolicyBatch, grpo_objective
from wootz.post_training.learn.logprobs import target_logprobs
from wootz.post_training.learn.optimizer import adamw
from wootz.post_training.learn.step import (
  Accumulated,
  TrainState,
  add_microbatch,
  apply_update,
  init_state,
)
from wootz.sharding import mesh as meshes
from wootz.sharding import plan as planner
from wootz.sharding import rules

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "A known size, or the path of a config.json.")
_DEVICES = flags.DEFINE_integer("devices", 1, "Number of devices.", lower_bound=1)
_PER_HOST = flags.DEFINE_integer("devices_per_host", 8, "GPUs that share a host.", lower_bound=1)
_MESH = flags.DEFINE_string("mesh", "fsdp=-1", "Mesh sizes, e.g. fsdp=4,tensor=2, or a preset.")
_BATCH = flags.DEFINE_integer("batch", 8, "Rows of a micro-batch, on all devices.", lower_bound=1)
_SEQUENCE = flags.DEFINE_integer("sequence", 1024, "Tokens of a row.", lower_bound=2)
_DTYPE = flags.DEFINE_enum("compute_dtype", "bfloat16", ["bfloat16", "float32"],
                           "Of activations; weights and optimizer state are float32.")
_REMAT = flags.DEFINE_enum("remat", "full", transformer.REMAT, "What the backward pass computes again.")
_HARDWARE = flags.DEFINE_enum("hardware", None, planner.gpu_names(), "GPU to compile for.")


def _size(vocab, hidden, layers, heads, kv_heads, mlp, *, tied, rope_base, head_dim=None):
  return ModelConfig(
      family="llama", vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads,
      num_kv_heads=kv_heads, head_dim=head_dim or hidden // heads, intermediate_size=mlp,
      rope_base=rope_base, norm_eps=1e-5, max_positions=8192, tie_embeddings=tied)


# Sizes as their publishers state them in config.json.
KNOWN = {
  "smollm2-135m": _size(49152, 576, 30, 9, 3, 1536, tied=True, rope_base=1e5),
  "smollm2-360m": _size(49152, 960, 32, 15, 5, 2560, tied=True, rope_base=1e5),
  "smollm2-1.7b": _size(49152, 2048, 24, 32, 32, 8192, tied=True, rope_base=1.3e5),
  "llama-3-8b": _size(128256, 4096, 32, 32, 8, 14336, tied=False, rope_base=5e5),
  "llama-3-70b": _size(128256, 8192, 80, 64, 8, 28672, tied=False, rope_base=5e5),
}


def model_config(name: str) -> ModelConfig:
  """Of a known size, or of a config.json; ValueError names the known ones."""
  if name in KNOWN:
    return KNOWN[name]
  if pathlib.Path(name).is_file():
    return llama.config_from_hf(json.loads(pathlib.Path(name).read_text()))
  close = meshes.nearest(name, list(KNOWN))
  raise ValueError(f"--model={name} is no file and no known size{close}: one of "
                   f"{', '.join(KNOWN)}, or the path of a config.json")


# ---- shapes --------------------------------------------------------------------------------------

def loss_function(config: ModelConfig, *, num_sequences: int, compute_dtype: Any, remat: str):
  """The learner's GRPO loss of all parameters."""
  def loss(weights, frozen, batch):
    del frozen  # nothing is: all parameters are trained
    logprobs, entropy = target_logprobs(
        weights, config, batch.rows, compute_dtype=compute_dtype, remat=remat)
    return grpo_objective(logprobs, entropy, batch, num_sequences=num_sequences,
                          correction="truncate")

  return loss


def abstract_rows(batch: int, length: int, mesh: jax.sharding.Mesh) -> PackedRows:
  """Shapes of packed rows in which every token may be trained on."""
  axes = ("batch", "length")
  partition = rules.partition_spec(axes)
  try:
    rules.check_divisible((batch, length), axes, partition, dict(mesh.shape))
  except ValueError as error:
    raise ValueError(f"--batch={batch} --sequence={length}: {error}") from error
  sharding = jax.sharding.NamedSharding(mesh, partition)
  dtypes = {"loss_mask": jnp.bool_, "target_mask": jnp.bool_, "behavior_logprobs": jnp.float32,
            "advantages": jnp.float32}
  return PackedRows(**{
      field.name: jax.ShapeDtypeStruct(
          (batch, length), dtypes.get(field.name, jnp.int32), sharding=sharding)
      for field in dataclasses.fields(PackedRows)})


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation,
                   mesh: jax.sharding.Mesh) -> TrainState:
  """Shapes and shardings of float32 weights and of the optimizer's state, which lies with them."""
  specs = llama.param_specs(config)
  weights = jax.tree.map(with_sharding, params.abstract_params(specs), rules.shardings(specs, mesh))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  state = jax.eval_shape(lambda weights: init_state(weights, optimizer), weights)
  opt_state = optax.tree_utils.tree_map_params(
      optimizer, lambda leaf, like: with_sharding(leaf, like.sharding), state.opt_state, weights,
      transform_non_params=lambda leaf: with_sharding(leaf, everywhere))
  return TrainState(step=with_sharding(state.step, everywhere), params=weights,
                    opt_state=opt_state)


def abstract_sums(state: TrainState, batch: PolicyBatch, loss_fn: Any,
                  mesh: jax.sharding.Mesh) -> Accumulated:
  """Shapes and shardings of what accumulates over micro-batches: gradients lie with the weights."""
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  _, sums = jax.eval_shape(loss_fn, state.params, None, batch)
  return Accumulated(
      gradient=state.params, sums=jax.tree.map(lambda leaf: with_sharding(leaf, everywhere), sums))


def with_sharding(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
  """The leaf's `jax.ShapeDtypeStruct`, placed."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# ---- the report ----------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Report:
  """What the program prints; bytes are per device."""

  num_parameters: int
  parameters: int
  optimizer: int
  gradients: int  # accumulated over micro-batches
  batch: int
  microbatch: planner.Plan  # forward, backward, accumulation
  update: planner.Plan  # the optimizer
  capacity: int | None  # bytes of one device's memory, where known

  @property
  def peak(self) -> int:
    """Bytes at the fuller of the two programs; the optimizer state waits during micro-batches."""
    return max(self.optimizer + self.microbatch.peak, self.update.peak)

  @property
  def fits(self) -> bool | None:
    return None if self.capacity is None else self.peak <= self.capacity

  def lines(self) -> list[str]:
    """One figure a line, for people."""
    def row(name, value):
      return f"  {name:<24}{format_bytes(value):>12}"

    verdict = "" if self.capacity is None else (
        f" of {format_bytes(self.capacity)}: {'fits' if self.fits else 'DOES NOT FIT'}")
    collectives = self.microbatch.collectives.items()
    return [
        f"{self.num_parameters / 1e6:.1f} M parameters; per device:",
        row("parameters", self.parameters), row("optimizer state", self.optimizer),
        row("accumulated gradients", self.gradients), row("batch", self.batch),
        row("micro-batch temporaries", self.microbatch.temporaries)
        + "  (activations, gathered weights)",
        row("update temporaries", self.update.temporaries), row("peak", self.peak) + verdict,
        "  collectives of a micro-batch (a loop's body counts once): "
        + (", ".join(f"{kind} {count}" for kind, count in collectives) or "none")]


def format_bytes(count: int) -> str:
  """Four significant digits in powers of 1000: "3.136 kB"."""
  scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
                     if count >= s or s == 1)
  return f"{count / scale:.4g} {unit}"


def make_report(config: ModelConfig, mesh: jax.sharding.Mesh, *, batch: int, length: int,
                compute_dtype: Any, remat: str, capacity: int | None = None) -> Report:
  """Compiles the learner's two programs for the mesh and reads off what they take."""
  optimizer = adamw(optax.constant_schedule(1e-5), max_gradient_norm=1.0)
  state = abstract_state(config, optimizer, mesh)
  policy_batch = PolicyBatch(rows=abstract_rows(batch, length, mesh))
  loss_fn = loss_function(  # shorter completions than 16 tokens do not change the figures
      config, num_sequences=-(-batch * length // 16), compute_dtype=compute_dtype, remat=remat)
  with jax.set_mesh(mesh):
    sums = abstract_sums(state, policy_batch, loss_fn, mesh)
    microbatch = planner.plan(add_microbatch, sums, state.params, None, policy_batch,
                              static={"loss_fn": loss_fn})
    update = planner.plan(apply_update, state, sums, static={"optimizer": optimizer})
  return Report(
      num_parameters=params.count(state.params),
      parameters=planner.bytes_per_device(state.params),
      optimizer=planner.bytes_per_device(state.opt_state),
      gradients=planner.bytes_per_device(sums.gradient),
      batch=planner.bytes_per_device(policy_batch), microbatch=microbatch, update=update,
      capacity=capacity)


def _devices(hardware: str | None, count: int, per_host: int):
  jax.config.update("jax_platforms", "cpu")  # of this process, which only compiles
  if hardware is None:
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()
  per_host = min(per_host, count)
  if count % per_host:
    raise ValueError(f"--devices={count} is not a multiple of --devices_per_host={per_host}")
  return planner.gpu_topology(hardware, count // per_host, per_host)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  try:
    config = model_config(_MODEL.value)
    axes = meshes.parse_mesh(_MESH.value)
    meshes.mesh_shape(axes, _DEVICES.value)
    devices = _devices(_HARDWARE.value, _DEVICES.value, _PER_HOST.value)
    report = make_report(
        config, meshes.make_mesh(axes, devices), batch=_BATCH.value, length=_SEQUENCE.value,
        compute_dtype=jnp.dtype(_DTYPE.value), remat=_REMAT.value,
        capacity=planner.gpu_memory(_HARDWARE.value) if _HARDWARE.value else None)
  except (ValueError, ImportError) as error:
    raise app.UsageError(str(error)) from error
  hardware = _HARDWARE.value or "imagined CPU devices"
  print(f"{_MODEL.value} on {_DEVICES.value} x {hardware}, mesh {meshes.format_mesh(axes)}, "
        f"batch {_BATCH.value} x {_SEQUENCE.value} tokens, {_DTYPE.value} compute")
  print("\n".join(report.lines()))


if __name__ == "__main__":
  app.run(main)
