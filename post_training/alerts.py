"""Rules that watch the metrics of each update and say when a person should look."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping


class Level(enum.StrEnum):
  """How bad it is."""

  WARNING = "warning"  # look when there is time
  CRITICAL = "critical"  # what follows cannot be trusted


@dataclasses.dataclass(frozen=True)
class Alert:
  """One rule that was broken."""

  name: str
  message: str  # one line with the number, its bound and what to look at
  level: Level

  def __str__(self) -> str:
    return f"{self.level.value.upper()} {self.name}: {self.message}"


def check(
  metrics: Mapping[str, float | None],
  *,
  max_logprob_gap: float = 0.02,
  max_infra_lost_share: float = 0.05,
  max_truncated_share: float = 0.5,
) -> tuple[Alert, ...]:
  """The alerts of one update's metrics, in the names of `metrics.DESCRIPTIONS`.

  `max_logprob_gap` is in nats per token: sampler and learner run the same forward on the same
  parameters, so more than rounding means that one of them computes something else. Metrics that
  are absent or None are not judged.
  """
  values = {name: value for name, value in metrics.items() if value is not None}
  alerts = [Alert("non_finite", f"{name} is {value}: find the first update where it happened",
                  Level.CRITICAL)
            for name, value in values.items() if not math.isfinite(value)]
  if values.get("tampered", 0) > 0:
    alerts.append(Alert("tampered", f"{values['tampered']:g} attempts tried to forge their grade: "
                        "read their trajectories", Level.CRITICAL))
  bounds = (
    ("logprob_gap", max_logprob_gap, Level.CRITICAL, "sampler and learner disagree"),
    ("infra_lost_share", max_infra_lost_share, Level.WARNING, "the sandbox loses samples"),
    ("truncated_share", max_truncated_share, Level.WARNING, "completions are cut: raise the limit"),
  )
  for name, bound, level, meaning in bounds:
    if abs(values.get(name, 0.0)) > bound:  # false for NaN, which is reported above
      alerts.append(Alert(name, f"{values[name]:.4g} is above {bound:g}: {meaning}", level))
  return tuple(alerts)


def as_texts(alerts: tuple[Alert, ...]) -> dict[str, str]:
  """The alerts as texts for `MetricsWriter.write`; empty when there are none."""
  return {"alerts": "\n".join(str(alert) for alert in alerts)} if alerts else {}
