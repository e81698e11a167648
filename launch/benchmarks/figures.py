"""Figures of alternating steps: medians, ranges, ratios, and the table a person reads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Step = Mapping[str, float]  # what a side measured of one step


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A row of the table."""

  name: str
  unit: str
  better: str  # "less" or "more"


@dataclasses.dataclass(frozen=True)
class Spread:
  """A median and its range."""

  median: float
  least: float
  most: float

  def __str__(self) -> str:
    return f"{_number(self.median)} ({_number(self.least)}..{_number(self.most)})"


def spread(values: Sequence[float]) -> Spread:
  """Raises ValueError without values."""
  if not values:
    raise ValueError("no steps were measured: a median needs at least one")
  return Spread(statistics.median(values), min(values), max(values))


def column(steps: Sequence[Step], quantity: Quantity) -> Spread:
  return spread([step[quantity.name] for step in steps])


def ratio(ours: Sequence[Step], theirs: Sequence[Step], quantity: Quantity) -> float:
  """Median of ours through median of theirs."""
  return column(ours, quantity).median / column(theirs, quantity).median


def as_values(sides: Mapping[str, Sequence[Step]], quantities: Sequence[Quantity]) -> dict[str, Any]:
  """Per quantity: each side's spread, and the ratio of the first side to the second. Plain values."""
  (_, ours), (_, theirs) = sides.items()
  return {quantity.name: {
    "unit": quantity.unit, "better": quantity.better, "ratio": ratio(ours, theirs, quantity),
    **{side: dataclasses.asdict(column(steps, quantity)) for side, steps in sides.items()}}
    for quantity in quantities}


def table(sides: Mapping[str, Sequence[Step]], quantities: Sequence[Quantity]) -> str:
  """A Markdown table of medians (min..max) of two sides, and the ratio of the first to the second."""
  (our_name, ours), (their_name, theirs) = sides.items()
  rows = [["median (min..max)", our_name, their_name, f"{our_name} / {their_name}", "better"]]
  for quantity in quantities:
    rows.append([f"{quantity.name.replace('_', ' ')}, {quantity.unit}", str(column(ours, quantity)),
                 str(column(theirs, quantity)), f"{ratio(ours, theirs, quantity):.2f}", quantity.better])
  return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Rows of cells, the first the header, as an aligned Markdown table."""
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
           for row in rows]
  lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
  return "\n".join(lines)


def _number(value: float) -> str:
  """Three digits that count, without an exponent."""
  return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
