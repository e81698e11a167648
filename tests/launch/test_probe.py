"""The probe's figures on the tiny model, and its rule line by line."""

import dataclasses

import pytest

from wootz.launch import probe
from wootz.launch.rollout import Summary
from wootz.post_training.evaluate.statistics import Interval

USUAL = Summary(groups=10, samples=80, reward=0.3, pass_rate=0.25, flat_groups=0.5, invalid=0.1,
                truncated=0.1, unscored=0, tokens=800)


@pytest.mark.parametrize("facts, rate, action", [
  ({}, 0.25, "RL"),
  ({}, 0.96, "nothing to gain"),
  ({"invalid": 0.9}, 0.25, "RL"),
  ({"flat_groups": 0.9, "invalid": 0.5}, 0.25, "prompt"),
  ({"flat_groups": 0.9, "invalid": 0.49}, 0.25, "SFT"),
  ({"flat_groups": 0.8}, 0.25, "RL"),
  ({"flat_groups": 0.9}, 0.25, "SFT"),
  ({"flat_groups": 1.0}, 0.0, "SFT"),
  ({"flat_groups": 1.0, "invalid": 0.9}, 0.0, "prompt"),
  ({"unscored": 41}, 1.0, "fix the grader"),
])
def test_rule(facts, rate, action):
  assert probe.recommend(dataclasses.replace(USUAL, **facts), Interval(rate, 0.0, 1.0)).action == action


def test_without_any_score_there_is_no_other_advice():
  lost = dataclasses.replace(USUAL, reward=None, pass_rate=None, invalid=None, unscored=80)
  assert probe.recommend(lost, None).action == "fix the grader"


def test_form_and_limits_are_pointed_out(graded_sample):
  samples = [graded_sample("a/1", index, *grade, finish="length") for index, grade in enumerate(
    [("solved", 1.0), ("invalid", 0.0), ("invalid", 0.0)])]
  lines = probe.report_lines(samples, num_samples=3, seconds=2.0)
  assert next(line for line in lines if "pass@1" in line).split()[1] == "33.3"
  assert next(line for line in lines if "cost" in line).split("cost")[1].strip() == (
    "9 tokens, 2.0 s, 9 tokens per solution")
  assert lines[-3].startswith("recommendation: RL: 100 % of the groups")
  assert "invalid" in lines[-2] and "max_new_tokens" in lines[-1]


def test_report_on_the_tiny_model(tiny_launch_config, tiny_model, capsys):
  """Three answers of four are right, the others empty: some groups of eight have spread."""
  assert probe.probe(tiny_launch_config, tiny_model, split="train", num_tasks=2, num_samples=8) == 0
  printed = capsys.readouterr().out
  figures = dict(line.strip().split("  ", 1) for line in printed.splitlines() if line.startswith("  "))
  rate = float(figures["pass@1"].split()[0])
  assert 30 <= rate <= 100
  # A wrong answer of this model is an empty one, and a group of eight has a right one (all but surely).
  assert float(figures["invalid answers"].split()[0]) == pytest.approx(100 - rate, abs=0.51)
  assert figures["pass@8"].split()[0] == "100.0"
  assert figures["truncated"].strip() == "0 %" and "tokens per solution" in figures["cost"]
  assert "recommendation: RL: " in printed and "groups with spread >= 20%" in printed
