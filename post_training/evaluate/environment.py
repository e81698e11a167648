"""The software and the machine a run used, for its report."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re

import jax

_PACKAGES = ("wootz", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy",
             "tokenizers")


def versions() -> dict[str, str]:
  """Name -> version or description, as plain text; packages that are missing are left out."""
  found = {
    "python": platform.python_version(),
    "system": platform.platform(),
    "processor": _processor(),
    "usable cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                        else os.cpu_count()),
    "devices": ", ".join(f"{device.platform} {device.device_kind}" for device in jax.devices()),
  }
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _processor() -> str:
  information = pathlib.Path("/proc/cpuinfo")
  text = information.read_text(errors="replace") if information.exists() else ""
  match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
  return match[1] if match else platform.processor() or platform.machine()
