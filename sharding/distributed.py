"""Starting a job of several processes, each with its own devices, and agreeing across them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils


def initialize(
    coordinator: str | None = None, num_processes: int | None = None,
    process_id: int | None = None, *, timeout: int = 300) -> bool:
  """Joins this process to its job; returns whether there is more than one process.

  Call it once, before anything touches a device. The job is known from, in this order:
  - the three arguments, all together (coordinator as "host:port", that of process 0);
  - Slurm, when `srun` started several tasks;
  - nothing: a process of its own.
  Waits up to `timeout` seconds for the others. CPU processes talk over Gloo, GPUs over NCCL.

  Raises ValueError for arguments that are incomplete or out of range.
  """
  given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
  missing = [name for name, value in given.items() if value is None]
  if coordinator is not None and num_processes is not None and process_id is not None:
    _check(coordinator, num_processes, process_id)
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout,
        cluster_detection_method="deactivate")
  elif len(missing) < len(given):
    raise ValueError(f"a job of several processes needs {', '.join(given)} together: "
                     f"{', '.join(missing)} missing")
  elif slurm_tasks(os.environ) > 1:
    jax.distributed.initialize(cluster_detection_method="slurm", initialization_timeout=timeout)
  return jax.process_count() > 1


def slurm_tasks(environment: Mapping[str, str]) -> int:
  """Tasks of the job step that this process is one of; 1 outside `srun`.

  A batch script itself sees the allocation's variables too, but only `srun` sets a step's.
  """
  if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
    return 1
  return int(environment.get("SLURM_NTASKS", "1"))


def is_main_process() -> bool:
  """Whether this process is the one that writes logs and reports."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Returns once every process has come to the barrier of this name."""
  multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
  """Whether the flag is set anywhere; the same answer everywhere.

  What only one process sees (a signal, a full disk) must be agreed on before anyone acts on it:
  those that left the loop a step earlier would leave the others waiting in a collective for ever.
  """
  return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def shutdown() -> None:
  """Leaves the job; harmless in a process of its own."""
  if jax.distributed.is_initialized():
    jax.distributed.shutdown()


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
  host, colon, port = coordinator.rpartition(":")
  if not (host and colon and port.isdigit()):
    raise ValueError(f"coordinator {coordinator!r} must be host:port, e.g. node01:8476")
  if not 0 <= process_id < num_processes:
    raise ValueError(f"process_id {process_id} must lie in 0..{num_processes - 1}")
