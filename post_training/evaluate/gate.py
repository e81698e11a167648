"""Decides from two evaluations of the same tasks whether new weights are kept."""

from __future__ import annotations

import dataclasses
import enum

from wootz.post_training.evaluate import results
from wootz.post_training.evaluate.results import EvaluationResult
from wootz.post_training.evaluate.statistics import Interval


class Action(enum.StrEnum):
  """What becomes of the weights that were evaluated last."""

  KEEP = "keep"
  ROLL_BACK = "roll_back"


@dataclasses.dataclass(frozen=True)
class Decision:
  """The gate's verdict."""

  action: Action
  reason: str  # one line for a person, with the numbers
  gain: Interval | None  # in greedy pass@1; None when no task was scored in both evaluations


def gate(before: EvaluationResult, after: EvaluationResult, *, min_gain: float = 0.0,
         confidence: float = 0.95, split: str | None = "held_out", seed: int = 0) -> Decision:
  """Keeps the weights of `after` if their gain is at least `min_gain` with the given confidence.

  The gain is that of greedy pass@1, by paired bootstrap over the tasks of `split` (None: all), and
  its lower bound is what counts. A negative `min_gain` is the loss one tolerates, for example
  -0.02 for "not worse by more than two points". Without a task scored in both evaluations there is
  no evidence, and the weights roll back. Raises ValueError when the tasks differ.
  """
  gain = results.greedy_gain(before.select(split=split), after.select(split=split),
                             confidence=confidence, seed=seed)
  where = split or "all"
  if gain is None:
    return Decision(Action.ROLL_BACK, f"no {where} task was scored both before and after", None)
  figures = (f"greedy pass@1 on {where} tasks changed by {100 * gain.estimate:+.1f} points "
             f"({100 * confidence:g} % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f})")
  if gain.low >= min_gain:
    return Decision(Action.KEEP, f"{figures}: at least {100 * min_gain:+.1f}", gain)
  return Decision(Action.ROLL_BACK, f"{figures}: not surely {100 * min_gain:+.1f} or more", gain)
