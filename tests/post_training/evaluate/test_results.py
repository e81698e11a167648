"""Summaries of small evaluations, worked by hand."""

import dataclasses

import numpy as np
import pytest

from wootz.data.records import Grade, Outcome, Trajectory
from wootz.post_training.evaluate import results
from wootz.post_training.evaluate.results import EvaluationResult, SampleResult, TaskResult

SOLVED = SampleResult(1.0, "solved", tokens=10, text="yes")
FAILED = SampleResult(0.0, "failed", tokens=20, text="no", truncated=True)
PARTIAL = SampleResult(0.5, "partial", tokens=30, text="half")
LOST = SampleResult(None, "infra_lost", tokens=0, text="")


def _task(task_id, greedy, *samples, split="held_out"):
  return TaskResult(task_id, task_id.partition("/")[0], split, "prompt", greedy, samples)


def _evaluation(*tasks):
  return EvaluationResult(tasks, update=0, temperature=0.8, max_new_tokens=64, seconds=1.5)


MIXED = _evaluation(
  _task("a/1", SOLVED, SOLVED, FAILED, FAILED, FAILED),
  _task("a/2", PARTIAL, FAILED, FAILED, FAILED, FAILED),
  _task("b/1", LOST, SOLVED, LOST, LOST, LOST, split="unseen_family"))


def test_summary_by_hand():
  summary = results.summarise(MIXED, pass_at=(1, 2, 4))
  assert summary.tasks == 3
  assert summary.greedy.estimate == 0.5  # the lost one is nobody's
  assert summary.mean_score == 0.75
  assert summary.unscored == 4
  assert summary.pass_at[1].estimate == pytest.approx((0.25 + 0 + 1) / 3)
  # b/1 has one scored sample: it leaves pass@2 and pass@4 instead of counting 1.0 or 0.
  assert summary.pass_at[2].estimate == pytest.approx((0.5 + 0) / 2)
  assert summary.pass_at[4].estimate == pytest.approx((1 + 0) / 2)
  assert summary.mean_tokens == pytest.approx((10 + 10 + 60 + 30 + 80 + 10) / 15)
  assert summary.truncated_share == pytest.approx(7 / 15)


def test_nothing_scored_gives_none_not_a_number():
  summary = results.summarise(_evaluation(_task("a/1", LOST, LOST)), pass_at=(1,))
  assert (summary.greedy, summary.mean_score, summary.pass_at[1]) == (None, None, None)
  empty = results.summarise(_evaluation(), pass_at=(1,))
  assert (empty.tasks, empty.mean_tokens) == (0, None)


def test_selection_by_split_and_family():
  assert [task.task_id for task in MIXED.select(split="held_out").tasks] == ["a/1", "a/2"]
  assert MIXED.tokens == 10 + 70 + 30 + 80 + 0 + 10
  families = results.by_family(MIXED)
  assert {name: len(part.tasks) for name, part in families.items()} == {"a": 2, "b": 1}


def test_json_round_trip():
  assert results.from_json(results.to_json(MIXED)) == MIXED
  for text in ("{}", "[]", "not json", '{"tasks": [], "odd": 1}'):
    with pytest.raises(ValueError):
      results.from_json(text)


def test_outcome_and_score_must_agree():
  with pytest.raises(ValueError, match="infra_lost"):
    SampleResult(0.0, "infra_lost", 1, "")
  with pytest.raises(ValueError):
    SampleResult(None, "failed", 1, "")
  with pytest.raises(ValueError):
    SampleResult(1.0, "excellent", 1, "")


def test_sample_of_a_trajectory():
  trajectory = Trajectory(
    task_id="a/1", domain="d", family="a", update=0, weight_version=0, sample_index=0,
    prompt_length=2, tokens=np.array([1, 2, 3, 4, 5], np.int32),
    loss_mask=np.array([False, False, True, True, True]),
    behavior_logprobs=np.zeros(5, np.float32), temperature=0.0, finish_reason="length",
    text="yes", grade=Grade(Outcome.PARTIAL, 0.5, reason="1 of 2 tests"))
  assert SampleResult.from_trajectory(trajectory) == SampleResult(
    0.5, "partial", tokens=3, text="yes", truncated=True, reason="1 of 2 tests")


def test_a_task_evaluated_twice_is_refused():
  with pytest.raises(ValueError, match="'a/1' was evaluated twice"):
    _evaluation(_task("a/1", SOLVED), _task("a/1", SOLVED))


def test_gain_pairs_by_task_id_and_leaves_lost_ones_out():
  before = _evaluation(_task("a/1", FAILED), _task("a/2", SOLVED), _task("a/3", LOST))
  after = _evaluation(_task("a/3", SOLVED), _task("a/2", SOLVED), _task("a/1", SOLVED))
  assert results.greedy_gain(before, after).estimate == 0.5
  with pytest.raises(ValueError, match="'a/3'"):
    results.greedy_gain(before, dataclasses.replace(after, tasks=after.tasks[1:]))
