"""Hugging Face model folders: config.json, safetensors in one or several shards, tokenizer files.

What is written here is loaded by stock transformers. Formats:
https://huggingface.co/docs/safetensors, https://huggingface.co/docs/transformers/main_classes/model
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import safetensors.numpy

from wootz.models import published
from wootz.models.config import ModelConfig
from wootz.models.params import Tree

_INDEX = "model.safetensors.index.json"

# numpy itself knows no 16-bit brain floats and no 8-bit floats; ml_dtypes adds them.
_DTYPES = {
  "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}
_TAGS = {np.dtype(dtype): tag for tag, dtype in _DTYPES.items()}
_FAMILY_OF_ARCHITECTURE = {"LlamaForCausalLM": "llama"}


class SavesFiles(Protocol):
  """What `save_hf` needs of a tokenizer (wootz.data.tokenizer.Tokenizer has it)."""

  def save(self, folder: str | os.PathLike[str]) -> None: ...


@dataclasses.dataclass(frozen=True)
class HFModel:
  """A folder's model. `params` has numpy leaves in the tree of the family's `param_specs`."""

  config: ModelConfig
  params: Tree


def load_hf(folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> HFModel:
  """Reads configuration and weights, on the host.

  `wootz.data.tokenizer.from_hf` reads the same folder's tokenizer.

  Args:
    dtype: of the leaves; None keeps the dtypes of the files.

  Raises:
    FileNotFoundError: config.json or a shard is missing.
    ValueError: an unknown architecture, configuration key or rotary kind; a tensor that is missing,
      in two shards, unknown, of another shape or of an unreadable dtype. The message names it.
  """
  folder = Path(folder)
  config = read_config(folder)
  family = published.family_module(config.family)
  shards = find_tensors(folder)
  if config.tie_embeddings:  # some writers repeat the tied matrix as the output head
    _drop_tied_head(shards, family.HF_NAMES)
  params = published.assemble(config, family.HF_NAMES, shards,
                              lambda name, _: shards[name].read(name), dtype=dtype,
                              source=os.fspath(folder))
  return HFModel(config, params)


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
  """The configuration in a folder's config.json."""
  data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
  known = ", ".join(_FAMILY_OF_ARCHITECTURE)
  architectures = data.get("architectures") or ["(none stated)"]
  if len(architectures) != 1 or architectures[0] not in _FAMILY_OF_ARCHITECTURE:
    raise ValueError(f"config.json names architectures {architectures} (known: {known})")
  family = _FAMILY_OF_ARCHITECTURE[architectures[0]]
  if (model_type := data.get("model_type", family)) != family:
    raise ValueError(f"config.json says architecture {architectures[0]} but model_type "
                     f"{model_type!r}")
  return published.family_module(family).config_from_hf(data)


@dataclasses.dataclass(frozen=True)
class Shard:
  """One safetensors file: where each tensor lies in it."""

  path: Path
  data_start: int  # bytes
  entries: dict[str, dict[str, Any]]  # name to dtype, shape, data_offsets

  def read(self, name: str) -> np.ndarray:
    """One tensor in the file's own dtype, read on access (memory-mapped, not writable)."""
    entry = self.entries[name]
    if entry["dtype"] not in _DTYPES:
      raise ValueError(f"tensor {name!r} in {self.path} has dtype {entry['dtype']} (readable: "
                       f"{', '.join(_DTYPES)})")
    start, end = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    raw = np.memmap(self.path, np.uint8, "r", self.data_start + start, (end - start,))
    return np.asarray(raw).view(dtype).reshape(entry["shape"])


def open_shard(path: str | os.PathLike[str]) -> Shard:
  """Reads a safetensors file's header: 8 bytes of length, then JSON, then the data."""
  path = Path(path)
  try:
    # The library checks the header against the file's size; its numpy view lacks BF16 and FP8.
    with safetensors.safe_open(path, framework="np"):
      pass
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    pairs = json.loads(file.read(length), object_pairs_hook=_refuse_doubled(path))
  pairs.pop("__metadata__", None)
  return Shard(path, 8 + length, pairs)


def _refuse_doubled(path: Path):
  def hook(pairs):
    names = [name for name, _ in pairs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(f"{path} holds {doubled} twice")
    return dict(pairs)
  return hook


def find_tensors(folder: Path) -> dict[str, Shard]:
  """Which shard holds each tensor. A tensor in two shards is refused, naming it and both files."""
  index_path = folder / _INDEX
  listed = {}
  if index_path.exists():
    listed = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    paths = [folder / name for name in sorted(set(listed.values()))]
  else:
    paths = sorted(folder.glob("*.safetensors"))
  if not paths:
    raise FileNotFoundError(f"{folder} holds no safetensors files")
  if missing := [path.name for path in paths if not path.exists()]:
    raise FileNotFoundError(f"{folder} lacks the shards {missing} that {_INDEX} lists")
  holders: dict[str, Shard] = {}
  for shard in map(open_shard, paths):
    for name in shard.entries:
      if name in holders:
        raise ValueError(f"tensor {name!r} is in both {holders[name].path} and {shard.path}: "
                         "remove the one that does not belong there")
      holders[name] = shard
  wrong = sorted(name for name, file in listed.items()
                 if name not in holders or holders[name].path.name != file)
  if wrong:
    raise ValueError(f"{index_path} places {wrong[:8]} in shards that do not hold them")
  return holders


def _drop_tied_head(shards: dict[str, Shard], names: dict[str, str]) -> None:
  head, embedding = names["head"], names["embedding"]
  if head not in shards or embedding not in shards:
    return
  if not np.array_equal(shards[head].read(head), shards[embedding].read(embedding)):
    raise ValueError(f"config.json says tie_word_embeddings, but {head!r} in {shards[head].path} "
                     f"differs from {embedding!r}")
  del shards[head]


def save_hf(folder: str | os.PathLike[str], params: Tree, config: ModelConfig,
            tokenizer: SavesFiles | None = None, *, dtype: Any = None,
            max_shard_bytes: int = 4 * 2**30) -> None:
  """Writes a folder that transformers loads. config.json comes last: with it the folder is whole.

  Args:
    tokenizer: its files are written too when given.
    dtype: of the files' tensors; None keeps the parameters' own.
    max_shard_bytes: a shard holds at least one tensor and otherwise at most this.
  """
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  if stale := sorted(path.name for path in folder.glob("*.safetensors")):
    raise FileExistsError(f"{folder} already holds weights ({stale[0]}): choose another folder")
  family = published.family_module(config.family)
  tensors = list(published.disassemble(config, family.HF_NAMES, params))
  tensor_dtype = np.dtype(dtype or tensors[0][1].dtype)
  if tensor_dtype not in _TAGS:
    raise ValueError(f"dtype {tensor_dtype} cannot be written (known: {', '.join(_DTYPES)})")
  _write_shards(folder, tensors, tensor_dtype, max_shard_bytes)
  if tokenizer is not None:
    tokenizer.save(folder)
  described = {**family.config_to_hf(config), "torch_dtype": tensor_dtype.name}
  _write_text(folder / "config.json", json.dumps(described, indent=2))


def _write_shards(folder: Path, tensors, dtype: np.dtype, max_shard_bytes: int) -> None:
  groups = list(_cut_shards(tensors, dtype.itemsize, max_shard_bytes))
  weight_map = {}
  for index, group in enumerate(groups, start=1):
    name = "model.safetensors"
    if len(groups) > 1:
      name = f"model-{index:05d}-of-{len(groups):05d}.safetensors"
    weight_map.update({tensor: name for tensor, _ in group})
    _write_shard(folder / name, {tensor: np.ascontiguousarray(matrix, dtype)
                                 for tensor, matrix in group})
  if len(groups) > 1:
    total = sum(matrix.size for _, matrix in tensors) * dtype.itemsize
    index_data = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(folder / _INDEX, json.dumps(index_data, indent=2))


def _cut_shards(tensors, itemsize: int, max_shard_bytes: int) -> Iterator[list]:
  group: list[tuple[str, np.ndarray]] = []
  size = 0
  for name, matrix in tensors:
    length = matrix.size * itemsize
    if group and size + length > max_shard_bytes:
      yield group
      group, size = [], 0
    group.append((name, matrix))
    size += length
  if group:
    yield group


def _write_shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
  aside = path.with_name(f".{path.name}.{os.getpid()}")
  aside.touch()
  mode = aside.stat().st_mode  # as the umask says; the library makes files private to the user
  # transformers refuses files whose metadata do not name a framework.
  safetensors.numpy.save_file(tensors, aside, metadata={"format": "pt"})
  aside.chmod(mode)
  os.replace(aside, path)


def _write_text(path: Path, text: str) -> None:
  aside = path.with_name(f".{path.name}.{os.getpid()}")
  aside.write_text(text, encoding="utf-8")
  os.replace(aside, path)
