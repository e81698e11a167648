"""Starting several processes: real ones, talking over Gloo."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from wootz.sharding import distributed

WORKER = textwrap.dedent("""
  import sys
  import jax, jax.numpy as jnp, numpy as np
  from jax.sharding import PartitionSpec
  from wootz.sharding import distributed, mesh

  index, arguments = int(sys.argv[1]), sys.argv[2:]
  job = (arguments[0], 2, index) if arguments else ()
  assert distributed.initialize(*job, timeout=120)
  everyone = mesh.make_mesh({"data": -1})
  assert everyone.size == 2 and len(jax.local_devices()) == 1
  share = jax.make_array_from_process_local_data(
      jax.NamedSharding(everyone, PartitionSpec("data")), np.array([10.0 ** index], np.float32))
  total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=everyone,
                                in_specs=PartitionSpec("data"), out_specs=PartitionSpec()))(share)
  distributed.barrier("summed")
  print(float(total[0]), distributed.is_main_process(), distributed.any_process(index == 1),
        distributed.any_process(False))
  distributed.shutdown()
""")


def _free_port(candidates):
  for port in candidates:
    with socket.socket() as attempt:
      try:
        attempt.bind(("localhost", port))
      except OSError:
        continue
      return attempt.getsockname()[1]
  raise AssertionError("no free port")


def _by_flags():
  return [f"localhost:{_free_port([0])}"], lambda index: {}


def _by_slurm():
  # Slurm names no port: jax derives one of 4096 from the job's number
  port = _free_port(61440 + (os.getpid() + i) % 4096 for i in range(4096))
  return [], lambda index: {
      "SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
      "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}


@pytest.mark.parametrize("known_by", [_by_flags, _by_slurm])
def test_two_processes_sum_and_agree(known_by):
  arguments, variables = known_by()
  base = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  workers = [subprocess.Popen(
      [sys.executable, "-c", WORKER, str(index), *arguments], env={**base, **variables(index)},
      text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for index in range(2)]
  try:
    ends = [worker.communicate(timeout=200) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert [worker.returncode for worker in workers] == [0, 0], ends
  # 1 from the first process, 10 from the second
  assert [out.splitlines()[-1].split() for out, _ in ends] == [
      ["11.0", "True", "True", "False"], ["11.0", "False", "True", "False"]]


@pytest.mark.parametrize("arguments, message", [
    (("host:1", 2, None), "process_id missing"),
    ((None, None, 0), "coordinator, num_processes missing"),
    (("host", 2, 0), "host:port"), (("host:1", 2, 2), r"process_id 2 .*0\.\.1")])
def test_incomplete_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    distributed.initialize(*arguments)


def test_process_of_its_own(monkeypatch):
  assert not distributed.initialize()
  monkeypatch.setenv("SLURM_JOB_ID", "1")  # inside a batch script, but not a task of srun
  monkeypatch.setenv("SLURM_NTASKS", "8")
  assert not distributed.initialize()
  assert distributed.is_main_process() and distributed.any_process(True)
  distributed.shutdown()


def test_slurm_step_is_recognised():
  step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"}
  assert distributed.slurm_tasks(step) == 9
  assert distributed.slurm_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9"}) == 1
