"""The gate keeps what is surely good enough."""

import pytest

from wootz.post_training.evaluate.gate import Action, gate
from wootz.post_training.evaluate.results import EvaluationResult, SampleResult, TaskResult


def _evaluation(solved, split="held_out"):
  """One task per flag; None is a lost sample."""
  def sample(flag):
    if flag is None:
      return SampleResult(None, "infra_lost", 0, "")
    return SampleResult(float(flag), "solved" if flag else "failed", 5, "")
  tasks = tuple(TaskResult(f"t/{i}", "t", split, "", sample(flag)) for i, flag in enumerate(solved))
  return EvaluationResult(tasks, update=0, temperature=1.0, max_new_tokens=8, seconds=0.0)


BASE = _evaluation([True] * 30 + [False] * 70)


def test_clear_gain_is_kept():
  decision = gate(BASE, _evaluation([True] * 60 + [False] * 40))
  assert decision.action is Action.KEEP
  assert decision.gain.estimate == pytest.approx(0.3)
  assert "+30.0 points" in decision.reason


def test_loss_rolls_back():
  assert gate(BASE, _evaluation([True] * 10 + [False] * 90)).action is Action.ROLL_BACK


def test_gain_within_noise_rolls_back():
  """Five tasks won and four lost: +1 point, whose interval holds losses."""
  after = [True] * 26 + [False] * 4 + [True] * 5 + [False] * 65
  assert gate(BASE, _evaluation(after)).action is Action.ROLL_BACK
  assert gate(BASE, _evaluation(after), min_gain=-0.06).action is Action.KEEP


def test_required_gain_counts_at_its_lower_bound():
  after = _evaluation([True] * 60 + [False] * 40)  # the 95 % interval is about 21 to 39 points
  assert gate(BASE, after, min_gain=0.15).action is Action.KEEP
  assert gate(BASE, after, min_gain=0.28).action is Action.ROLL_BACK


def test_more_confidence_asks_for_more_evidence():
  # Nine won, two lost: +7 points, standard error sqrt(0.11 - 0.07**2) / 10 = 3.2 points.
  after = _evaluation([True] * 28 + [False] * 2 + [True] * 9 + [False] * 61)
  assert gate(BASE, after, confidence=0.9).action is Action.KEEP
  assert gate(BASE, after, confidence=0.9999).action is Action.ROLL_BACK


def test_unchanged_weights_are_kept():
  assert gate(BASE, BASE).action is Action.KEEP


def test_no_evidence_rolls_back():
  lost = _evaluation([None] * 3)
  assert gate(lost, lost).action is Action.ROLL_BACK
  assert gate(BASE, BASE, split="unseen_family").gain is None


def test_other_tasks_are_refused():
  with pytest.raises(ValueError, match="only one of the two evaluations"):
    gate(BASE, _evaluation([True] * 99))
