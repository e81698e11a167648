"""Checks that need eight devices; run by test_eight_devices.py in a process that has them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from wootz.sharding import mesh as meshes
from wootz.sharding import plan as planner
from wootz.sharding import reshard, rules


@dataclasses.dataclass(frozen=True)
class Declared:
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]


SPECS = {"embedding": Declared((16, 8), ("vocab", "embed")),
         "layers": {"up": Declared((2, 24, 8), ("layer", "mlp", "embed"))}}


def test_mesh_has_all_axes_of_type_auto():
  mesh = meshes.make_mesh({"tensor": 2, "fsdp": -1})
  assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "expert": 1, "seq": 1, "tensor": 2}
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert sorted(d.id for d in mesh.devices.flat) == list(range(8))
  assert meshes.make_mesh({"fsdp": 2}, jax.devices()[:2]).size == 2


def test_parameters_lie_where_the_table_says():
  mesh = meshes.make_mesh({"fsdp": 4, "tensor": 2})
  placed = rules.shardings(SPECS, mesh)
  assert placed["embedding"] == NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
  assert placed["layers"]["up"].shard_shape((2, 24, 8)) == (2, 12, 2)


def test_indivisible_dimension_names_parameter_dimension_and_numbers():
  mesh = meshes.make_mesh({"tensor": 8})
  with pytest.raises(ValueError, match=r"layers/up.*dimension 1 \(mlp\) of 20 .*tensor 8"):
    rules.shardings({"layers": {"up": Declared((2, 20, 8), ("layer", "mlp", "embed"))}}, mesh)


def test_constrain_splits_under_a_mesh_and_does_nothing_without():
  x = jnp.arange(64.0).reshape(8, 8)
  assert rules.constrain(x, ("batch", "act_embed")) is x
  function = jax.jit(lambda x: rules.constrain(x, ("batch", "act_embed")) * 2)
  with jax.set_mesh(meshes.make_mesh({"data": 2, "fsdp": 4})):
    y = function(x)
    assert y.sharding.shard_shape(y.shape) == (1, 8)
    np.testing.assert_array_equal(y, x * 2)
    with pytest.raises(ValueError, match=r"activation .*\(batch\) of 6 .*data 2 x fsdp 4"):
      function(x[:6])


def test_constrain_names_an_axis_that_a_foreign_mesh_lacks():
  foreign = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  with jax.set_mesh(foreign), pytest.raises(ValueError, match="no axis 'fsdp'.*make_mesh"):
    jax.jit(lambda x: rules.constrain(x, ("batch", None)))(jnp.ones((8, 8)))


def test_constrain_within_shard_map_leaves_manual_axes_alone():
  mesh = meshes.make_mesh({"data": 4, "tensor": 2})

  def double(x):  # x is this device's [2, 8] of [8, 8]
    return rules.constrain(x, ("batch", "act_mlp")) * 2

  x = jnp.arange(64.0).reshape(8, 8)
  split = jax.shard_map(double, mesh=mesh, in_specs=PartitionSpec("data"),
                        out_specs=PartitionSpec("data"), axis_names={"data", "fsdp"})
  np.testing.assert_array_equal(jax.jit(split)(x), x * 2)


def test_sharded_step_equals_the_step_on_one_device():
  key = jax.random.key(0)
  weights = {"up": jax.random.normal(key, (16, 8)), "down": jax.random.normal(key, (8, 16))}
  specs = {"up": Declared((16, 8), ("mlp", "embed")), "down": Declared((8, 16), ("embed", "mlp"))}
  x = jax.random.normal(key, (16, 8))

  def loss(weights, x):
    x = rules.constrain(x, ("batch", "act_embed"))
    hidden = rules.constrain(jnp.tanh(x @ weights["up"].T), ("batch", "act_mlp"))
    return jnp.mean(jnp.square(hidden @ weights["down"].T))

  step = jax.jit(jax.value_and_grad(loss))
  value, gradient = step(weights, x)
  for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}):
    mesh = meshes.make_mesh(axes)
    with jax.set_mesh(mesh):
      sharded = reshard.reshard(weights, rules.shardings(specs, mesh))
      got_value, got_gradient = step(sharded, x)
    np.testing.assert_allclose(got_value, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got_gradient, gradient)


def test_reshard_keeps_values_and_counts_bytes():
  mesh = meshes.make_mesh({"fsdp": 8})
  rows, columns, whole = (NamedSharding(mesh, PartitionSpec(*spec))
                          for spec in (("fsdp", None), (None, "fsdp"), ()))
  x = jax.device_put(jnp.arange(64.0).reshape(8, 8), rows)
  tree = {"w": x}
  # each device has one row of 8 and wants one column of 8: one element is there already
  assert reshard.bytes_to_move(tree, {"w": columns}) == 8 * 7 * 4
  assert reshard.bytes_to_move(tree, whole) == 8 * 56 * 4
  assert reshard.bytes_to_move(tree, rows) == 0
  abstract = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=rows)}
  assert reshard.bytes_to_move(abstract, columns) == 8 * 7 * 2
  expected = np.arange(64.0).reshape(8, 8)
  for target in (columns, whole):
    moved = reshard.reshard(tree, target)["w"]
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, expected)
  np.testing.assert_array_equal(reshard.reshard(tree, {"w": rows}, donate=True)["w"], expected)
  with pytest.raises(ValueError, match="do not match the tree"):
    reshard.reshard({"w": x}, {"v": rows})


def test_donated_arrays_are_gone():
  mesh = meshes.make_mesh({"fsdp": 8})
  rows, columns, whole = (NamedSharding(mesh, PartitionSpec(*spec))
                          for spec in (("fsdp", None), (None, "fsdp"), ()))
  for target in (columns, whole):
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), rows)
    moved = reshard.reshard(x, target, donate=True)
    assert x.is_deleted()
    np.testing.assert_array_equal(moved, np.arange(64.0).reshape(8, 8))


def test_plan_counts_one_devices_share():
  mesh = meshes.make_mesh({"fsdp": 8})
  weights = jax.ShapeDtypeStruct((256, 128), jnp.float32,
                                 sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
  x = jax.ShapeDtypeStruct((64, 256), jnp.float32,
                           sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

  def step(weights, x):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(weights)

  got = planner.plan(step, weights, x, donate_argnums=(0,))
  share = 256 * 128 * 4 // 8
  assert got.arguments == share + 64 * 256 * 4 // 8
  assert got.outputs == got.aliased == share  # the new weights take the old ones' place
  assert got.temporaries >= 256 * 128 * 4  # the gathered weights
  assert got.peak == got.arguments + got.temporaries
  assert got.collectives["all-gather"] >= 1
  assert planner.bytes_per_device((weights, x)) == got.arguments
  # forward and one of two backward products, over the local rows: 2 * 2 * 8 * 256 * 128
  assert 0.9 < got.flops / (2 * 2 * 8 * 256 * 128) < 1.5


def test_jitted_step_brings_its_own_donation():
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  assert planner.plan(jax.jit(lambda x: x + 1, donate_argnums=0), x).aliased == 256
  with pytest.raises(ValueError, match="donate_argnums"):
    planner.plan(jax.jit(lambda x: x + 1), x, donate_argnums=(0,))
