"""Numbers of a run: means that do not depend on how a batch was cut, and where they are written."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self, TextIO

import jax
import tensorboardX

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

# The names the training loop writes, and what they mean to a reader.
DESCRIPTIONS: Mapping[str, str] = {
  "reward": "mean score of the scored samples, 0 to 1",
  "pass_rate": "share of scored samples that solved their task",
  "flat_groups": "share of groups whose samples all scored alike and teach nothing",
  "loss": "policy loss that was minimised",
  "ratio": "mean probability ratio of new to old policy on sampled tokens",
  "clip_fraction": "share of sampled tokens whose ratio was clipped",
  "kl": "KL from the base model per sampled token, nats",
  "kl_behavior": "KL from the policy that sampled, per token, nats",
  "entropy": "entropy of the policy per sampled token, nats",
  "logprob_gap": "mean difference of sampler and learner logprobs, nats",
  "gradient_norm": "global norm of the gradient before clipping",
  "learning_rate": "step size of the last optimizer step",
  "completion_length": "mean tokens per completion",
  "truncated_share": "share of completions cut by the length limit",
  "tokens_per_second": "tokens sampled per second of the whole update",
  "sampled_tokens": "tokens sampled in the update",
  "learned_tokens": "sampled tokens that entered the loss, over all epochs",
  "sampling_seconds": "wall time spent sampling",
  "grading_seconds": "wall time spent grading",
  "learning_seconds": "wall time spent learning",
  "seconds": "wall time of the whole update",
  "optimizer_updates": "optimizer updates done in the update; 0 when every group was flat",
  "peak_memory_gib": "largest memory of the process so far, GiB",
  "tampered": "attempts that tried to forge their grade",
  "infra_lost_share": "share of samples without a score (infra_lost, unscorable)",
}


@dataclasses.dataclass(frozen=True)
class WeightedMean:
  """A mean kept as sum and count, so that parts combine exactly however the data was cut."""

  total: float = 0.0
  count: float = 0.0

  def __add__(self, other: WeightedMean) -> WeightedMean:
    return WeightedMean(self.total + other.total, self.count + other.count)

  @property
  def value(self) -> float | None:
    """The mean, or None where nothing was counted."""
    return self.total / self.count if self.count else None


def mean_of(values: Iterable[float | None]) -> WeightedMean:
  """The mean of what is there; None (a missing reward, for example) is not counted."""
  present = [float(value) for value in values if value is not None]
  return WeightedMean(math.fsum(present), len(present))


def combine_means(parts: Iterable[Mapping[str, WeightedMean]]) -> dict[str, WeightedMean]:
  """Adds micro-batches, minibatches or hosts, name by name."""
  combined: dict[str, WeightedMean] = {}
  for part in parts:
    for name, mean in part.items():
      combined[name] = combined.get(name, WeightedMean()) + mean
  return combined


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The rows of a run: dicts with `update`, `time` (Unix seconds), `scalars` and `texts`.

  Numbers that were not finite come back as floats (nan, inf). A last line that a kill cut short is
  left out; a broken line anywhere else raises ValueError with its place.
  """
  path = pathlib.Path(directory) / FILE_NAME
  if not path.exists():
    return []
  lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
  rows = []
  for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is unfinished
    try:
      row = json.loads(line)
      row["scalars"] = {name: _from_json(value) for name, value in row["scalars"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f"{path}, line {number}: not a row of metrics ({error})") from error
    rows.append(row)
  return rows


class MetricsWriter:
  """Appends the numbers of each update to metrics.jsonl and to TensorBoard event files.

  A fresh writer refuses a directory that already holds metrics (FileExistsError). A resumed run
  passes `next_update`, the first update it will do: rows of that and later updates come from work
  that was lost with the kill, and are dropped, so each update appears once. Only process 0 writes.
  """

  def __init__(self, directory: str | os.PathLike[str], *, next_update: int | None = None,
               process_index: int | None = None) -> None:
    self._file: TextIO | None = None
    self._board: Any = None
    process_index = jax.process_index() if process_index is None else process_index
    if process_index != 0:
      return
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    if next_update is not None:
      _drop_from(directory, next_update)
    elif path.exists() and path.stat().st_size:
      raise FileExistsError(f"{path} holds the metrics of another run: resume it or choose a new "
                            "run directory")
    self._file = path.open("a", encoding="utf-8")
    self._board = tensorboardX.SummaryWriter(
      str(directory / TENSORBOARD_FOLDER), purge_step=next_update)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, update: int, scalars: Mapping[str, Any],
            texts: Mapping[str, str] | None = None) -> None:
    """Writes one row, durably.

    Values are numbers or 0-dimensional arrays; None says "not measured". NaN and infinities are
    recorded as the strings "nan", "inf", "-inf", and left out of TensorBoard. Raises
    TypeError naming what is not a number.
    """
    if self._file is None:
      return
    numbers = {name: _to_float(name, value) for name, value in scalars.items()}
    row = {"update": int(update), "time": time.time(),
           "scalars": {name: _to_json(number) for name, number in numbers.items()},
           "texts": dict(texts or {})}
    self._file.write(json.dumps(row, allow_nan=False) + "\n")
    self._file.flush()
    os.fsync(self._file.fileno())
    for name, number in numbers.items():
      if number is not None and math.isfinite(number):  # TensorBoard draws gaps
        self._board.add_scalar(name, number, update)
    for name, text in (texts or {}).items():
      self._board.add_text(name, text, update)
    self._board.flush()

  def close(self) -> None:
    """Closes the files; further writes are errors."""
    if self._file is not None:
      self._file.close()
      self._board.close()


def _drop_from(directory: pathlib.Path, next_update: int) -> None:
  """Rewrites metrics.jsonl without the rows of `next_update` and later, and without a torn line."""
  rows = [row for row in read_metrics(directory) if row["update"] < next_update]
  aside = directory / (FILE_NAME + ".new")
  with aside.open("w", encoding="utf-8") as file:
    for row in rows:
      row["scalars"] = {name: _to_json(value) for name, value in row["scalars"].items()}
      file.write(json.dumps(row, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(aside, directory / FILE_NAME)


def _to_float(name: str, value: Any) -> float | None:
  if value is None:
    return None
  try:
    return float(value)
  except (TypeError, ValueError) as error:
    raise TypeError(f"metric {name!r} is no number: {value!r}") from error


def _to_json(number: float | None) -> float | str | None:
  return number if number is None or math.isfinite(number) else str(number)


def _from_json(value: float | str | None) -> float | None:
  return None if value is None else float(value)
