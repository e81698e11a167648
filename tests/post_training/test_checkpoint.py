import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wootz.post_training.checkpoint import CheckpointDamaged, Checkpointer


def make_tree(value=0.0):
  params = {"embed": jnp.arange(4096.0).reshape(64, 64) + value,
            "layers": {"wq": jnp.full((2, 4, 4), value, jnp.bfloat16)}}
  return {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(7),
          "step": jnp.int32(33554433)}


def abstract(tree):
  return jax.eval_shape(lambda: tree)


def as_bits(leaf):
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf)


def assert_equal(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(as_bits(a), as_bits(b))


@pytest.fixture
def saved(tmp_path):
  """Steps 10 and 20, complete, in tmp_path / "run"."""
  with Checkpointer(tmp_path / "run") as checkpointer:
    for step in (10, 20):
      checkpointer.save(step, make_tree(step), {"loader": {"next": step}})
  return tmp_path / "run"


def data_file(step_directory):
  """The largest file: the one that holds the arrays' values."""
  return max((p for p in (step_directory / "arrays").rglob("*") if p.is_file()),
             key=lambda p: p.stat().st_size)


def test_everything_comes_back(saved):
  """CK-8: moments and count of the optimizer, dtypes, the host's values; the next draw is equal."""
  tree = make_tree(20)
  with Checkpointer(saved) as checkpointer:
    step, restored, host = checkpointer.restore_latest(abstract(tree))
    older, older_host = checkpointer.restore(10, tree)
  assert (step, host, older_host) == (20, {"loader": {"next": 20}}, {"loader": {"next": 10}})
  assert_equal(restored, tree)
  assert_equal(older, make_tree(10))
  assert jax.random.normal(restored["key"]) == jax.random.normal(tree["key"])


def test_adam_continues_as_if_never_stopped(tmp_path):
  """CK-8: constant gradient 1, three steps, save, resume, one step: count 4, equal moments."""
  tx = optax.adam(1e-3)
  def advance(state, steps):
    for _ in range(steps):
      grads = jax.tree.map(jnp.ones_like, state["params"])
      updates, opt = tx.update(grads, state["opt"])
      state = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    return state
  params = {"actor": jnp.ones(3), "critic": jnp.ones(2)}
  start = {"params": params, "opt": tx.init(params)}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(3, advance(start, 3), {})
    _, restored, _ = checkpointer.restore_latest(abstract(start))
  resumed = advance(restored, 1)
  assert resumed["opt"][0].count == 4
  assert_equal(resumed, advance(start, 4))


def test_nothing_saved_is_none(tmp_path):
  assert Checkpointer(tmp_path).restore_latest(make_tree()) is None


def test_donation_after_save_does_not_change_what_is_saved(tmp_path):
  """The buffers are given to the next step as soon as save returns."""
  advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  state = {name: jnp.full((512, 1024), i, jnp.float32) for i, name in enumerate("abcdef")}
  with Checkpointer(tmp_path) as checkpointer:
    for step in range(1, 4):
      state = advance(state)
      checkpointer.save(step, state, {})
      for _ in range(5):
        state = advance(state)
    checkpointer.wait()
    for step in range(1, 4):
      restored, _ = checkpointer.restore(step, abstract(state))
      for i, name in enumerate("abcdef"):
        np.testing.assert_array_equal(restored[name], i + step + 5 * (step - 1))


def test_numpy_leaves_and_host_state_are_copied(tmp_path):
  weights, host = np.zeros((512, 512), np.float32), {"seen": [1]}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"w": weights}, host)
    weights += 1
    host["seen"].append(2)
    _, restored, restored_host = checkpointer.restore_latest(
      {"w": jax.ShapeDtypeStruct((512, 512), np.float32)})
  assert not restored["w"].any() and restored_host == {"seen": [1]}


def test_retention_keeps_the_newest_and_the_best(tmp_path):
  """CK-8: of equal metrics the newest is best, and it exists."""
  with Checkpointer(tmp_path, keep=1, keep_best=1) as checkpointer:
    for step, metric in ((10, 0.8), (20, 0.8), (30, 0.5), (40, None)):
      checkpointer.save(step, {"w": jnp.full(3, step)}, {}, metric=metric)
    checkpointer.wait()
    assert checkpointer.best_step() == 20
    assert checkpointer.steps() == (20, 40)
    tree, _ = checkpointer.restore(20, {"w": jax.ShapeDtypeStruct((3,), jnp.int32)})
    assert tree["w"].tolist() == [20] * 3


def test_the_last_complete_one_stays_until_the_next_is_complete(tmp_path, monkeypatch):
  """A save that fails, here for want of space, is an error and costs no finished checkpoint."""
  checkpointer = Checkpointer(tmp_path, keep=1)
  checkpointer.save(1, make_tree(1), {})
  checkpointer.wait()
  with monkeypatch.context() as patch:
    def no_space(*_):
      assert checkpointer.steps() == (1,)
      raise OSError(28, "No space left on device")
    patch.setattr("wootz.post_training.checkpoint._write_synced", no_space)
    checkpointer.save(2, make_tree(2), {})
    with pytest.raises(OSError, match="No space left"):
      checkpointer.wait()
  assert checkpointer.steps() == (1,)
  checkpointer.save(2, make_tree(3), {})
  checkpointer.wait()
  assert checkpointer.steps() == (2,)
  assert_equal(checkpointer.restore(2, abstract(make_tree()))[0], make_tree(3))
  checkpointer.close()


def truncate(directory):
  path = data_file(directory)
  os.truncate(path, path.stat().st_size // 2)
  return path.name


def flip_bit(directory):
  path = data_file(directory)
  data = bytearray(path.read_bytes())
  # Among the values of params.embed, which are 20, 21, ...: no file format notices this.
  place = data.index(np.arange(20.0, 24.0, dtype=np.float32).tobytes())
  data[place + 2] ^= 1
  path.write_bytes(data)
  return path.name


def remove(directory):
  path = data_file(directory)
  path.unlink()
  return path.name


def lose_host_state(directory):
  [path] = [p for p in (directory / "host").iterdir() if b"leaves" in p.read_bytes()]
  path.unlink()
  return path.name


def lose_file_list(directory):
  (directory / "FILES.json").unlink()
  return "FILES.json"


@pytest.mark.parametrize("damage", [truncate, flip_bit, remove, lose_host_state, lose_file_list])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(saved, caplog, damage):
  """CK-6: also after that, step 20 can be written again."""
  name = damage(saved / "step_00000020")
  with Checkpointer(saved) as checkpointer, caplog.at_level(logging.WARNING):
    step, tree, host = checkpointer.restore_latest(abstract(make_tree()))
    assert step == 10 and host == {"loader": {"next": 10}}
    assert_equal(tree, make_tree(10))
    assert "step_00000020" in caplog.text and name in caplog.text
    with pytest.raises(CheckpointDamaged, match="step_00000020.*" + name):
      checkpointer.restore(20, make_tree())
    checkpointer.save(20, make_tree(5), {})
    assert_equal(checkpointer.restore_latest(abstract(make_tree()))[1], make_tree(5))
    assert checkpointer.steps() == (10, 20)
  assert (saved / "step_00000020.superseded-0").is_dir()


def test_only_damaged_checkpoints_are_an_error_not_a_new_run(saved):
  for step in (10, 20):
    truncate(saved / f"step_000000{step}")
  with pytest.raises(CheckpointDamaged, match="all 2 checkpoints"):
    Checkpointer(saved).restore_latest(make_tree())


def test_one_history_is_kept(saved):
  """After a roll-back the steps behind it are set aside: retention must not prefer them."""
  with Checkpointer(saved, keep=2) as checkpointer:
    checkpointer.restore(10, make_tree())
    checkpointer.save(15, make_tree(15), {})
    checkpointer.wait()
    assert checkpointer.steps() == (10, 15)
    with pytest.raises(ValueError, match="steps must increase"):
      checkpointer.save(15, make_tree(15), {})


@pytest.mark.parametrize("change, message", [
  (lambda t: t | {"step": jnp.float32(0)}, "step was saved as int32 .* wanted as float32"),
  (lambda t: t | {"step": jnp.zeros(2, jnp.int32)}, r"step was saved as int32 \[\] .*\[2\]"),
  (lambda t: t | {"extra": jnp.zeros(2)}, "extra is in the tree and not in the checkpoint"),
  (lambda t: {k: v for k, v in t.items() if k != "step"}, "step is in the checkpoint and not in"),
  (lambda t: t | {"key": jax.random.key(0, impl="rbg")}, "key was saved as key<fry>"),
  (lambda t: t | {"params": jax.tree.map(lambda x: x.astype(jnp.float16), t["params"])},
   "params.embed was saved as float32"),
])
def test_another_tree_is_refused_naming_the_leaf(saved, change, message):
  """CK-7: the counter 33554433 would silently become 33554432 in float32."""
  with Checkpointer(saved) as checkpointer, pytest.raises(ValueError, match=message):
    checkpointer.restore_latest(change(make_tree()))


@pytest.mark.parametrize("tree, host, message", [
  ({"step": 3}, {}, "leaf step is a int"),
  ({}, {}, "no arrays"),
  ({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}, {}, "same path"),
  ({"w": np.zeros(1)}, {"loss": float("nan")}, "host_state.loss is nan"),
  ({"w": np.zeros(1)}, {"a": [{3: 4}]}, r"host_state.a\[0\] has the key 3"),
  ({"w": np.zeros(1)}, {"a": np.float32(1)}, "host_state.a is"),
])
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, tree, host, message):
  with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
    checkpointer.save(1, tree, host)


_SAVE_FOREVER = textwrap.dedent("""
  import sys
  import jax.numpy as jnp
  from wootz.post_training.checkpoint import Checkpointer
  checkpointer = Checkpointer(sys.argv[1], keep=2)
  tree = {f"w{i}": jnp.zeros((64, 1024)) for i in range(16)}
  found = checkpointer.restore_latest(tree)
  step = 0 if found is None else found[0]
  print("ready", flush=True)
  while True:
    step += 1
    checkpointer.save(step, {name: w + step for name, w in tree.items()}, {"step": step})
    if step > 1:
      print(step - 1, flush=True)
""")


@pytest.mark.slow
def test_kill_9_during_saves(tmp_path, caplog):
  """CK-6: the last step known complete or a later one comes back whole; leftovers do not matter."""
  rng = random.Random(0)
  script = tmp_path / "saver.py"
  script.write_text(_SAVE_FOREVER)
  complete = 0
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  for _ in range(2):
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "run")], text=True,
                               stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == "ready\n"
    lines = [process.stdout.readline() for _ in range(rng.randrange(1, 4))]
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines()
    process.wait()
    complete = max(complete, *(int(line) for line in lines if line.strip().isdigit()))
    template = {f"w{i}": jax.ShapeDtypeStruct((64, 1024), jnp.float32) for i in range(16)}
    step, tree, host = Checkpointer(tmp_path / "run").restore_latest(template)
    assert step in (complete, complete + 1, complete + 2) and host == {"step": step}
    for leaf in tree.values():
      np.testing.assert_array_equal(leaf, step)
    complete = step
  # A killed save's directory, half written, is cleared when the step is saved again.
  half = tmp_path / "run" / f"step_{complete + 1:08d}.orbax-checkpoint-tmp"
  shutil.copytree(tmp_path / "run" / f"step_{complete:08d}", half, dirs_exist_ok=True)
  (half / "FILES.json").unlink(missing_ok=True)
  (tmp_path / "run" / "latest").write_text("step_00000001")  # no such pointer is followed
  with Checkpointer(tmp_path / "run") as checkpointer:
    assert checkpointer.restore_latest(template)[0] == complete
    checkpointer.save(complete + 1, tree, {"step": complete + 1})
    assert checkpointer.restore_latest(template)[0] == complete + 1
  assert not list((tmp_path / "run").glob("*tmp*"))


_OTHER_DEVICES = textwrap.dedent("""
  import sys
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
  from wootz.post_training.checkpoint import Checkpointer
  jax.config.update("jax_num_cpu_devices", 8)
  checkpointer = Checkpointer(sys.argv[1])
  for count, mode in ((4, "save"), (1, "restore"), (2, "restore"), (8, "restore")):
    mesh = Mesh(np.array(jax.devices()[:count]), ("fsdp",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    tree = {"w": put(jnp.arange(64.0).reshape(8, 8), "fsdp"), "step": put(jnp.int32(5)),
            "v": put(jnp.arange(16.0).reshape(2, 8), None, "fsdp"),
            "keys": put(jax.random.split(jax.random.key(1), 8), "fsdp")}
    if mode == "save":
      checkpointer.save(1, tree, {})
      continue
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                          tree)
    _, restored, _ = checkpointer.restore_latest(wanted)
    for name in tree:
      assert restored[name].sharding.is_equivalent_to(tree[name].sharding, tree[name].ndim), name
      assert jnp.array_equal(restored[name], tree[name]), name
      assert len(restored[name].sharding.device_set) == count
  checkpointer.close()
""")


@pytest.mark.slow
def test_restore_on_another_number_of_devices(tmp_path):
  """CK-7: saved on 4 devices, restored on 1, 2 and 8, typed random keys among the leaves.

  And once more here, in a process that has not the devices of the one that saved.
  """
  script = tmp_path / "devices.py"
  script.write_text(_OTHER_DEVICES)
  subprocess.run([sys.executable, str(script), str(tmp_path / "run")], check=True,
                 env=os.environ | {"JAX_PLATFORMS": "cpu"})
  tree = {"w": jnp.arange(64.0).reshape(8, 8), "step": jnp.int32(5),
          "v": jnp.arange(16.0).reshape(2, 8), "keys": jax.random.split(jax.random.key(1), 8)}
  with Checkpointer(tmp_path / "run") as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(tree))[1], tree)
