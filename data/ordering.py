"""Shuffles that are functions of names and seeds, equal on every machine and library version.

A sorted hash is used rather than a random generator: an element's place depends on its own name and
the salt only, so the result does not depend on the order in which elements were found, for example
which process wrote them first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def name_hashes(names: Sequence[str]) -> np.ndarray:
  """A fixed 64-bit hash per name; uint64 [len(names)]."""
  digests = b"".join(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                     for name in names)
  return np.frombuffer(digests, "<u8").astype(np.uint64)


def mix(hashes: np.ndarray, *salt: int | str) -> np.ndarray:
  """New uniform 64-bit values from hashes and a salt such as (seed, epoch); uint64, same shape.

  The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
  """
  # int() because numpy's integers are written differently from Python's.
  plain = tuple(part if isinstance(part, str) else int(part) for part in salt)
  digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
  z = hashes ^ np.frombuffer(digest, "<u8").astype(np.uint64)[0]
  with np.errstate(over="ignore"):
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))


def shuffled(hashes: np.ndarray, *salt: int | str) -> np.ndarray:
  """Indices of `hashes` in the order that the salt gives them; int64 [len(hashes)]."""
  return np.lexsort((hashes, mix(hashes, *salt)))


def uniforms(hashes: np.ndarray, *salt: int | str) -> np.ndarray:
  """Numbers in (0, 1), float64, one per hash, fixed by the salt."""
  return ((mix(hashes, *salt) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
