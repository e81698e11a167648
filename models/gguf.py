"""Reads llama-type GGUF files: configuration, weights, and the metadata the tokenizer is made of.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import gguf
import numpy as np

from wootz.models import published
from wootz.models.config import ModelConfig
from wootz.models.params import Tree

_READABLE = frozenset(
  getattr(gguf.GGMLQuantizationType, name) for name in (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))


@dataclasses.dataclass(frozen=True)
class GGUFModel:
  """A GGUF file's model. `params` has numpy leaves in the tree of the family's `param_specs`."""

  config: ModelConfig
  params: Tree
  metadata: dict[str, Any]  # every key of the file, as plain Python values


class _Reader(gguf.GGUFReader):
  """Slices a plain array over the mapped file: memmap's own slices make opening 5 times slower."""

  @property  # type: ignore[override]
  def data(self) -> np.ndarray:
    return self._bytes

  @data.setter
  def data(self, mapped: np.memmap) -> None:
    self._bytes = np.asarray(mapped)


def load_gguf(path: str | os.PathLike[str], *, dtype: Any = np.float32) -> GGUFModel:
  """Reads configuration and dequantised weights, on the host, in `dtype`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: not a whole GGUF file, an unknown architecture, rotary kind or quantisation, or a
      missing, doubled, unknown or wrongly shaped tensor; the message names it.
  """
  reader = open_gguf(path)
  config = read_config(reader)
  return GGUFModel(config, read_params(reader, config, dtype=dtype), read_metadata(reader))


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
  if not os.path.isfile(path):
    raise FileNotFoundError(f"there is no GGUF file {os.fspath(path)!r}")
  try:
    reader = _Reader(path)
  # The reader meets a damaged file with whatever error the bytes lead to.
  except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
    raise ValueError(f"{os.fspath(path)!r} is not a readable GGUF file (damaged, cut short or of "
                     f"an unknown kind): {error}") from error
  names = [tensor.name for tensor in reader.tensors]
  if doubled := sorted({name for name in names if names.count(name) > 1}):
    raise ValueError(f"{os.fspath(path)!r} holds tensors twice: {doubled}")
  return reader


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
  """All key-value pairs as plain Python values (str, int, float, bool, lists of them)."""
  return {name: field.contents() for name, field in reader.fields.items()}


def read_config(reader: gguf.GGUFReader) -> ModelConfig:
  field = reader.fields.get("general.architecture")
  if field is None:
    raise ValueError("GGUF metadata lacks 'general.architecture'")
  architecture = field.contents()
  family = published.family_module(architecture)
  # Only the family's own facts and the vocabulary's size matter here; texts are slow to decode.
  metadata = {name: value.contents() for name, value in reader.fields.items()
              if name.startswith(f"{architecture}.")}
  if tokens := reader.fields.get("tokenizer.ggml.tokens"):
    metadata["tokenizer.ggml.tokens"] = range(len(tokens.data))
  tied = all(tensor.name != family.GGUF_NAMES["head"] for tensor in reader.tensors)
  return family.config_from_gguf(metadata, tied=tied)


def read_params(reader: gguf.GGUFReader, config: ModelConfig, *, dtype: Any = np.float32) -> Tree:
  """The dequantised parameter tree, with query and key rows in half-split rotary order."""
  family = published.family_module(config.family)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  rotary_heads = dict(zip(family.GGUF_ROTARY_LEAVES, (config.num_heads, config.num_kv_heads),
                          strict=True))

  def read(name, leaf):
    matrix = dequantize(tensors[name])
    if leaf in rotary_heads and matrix.shape[0] == rotary_heads[leaf] * config.head_dim:
      matrix = half_split_rows(matrix, rotary_heads[leaf])
    return matrix

  return published.assemble(config, family.GGUF_NAMES, tensors, read, dtype=dtype,
                            source="the GGUF file")


def dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
  """One tensor as float32 in row-major [out, in] order."""
  if tensor.tensor_type not in _READABLE:
    known = ", ".join(sorted(kind.name for kind in _READABLE))
    raise ValueError(f"tensor {tensor.name!r} has quantisation {tensor.tensor_type.name}, which "
                     f"cannot be read (readable: {known})")
  values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  # The file states sizes from the fastest dimension to the slowest.
  return values.astype(np.float32, copy=False).reshape([int(n) for n in tensor.shape[::-1]])


def half_split_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
  """Undoes the row order that llama.cpp's converter gives the query and key matrices.

  In the file rows 2i and 2i+1 of a head rotate together; here rows i and i + head_dim/2 do.

  Args:
    matrix: [heads * head_dim, in], rows as in the file.
    heads: number of query heads for the query, of key heads for the key.
  """
  pairs = matrix.reshape(heads, -1, 2, matrix.shape[-1])  # [head, pair, which, in]
  return pairs.swapaxes(1, 2).reshape(matrix.shape)
