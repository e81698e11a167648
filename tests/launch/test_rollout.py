"""Sampling the tiny model into a store, and what the summary says of it."""

import numpy as np
import pytest

from wootz.data.records import Outcome
from wootz.data.store import StoreInUse, TrajectoryStore
from wootz.launch import rollout


def test_summary_by_hand(graded_sample):
  samples = [
    graded_sample("a/1", 0, "solved", 1.0), graded_sample("a/1", 1, "failed", 0.0),
    graded_sample("a/2", 0, "invalid", 0.0, tokens=5, finish="length"),
    graded_sample("a/2", 1, "failed", 0.0),
    graded_sample("b/1", 0, "partial", 0.5), graded_sample("b/1", 1, "infra_lost", None)]
  summary = rollout.summarise(samples)
  assert (summary.groups, summary.samples, summary.unscored, summary.tokens) == (3, 6, 1, 20)
  assert summary.reward == pytest.approx(1.5 / 5)
  assert summary.pass_rate == pytest.approx(1 / 5)
  assert summary.flat_groups == pytest.approx(2 / 3)  # a/2, and b/1 whose only score has no rival
  assert summary.invalid == pytest.approx(1 / 5)
  assert summary.truncated == pytest.approx(1 / 6)
  lines = rollout.summary_lines(samples)
  assert [line.split()[0] for line in lines] == ["family", "a", "b", "all"]
  assert lines[1].split() == ["a", "2", "4", "0.250", "25", "%", "50", "%", "25", "%", "25", "%", "0", "14"]


def test_nothing_scored_is_no_zero(graded_sample):
  summary = rollout.summarise([graded_sample("a/1", 0, "infra_lost", None)])
  assert summary.reward is None and summary.pass_rate is None and summary.unscored == 1


def test_store_holds_every_sample(tiny_launch_config, tiny_model, tmp_path, capsys):
  output = str(tmp_path / "store")
  arguments = {"num_tasks": 2, "num_samples": 8, "output": output}
  assert rollout.rollout(tiny_launch_config, tiny_model, **arguments) == 0
  store = TrajectoryStore(output)
  tasks = rollout.draw_tasks(tiny_launch_config, 2)
  assert {(e.task_id, e.sample_index) for e in store.entries} == {
    (task.id, index) for task in tasks for index in range(8)}
  for sample in store:
    solved = sample.grade.outcome == Outcome.SOLVED
    assert len(sample.tokens) - sample.prompt_length == (2 if solved else 1)
    # ln 3/4 for the solution, ln 1/4 for the end at once
    first = sample.behavior_logprobs[sample.prompt_length]
    assert first == pytest.approx(np.log(0.75 if solved else 0.25), abs=1e-4)
  solved = sum(entry.score == 1.0 for entry in store.entries)
  assert 5 <= solved <= 16  # of 16 at p = 3/4: outside with probability 2e-4, and the seed is fixed
  assert capsys.readouterr().out.splitlines()[-1].startswith(f"16 trajectories in {output}")
  with pytest.raises(StoreInUse, match="already holds trajectories"):
    rollout.rollout(tiny_launch_config, "never/looked/at", **arguments)


def test_too_many_tasks_are_refused(tiny_launch_config, tmp_path):
  with pytest.raises(ValueError, match="cannot draw 9999 different tasks"):
    rollout.rollout(tiny_launch_config, "never/looked/at", num_tasks=9999, num_samples=1,
                    output=str(tmp_path / "store"))
