"""Trajectories to bytes and back: msgpack with a schema version, arrays as dtype, shape, bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np

from wootz.data.records import Grade, Outcome, Trajectory

SCHEMA_VERSION = 1

_ARRAYS = {"tokens": np.dtype(np.int32), "loss_mask": np.dtype(np.bool_),
           "behavior_logprobs": np.dtype(np.float32)}
_SCALARS = {"task_id": str, "domain": str, "family": str, "update": int, "weight_version": int,
            "sample_index": int, "prompt_length": int, "temperature": float, "finish_reason": str,
            "text": str}


def check_trajectory(trajectory: Trajectory) -> None:
  """Raises ValueError naming the trajectory and the field that breaks the record's contract."""
  name = f"trajectory {trajectory.group} sample {trajectory.sample_index}"
  length = len(trajectory.tokens)
  for field, dtype in _ARRAYS.items():
    array = getattr(trajectory, field)
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (length,):
      got = f"{type(array).__name__} {getattr(array, 'dtype', '')} {np.shape(array)}"
      raise ValueError(f"{name}: {field} must be a numpy array {dtype} [{length}], got {got}")
  if not 1 <= trajectory.prompt_length <= length:
    raise ValueError(f"{name}: prompt_length {trajectory.prompt_length} must lie in 1..{length}; "
                     "the first sampled token needs a token before it")
  if trajectory.loss_mask[:trajectory.prompt_length].any():
    raise ValueError(f"{name}: loss_mask marks a token of the prompt as sampled")
  if not np.isfinite(trajectory.behavior_logprobs).all():
    raise ValueError(f"{name}: behavior_logprobs holds a value that is not finite")
  if trajectory.behavior_logprobs[~trajectory.loss_mask].any():
    raise ValueError(f"{name}: behavior_logprobs must be 0 where loss_mask is False")


def encode_trajectory(trajectory: Trajectory) -> bytes:
  """Bytes of one checked trajectory."""
  check_trajectory(trajectory)
  fields: dict[str, Any] = {name: kind(getattr(trajectory, name))
                            for name, kind in _SCALARS.items()}
  fields |= {name: _pack_array(getattr(trajectory, name)) for name in _ARRAYS}
  grade = trajectory.grade
  fields["grade"] = {"outcome": grade.outcome.value, "reason": grade.reason,
                     "score": None if grade.score is None else float(grade.score),
                     "seconds": float(grade.seconds)}
  return msgpack.packb({"schema": SCHEMA_VERSION, "trajectory": fields},
                       unicode_errors="surrogatepass")


def decode_trajectory(data: bytes) -> Trajectory:
  """The trajectory that `encode_trajectory` was given. Its arrays are read-only views of `data`."""
  record = msgpack.unpackb(data, unicode_errors="surrogatepass")
  version = record.get("schema") if isinstance(record, dict) else None
  if version != SCHEMA_VERSION:
    raise ValueError(f"trajectory record has schema version {version!r}, this program reads "
                     f"version {SCHEMA_VERSION}: read it with the wootz version that wrote it")
  fields = dict(record["trajectory"])
  expected = {field.name for field in dataclasses.fields(Trajectory)}
  if set(fields) != expected:
    raise ValueError("trajectory record has other fields than schema version "
                     f"{SCHEMA_VERSION}: {sorted(set(fields) ^ expected)}")
  for name in _ARRAYS:
    fields[name] = _unpack_array(fields[name])
  grade = dict(fields["grade"])
  fields["grade"] = Grade(**grade | {"outcome": Outcome(grade["outcome"])})
  return Trajectory(**fields)


def _pack_array(array: np.ndarray) -> dict[str, Any]:
  dtype = array.dtype.newbyteorder("<")
  return {"dtype": dtype.str, "shape": list(array.shape), "data": array.astype(dtype).tobytes()}


def _unpack_array(packed: dict[str, Any]) -> np.ndarray:
  array = np.frombuffer(packed["data"], np.dtype(packed["dtype"])).reshape(packed["shape"])
  return array.astype(array.dtype.newbyteorder("="), copy=False)
