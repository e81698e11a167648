"""Checkpoints: arrays and host state of one step together, written in the background by Orbax.

    step_00000020/                              complete: the rename to this name is the last act
      arrays/, host/                            what Orbax wrote (uncompressed OCDBT, JSON)
      FILES.json                                size and CRC-32 of every file
    step_00000030.orbax-checkpoint-tmp          a save that was killed; ignored, then removed
    step_00000040.superseded-0                  damaged, or of a future that a restore gave up

Array data carry no checksum of their own on disk, so FILES.json is what finds a flipped bit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

Tree = Any  # a pytree of arrays, or of jax.ShapeDtypeStruct

_FORMAT = 1
_FILES = "FILES.json"
_NONE, _ALL_DAMAGED = -1, -2  # in place of a step
_log = logging.getLogger(__name__)


class CheckpointDamaged(RuntimeError):
  """A checkpoint that was finished is not what was written; the message names the file."""


class Checkpointer:
  """Saves and restores the steps of one run below a directory.

  Every process of a run makes the same calls in the same order. Values are fixed when `save`
  returns: arrays may be donated to the next computation, which costs at most one copy of them.

  Args:
    directory: of the run's checkpoints; created when missing. One run at a time may save there.
    keep: how many of the newest checkpoints stay. An older one goes only after a newer one is
      complete, at the next `save` or `wait`; so while saving there are up to keep + 1.
    keep_best: how many with the highest metric stay besides; of equal metrics the newest.
  """

  def __init__(self, directory: str | os.PathLike, *, keep: int = 3, keep_best: int = 0) -> None:
    if keep < 1 or keep_best < 0:
      raise ValueError(f"keep={keep}, keep_best={keep_best}: want keep >= 1 and keep_best >= 0")
    self.directory = Path(directory).absolute()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._keep, self._keep_best = keep, keep_best
    self._last_saved: int | None = None
    self._orbax = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        # Weights hardly compress, and the processor is busy enough.
        arrays=ocp.PyTreeCheckpointHandler(use_compression=False),
        host=ocp.JsonCheckpointHandler()),
      async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_file_list))

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def steps(self) -> tuple[int, ...]:
    """Steps with a finished checkpoint, in order; whether one is damaged shows when it is read."""
    names = (re.fullmatch(r"step_(\d{8,})", path.name) for path in self.directory.iterdir())
    return tuple(sorted(int(match[1]) for match in names if match))

  def best_step(self) -> int | None:
    """The step with the highest metric, the newest of equals; None when no metric was saved."""
    return max(_ranked(self.directory, self.steps()), default=(0.0, None))[1]

  def save(self, step: int, arrays: Tree, host_state: Mapping[str, Any], *,
           metric: float | None = None) -> None:
    """Begins to save one step; waits for the save before it, not for this one.

    Args:
      step: greater than the step saved before. The first save of a run may go back behind steps
        that are there already; those are set aside, so what is kept is one history.
      arrays: pytree of arrays (also typed random keys); Python numbers belong into `host_state`.
      host_state: plain JSON values with string keys. Process 0's are kept.
      metric: finite, higher is better; for `keep_best`.

    Raises ValueError for what cannot be saved, and the error of the save before when that failed.
    """
    if self._last_saved is not None and step <= self._last_saved:
      raise ValueError(f"step {step} after step {self._last_saved}: steps must increase")
    if metric is not None and not math.isfinite(metric):
      raise ValueError(f"step {step}: metric {metric} cannot be ranked")
    leaves, names = _named_leaves(arrays), {}
    host = {"format": _FORMAT, "step": step, "leaves": {}, "host_state": _json_copy(host_state)}
    for name, leaf in leaves.items():
      host["leaves"][name], names[name] = _describe(name, leaf), _storable(leaf)
    self.wait()
    if self._last_saved is None:
      self._clear_the_way(step)
    self._saving = step, metric
    self._orbax.save(self._path(step), ocp.args.Composite(
      arrays=ocp.args.PyTreeSave(names), host=ocp.args.JsonSave(host)))
    self._last_saved = step

  def wait(self) -> None:
    """Returns when the last save is complete; raises its error when it failed.

    After a failure the same step may be saved again.
    """
    try:
      self._orbax.wait_until_finished()
    except BaseException:
      self._last_saved = None
      raise
    self._prune()

  def close(self) -> None:
    self.wait()
    self._orbax.close()

  def restore_latest(self, abstract_tree: Tree) -> tuple[int, Tree, dict[str, Any]] | None:
    """The newest intact checkpoint as (step, arrays, host state); None when there is none at all.

    Args:
      abstract_tree: the tree to fill: arrays, or jax.ShapeDtypeStruct with the sharding to restore
        to, on any number of devices. A leaf without sharding goes to the first device.

    A damaged checkpoint is named in a warning and the one before it is used. Raises
    CheckpointDamaged when there are checkpoints and all are damaged, and ValueError naming the leaf
    where the tree has another structure, shape or dtype than what was saved.
    """
    self.wait()
    step = self._agreed(self._newest_intact)
    if step == _NONE:
      return None
    if step == _ALL_DAMAGED:
      raise CheckpointDamaged(f"all {len(self.steps())} checkpoints in {self.directory} are damaged; "
                              "remove them to start anew, or bring a copy back")
    return step, *self._read(step, abstract_tree)

  def restore(self, step: int, abstract_tree: Tree) -> tuple[Tree, dict[str, Any]]:
    """Arrays and host state of one step. Raises CheckpointDamaged when it is not intact."""
    self.wait()
    if step not in self.steps():
      raise FileNotFoundError(f"no checkpoint of step {step} in {self.directory}; there are "
                              f"{list(self.steps())}")
    problem = _find_damage(self._path(step)) if jax.process_index() == 0 else None
    if self._agreed(lambda: int(problem is not None)):
      raise CheckpointDamaged(f"checkpoint {self._path(step)} is damaged: "
                              f"{problem or 'the error of process 0 says how'}")
    return self._read(step, abstract_tree)

  def _read(self, step: int, abstract_tree: Tree) -> tuple[Tree, dict[str, Any]]:
    path = self._path(step)
    host = self._orbax.restore(path, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
    if host["format"] != _FORMAT:
      raise ValueError(f"checkpoint {path} has format {host['format']}, this program reads format "
                       f"{_FORMAT}")
    wanted = _named_leaves(abstract_tree)
    _check_leaves(path, host["leaves"], {name: _describe(name, leaf)
                                         for name, leaf in wanted.items()})
    stored = {name: _stored_form(leaf) for name, leaf in wanted.items()}
    arrays = self._orbax.restore(path, ocp.args.Composite(arrays=ocp.args.PyTreeRestore(
      item=stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored))))["arrays"]
    leaves = [_from_stored(arrays[name], leaf, host["leaves"][name])
              for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), host["host_state"]

  def _path(self, step: int) -> Path:
    return self.directory / f"step_{step:08d}"

  def _agreed(self, choose: Callable[[], int]) -> int:
    """What process 0 chooses, on every process; others see files come and go at other moments."""
    value = choose() if jax.process_index() == 0 else 0
    if jax.process_count() > 1:
      value = int(multihost_utils.broadcast_one_to_all(np.int32(value)))
    return value

  def _newest_intact(self) -> int:
    steps = self.steps()
    for step in reversed(steps):
      if (problem := _find_damage(self._path(step))) is None:
        return step
      _log.warning("checkpoint %s is damaged and not used: %s", self._path(step), problem)
    return _ALL_DAMAGED if steps else _NONE

  def _write_file_list(self) -> None:
    """Orbax calls this in the background when all is written, before the final rename."""
    step, metric = self._saving
    temporary = list(self.directory.glob(f"{self._path(step).name}.*tmp*"))
    if len(temporary) != 1:
      raise CheckpointDamaged(f"step {step}: want one directory being written, found {temporary}")
    files = {str(path.relative_to(temporary[0])): [path.stat().st_size, _crc32(path)]
             for item in ("arrays", "host")
             for path in sorted((temporary[0] / item).rglob("*")) if path.is_file()}
    content = {"step": step, "metric": metric, "files": files}
    _write_synced(temporary[0] / _FILES, json.dumps(
      {"crc": zlib.crc32(_dump(content)), "content": content}))

  def _prune(self) -> None:
    """Removes what retention does not keep. Called only while no save is under way."""
    steps = self.steps()
    if jax.process_index() != 0 or len(steps) <= self._keep or self._last_saved is None:
      return
    best = sorted(_ranked(self.directory, steps), reverse=True)[:self._keep_best]
    kept = {*steps[-self._keep:], *(step for _, step in best)}
    for step in steps:
      if step not in kept:
        _remove(self._path(step))

  def _clear_the_way(self, step: int) -> None:
    """Before a run's first save: no leftovers, and nothing from `step` on."""
    if jax.process_index() != 0:
      return
    for path in sorted(self.directory.glob("step_*.*")):
      if re.fullmatch(r"step_\d+\.(.*tmp.*|removed)", path.name):
        _log.warning("%s is left over from a killed process and is removed", path)
        shutil.rmtree(path, ignore_errors=True)
    for later in (s for s in self.steps() if s >= step):
      number = len(list(self.directory.glob(f"{self._path(later).name}.superseded-*")))
      aside = self.directory / f"{self._path(later).name}.superseded-{number}"
      _log.warning("%s is not older than step %d, which is saved now: set aside as %s",
                   self._path(later), step, aside.name)
      os.rename(self._path(later), aside)


def _named_leaves(tree: Tree) -> dict[str, Any]:
  """Leaves by path, for example "params.layers.wq"; so the files know nothing of tree types."""
  pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
  leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
  if len(leaves) < len(pairs):
    raise ValueError("two leaves of the tree have the same path when written with dots: rename "
                     "keys that contain a dot")
  if not leaves:
    raise ValueError("the tree has no arrays")
  return leaves


def _describe(name: str, leaf: Any) -> dict[str, Any]:
  """What must be equal between the saved leaf and the one restored into."""
  if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
    raise ValueError(f"leaf {name} is a {type(leaf).__name__}, not an array: put plain values into "
                     "host_state")
  described = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
  if _is_key(leaf) and isinstance(leaf, jax.Array):
    described["impl"] = str(jax.random.key_impl(leaf))
  return described


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaf: Any) -> Any:
  """Arrays that the caller cannot change any more, random keys as their bits.

  A jax.Array is left as it is: Orbax holds a reference to its buffer, and XLA does not write a
  donated buffer that is referenced elsewhere but takes a new one.
  """
  if _is_key(leaf):
    return jax.random.key_data(leaf)
  return leaf if isinstance(leaf, jax.Array) else np.array(leaf, copy=True)


def _stored_form(leaf: Any) -> jax.ShapeDtypeStruct:
  """Shape, dtype and sharding of the array that stands in the files for an abstract leaf."""
  sharding = getattr(leaf, "sharding", None)
  if _is_key(leaf):
    bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if isinstance(sharding, jax.sharding.NamedSharding):
      sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    leaf = bits
  default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or default)


def _from_stored(array: jax.Array, leaf: Any, saved: Mapping[str, Any]) -> jax.Array:
  if not _is_key(leaf):
    return array
  keys = jax.random.wrap_key_data(array, impl=saved["impl"])
  sharding = getattr(leaf, "sharding", None)
  return keys if sharding is None else jax.device_put(keys, sharding)


def _check_leaves(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Raises ValueError naming the first leaves that differ."""
  differences = [f"{name} is in the checkpoint and not in the tree"
                 for name in saved if name not in wanted]
  differences += [f"{name} is in the tree and not in the checkpoint"
                  for name in wanted if name not in saved]
  differences += [
    f"{name} was saved as {saved[name]['dtype']} {saved[name]['shape']} and is wanted as "
    f"{wanted[name]['dtype']} {wanted[name]['shape']}"
    for name in wanted if name in saved
    and any(saved[name][fact] != wanted[name][fact] for fact in ("dtype", "shape"))]
  if differences:
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    raise ValueError(f"checkpoint {path} does not fit: {'; '.join(differences[:3])}{more}. Nothing "
                     "is converted silently; restore into the tree that was saved and convert it")


def _json_copy(value: Any, place: str = "host_state") -> Any:
  """A deep copy in plain JSON values. Raises ValueError naming the place that JSON would change."""
  if isinstance(value, Mapping):
    if bad := [key for key in value if not isinstance(key, str)]:
      raise ValueError(f"{place} has the key {bad[0]!r}, and JSON keys are strings")
    return {key: _json_copy(item, f"{place}.{key}") for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_json_copy(item, f"{place}[{i}]") for i, item in enumerate(value)]
  if value is None or isinstance(value, (bool, int, str)) or (
      isinstance(value, float) and math.isfinite(value)):
    return value
  raise ValueError(f"{place} is {value!r}, which is no plain JSON value")


def _read_file_list(path: Path) -> dict[str, Any]:
  """The content of FILES.json. Raises CheckpointDamaged when it is missing or changed."""
  try:
    record = json.loads((path / _FILES).read_text())
    if record["crc"] == zlib.crc32(_dump(record["content"])):
      return record["content"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise CheckpointDamaged(f"{_FILES} cannot be read ({error})") from error
  raise CheckpointDamaged(f"{_FILES} does not match its checksum")


def _find_damage(path: Path) -> str | None:
  """What differs from what was written, or None. Reads every file once."""
  try:
    files = _read_file_list(path)["files"]
    for name, (size, crc) in files.items():
      if not (path / name).is_file():
        return f"{name} is missing"
      if (found := (path / name).stat().st_size) != size:
        return f"{name} has {found} bytes instead of {size}"
      if _crc32(path / name) != crc:
        return f"{name} does not match its checksum"
  except (CheckpointDamaged, OSError) as error:
    return str(error)
  return None


def _ranked(directory: Path, steps: tuple[int, ...]) -> list[tuple[float, int]]:
  """(metric, step) of the steps that have a metric."""
  ranked = []
  for step in steps:
    try:
      metric = _read_file_list(directory / f"step_{step:08d}")["metric"]
    except CheckpointDamaged:
      continue
    if metric is not None:
      ranked.append((float(metric), step))
  return ranked


def _remove(path: Path) -> None:
  """Renames first, so that a kill half-way leaves nothing under a checkpoint's name."""
  doomed = path.with_name(path.name + ".removed")
  os.rename(path, doomed)
  shutil.rmtree(doomed)


def _crc32(path: Path) -> int:
  value = 0
  with path.open("rb") as file:
    while block := file.read(1 << 22):
      value = zlib.crc32(block, value)
  return value


def _write_synced(path: Path, text: str) -> None:
  with path.open("w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def _dump(content: Mapping[str, Any]) -> bytes:
  return json.dumps(content, sort_keys=True).encode()
