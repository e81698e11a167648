"""Figures of a run, drawn by matplotlib without a display."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wootz.post_training.evaluate.statistics import Interval

Curve = tuple[Sequence[float], Sequence[float]]  # updates, values

# In a page the colours follow the reader's light or dark theme: these stand-ins, which no figure
# uses otherwise, become CSS variables of the template.
_THEME = {"ink": "#010203", "muted": "#040506", "grid": "#070809", "accent": "#0a0b0c",
          "before": "#0d0e0f"}
_PRINT = {"ink": "#1c2330", "muted": "#5b6475", "grid": "#dfe3ea", "accent": "#1f5fbf",
          "before": "#9aa3b2"}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """One row of the before/after figure; values are shares in [0, 1]."""

  label: str
  before: Interval | None
  after: Interval | None


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
  """Metric name -> its finite values over updates, from the rows of `metrics.read_metrics`."""
  found: dict[str, tuple[list[float], list[float]]] = {}
  for row in rows:
    for name, value in row["scalars"].items():
      if value is not None and math.isfinite(value):
        updates, values = found.setdefault(name, ([], []))
        updates.append(row["update"])
        values.append(value)
  return dict(found)


def curve_svg(curve: Curve, *, share: bool = False) -> str:
  """One metric over updates as an inline SVG element; `share` labels it in per cent."""
  def draw(axes: Axes, colors: Mapping[str, str]) -> None:
    _draw_curve(axes, curve, colors, share=share)
    axes.set_xlabel("update", color=colors["muted"], fontsize=8)
  return _svg(draw, size=(3.4, 2.0))


def comparison_svg(comparisons: Sequence[Comparison]) -> str:
  """Before and after with their intervals, one row per comparison, as an inline SVG element."""
  def draw(axes: Axes, colors: Mapping[str, str]) -> None:
    _draw_comparison(axes, comparisons, colors)
  return _svg(draw, size=(9.6, 0.8 + 0.45 * len(comparisons)))


def learning_curve_png(panels: Mapping[str, Curve], path: str | os.PathLike[str], *,
                       shares: Sequence[str] = (), dpi: int = 144) -> None:
  """Writes a picture with one panel per title, side by side; titles in `shares` in per cent."""
  with matplotlib.rc_context(_settings()):
    figure = Figure(figsize=(3.6 * len(panels), 2.6), layout="constrained", facecolor="white")
    for axes, (title, curve) in zip(_panel_axes(figure, len(panels)), panels.items(), strict=True):
      _style(axes, _PRINT)
      _draw_curve(axes, curve, _PRINT, share=title in shares)
      axes.set_title(title, color=_PRINT["ink"], fontsize=10, loc="left")
      axes.set_xlabel("update", color=_PRINT["muted"], fontsize=9)
    figure.savefig(pathlib.Path(path), dpi=dpi)


def _panel_axes(figure: Figure, count: int) -> Sequence[Axes]:
  return figure.subplots(1, count, squeeze=False)[0]


def _draw_curve(axes: Axes, curve: Curve, colors: Mapping[str, str], *, share: bool) -> None:
  updates, values = curve
  axes.plot(updates, values, color=colors["accent"], linewidth=1.6, marker="o",
            markersize=3 if len(values) <= 40 else 0, zorder=3)
  axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
  axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=4, min_n_ticks=2))
  axes.margins(y=0.15)
  if min(values) >= 0:
    axes.set_ylim(0, 1.15 * max(values) or 1.0)
  if share:
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, symbol=" %"))


def _draw_comparison(axes: Axes, comparisons: Sequence[Comparison],
                     colors: Mapping[str, str]) -> None:
  for place, row in enumerate(comparisons):
    for interval, color, shift in ((row.before, colors["before"], -0.14),
                                   (row.after, colors["accent"], 0.14)):
      if interval is not None:
        axes.plot([interval.low, interval.high], [place + shift] * 2, color=color, linewidth=3,
                  solid_capstyle="round", alpha=0.45)
        axes.plot(interval.estimate, place + shift, "o", color=color, markersize=7)
  axes.set_yticks(range(len(comparisons)), [row.label for row in comparisons], fontsize=9)
  axes.set_ylim(len(comparisons) - 0.5, -0.5)
  axes.set_xlim(0, 1)
  axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, symbol=" %"))
  axes.tick_params(axis="y", labelcolor=colors["ink"])


def _style(axes: Axes, colors: Mapping[str, str]) -> None:
  axes.patch.set_alpha(0)
  axes.grid(True, color=colors["grid"], linewidth=0.8)
  axes.set_axisbelow(True)
  for spine in axes.spines.values():
    spine.set_visible(False)
  axes.tick_params(colors=colors["muted"], labelsize=8, length=0)
  axes.yaxis.get_offset_text().set(color=colors["muted"], fontsize=7)


def _svg(draw: Callable[[Axes, Mapping[str, str]], None], size: tuple[float, float]) -> str:
  with matplotlib.rc_context(_settings()):
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    _style(axes, _THEME)
    draw(axes, _THEME)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
  return _for_page(buffer.getvalue())


def _settings() -> dict[Any, Any]:
  return {"svg.fonttype": "none", "svg.hashsalt": "wootz", "font.family": "DejaVu Sans"}


def _for_page(svg: str) -> str:
  """The svg element alone, scaling with its box and coloured by the page's theme."""
  svg = svg[svg.index("<svg"):]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%" role="img"', svg, count=1)
  for name, stand_in in _THEME.items():
    svg = svg.replace(stand_in, f"var(--{name})")
  return svg
