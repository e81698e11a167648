"""Planning for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from wootz.sharding import plan

HAVE_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None

PROGRAM = textwrap.dedent("""
  import jax, jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec
  from wootz.sharding import mesh, plan, rules

  devices = plan.gpu_topology("h100", hosts=2, per_host=8)
  gpus = mesh.make_mesh({"fsdp": 4, "tensor": 4}, devices)

  def abstract(shape, axes):
    sharding = NamedSharding(gpus, rules.partition_spec(axes))
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

  def step(up, down, x):
    def loss(up, down):
      hidden = rules.constrain(jax.nn.gelu(x @ up.T), ("batch", "act_mlp"))
      return jnp.mean(jnp.square(hidden @ down.T))
    gradients = jax.grad(loss, (0, 1))(up, down)
    return up - gradients[0], down - gradients[1]

  with jax.set_mesh(gpus):
    got = plan.plan(step, abstract((4096, 1024), ("mlp", "embed")),
                    abstract((1024, 4096), ("embed", "mlp")),
                    abstract((512, 1024), ("batch", "act_embed")), donate_argnums=(0, 1))
  print(len(devices), got.arguments, got.aliased, got.temporaries > 0, bool(got.collectives))
""")


@pytest.mark.skipif(not HAVE_COMPILER, reason="needs the extra wootz[gpu_target]")
def test_step_compiles_for_sixteen_h100():
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True,
                       text=True, timeout=300, check=False)
  assert run.returncode == 0, run.stderr
  weights = 2 * 4096 * 1024 * 2 // 16  # two, in bfloat16, over all 16
  batch = 512 * 1024 * 2 // 4  # over fsdp only
  assert run.stdout.split() == ["16", str(weights + batch), str(weights), "True", "True"]


@pytest.mark.skipif(HAVE_COMPILER, reason="the compiler is there")
def test_missing_compiler_names_the_extra():
  with pytest.raises(ImportError, match=r"wootz\[gpu_target\]"):
    plan.gpu_topology("h100", 1, 8)


def test_known_gpus():
  assert plan.gpu_names() == ["h100", "h200"]
  assert 79e9 < plan.gpu_memory("h100") < 86e9
  assert 140e9 < plan.gpu_memory("h200") < 152e9
  with pytest.raises(ValueError, match="'h10'.*did you mean 'h100'"):
    plan.gpu_memory("h10")


def test_collectives_are_counted_by_kind():
  program = """
    %a = f32[8] all-reduce-start(%x), channel_id=1
    %b = f32[8] all-reduce-done(%a)
    %c = f32[8] all-gather(%y)
    %d = f32[8] all-gather(%c)
    %e = f32[8] fusion(%all-gather.3)
  """
  assert plan.count_collectives(program) == {"all-reduce": 1, "all-gather": 2}
