"""Measures a model on tasks and says what is likely to help it: a prompt, SFT, RL, or nothing.

  python -m wootz.launch.probe --config=quickstart --weights=smollm2-135m-instruct --tasks=32 --samples=8

The rule, its thresholds and the figures are printed with the answer; see `recommend`. Samples are drawn
as training would draw them (the config's rollout section). Exit status: 0 done; 1 wrong input, named.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from absl import flags

from wootz.data.records import Outcome, Trajectory
from wootz.launch import config_flags, program
from wootz.launch.config import Config
from wootz.launch.evaluate import percent
from wootz.launch.rollout import Summary, draw_tasks, sample_graded, share, summarise
from wootz.post_training.domains.base import SPLITS
from wootz.post_training.evaluate.statistics import Interval, bootstrap_mean, pass_at_k

MASTERED = 0.95  # pass@1 from which there is little to gain
SPREAD = 0.2  # share of groups with spread from which group-relative RL has enough to learn from
INVALID = 0.5  # share of ungradable, or of cut, answers from which form rather than skill is missing

RULE = f"""The rule, first line that holds:
  fix the grader   fewer than half of the samples have a score
  nothing to gain  pass@1 >= {MASTERED:.0%}
  RL               groups with spread >= {SPREAD:.0%}: samples of a task differ in score, which is a signal
  prompt           invalid answers >= {INVALID:.0%}: the form is missing, which instructions or examples give
  SFT              else: sampling does not find what to reinforce; show solutions, or draw easier tasks"""


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """What to do, and the figure that decided it."""

  action: str  # "fix the grader", "nothing to gain", "RL", "prompt" or "SFT"
  because: str


def recommend(summary: Summary, pass_at_1: Interval | None) -> Recommendation:
  """Applies `RULE`. `pass_at_1` is None when nothing was scored."""
  scored = 1 - summary.unscored / summary.samples
  if pass_at_1 is None or summary.invalid is None or summary.flat_groups is None or scored < 0.5:
    return Recommendation("fix the grader", f"only {share(scored)} of the samples have a score")
  spread = 1 - summary.flat_groups
  if pass_at_1.estimate >= MASTERED:
    return Recommendation("nothing to gain", f"pass@1 is {share(pass_at_1.estimate)}")
  if summary.flat_groups <= 1 - SPREAD:
    return Recommendation("RL", f"{share(spread)} of the groups have spread")
  if summary.invalid >= INVALID:
    return Recommendation("prompt", f"{share(summary.invalid)} of the answers are not gradable at all")
  return Recommendation("SFT", f"only {share(spread)} of the groups have spread")


def pass_at(trajectories: Sequence[Trajectory], k: int) -> Interval | None:
  """pass@k over tasks, with its 95 % interval; tasks with fewer than k scored samples are left out."""
  groups: dict[str, list[bool]] = {}
  for trajectory in trajectories:
    if trajectory.grade.outcome.has_score:
      groups.setdefault(trajectory.group, []).append(trajectory.grade.outcome == Outcome.SOLVED)
  values = [pass_at_k(len(solved), sum(solved), k) for solved in groups.values() if len(solved) >= k]
  return bootstrap_mean(values) if values else None


def report_lines(trajectories: Sequence[Trajectory], *, num_samples: int, seconds: float) -> list[str]:
  """The figures, the rule and what it says."""
  summary = summarise(trajectories)
  advice = recommend(summary, first := pass_at(trajectories, 1))
  spread = None if summary.flat_groups is None else 1 - summary.flat_groups
  solved = sum(t.grade.outcome == Outcome.SOLVED for t in trajectories)
  lines = [
    f"{summary.groups} tasks x {num_samples} samples; percent, with 95 % intervals over tasks",
    f"  pass@1              {percent(first)}",
    f"  {f'pass@{num_samples}':<18}  {percent(pass_at(trajectories, num_samples))}",
    f"  invalid answers     {share(summary.invalid)}",
    f"  groups with spread  {share(spread)}",
    f"  truncated           {share(summary.truncated)}",
    f"  without a score     {summary.unscored} of {summary.samples}",
    f"  cost                {summary.tokens} tokens, {seconds:.1f} s, "
    + (f"{summary.tokens / solved:.0f} tokens per solution" if solved else "no solution"),
    RULE, f"recommendation: {advice.action}: {advice.because}"]
  if advice.action == "RL" and (summary.invalid or 0) >= INVALID:
    lines.append("most answers are invalid: a prompt that states the form may help before RL does")
  if (summary.truncated or 0) >= INVALID:
    lines.append("most answers are cut: see whether a larger --config.rollout.max_new_tokens helps")
  return lines


def probe(config: Config, path: str, *, split: str, num_tasks: int, num_samples: int) -> int:
  """The program with its flags read; returns the exit status."""
  tasks = draw_tasks(config, num_tasks, split=split)
  weights = program.load_weights(path, compute_dtype=config.model.compute_dtype)
  countdown = program.Countdown("graded", num_tasks * num_samples)
  started, trajectories = time.monotonic(), []
  for some in sample_graded(config, weights, tasks, num_samples, on_grade=countdown):
    trajectories += some
  print(f"weights: {weights.source}; {split} tasks of {config.domain.name}")
  print("\n".join(report_lines(trajectories, num_samples=num_samples, seconds=time.monotonic() - started)))
  return 0


def main() -> None:
  config = config_flags.ConfigFlag(default="quickstart")
  weights = flags.DEFINE_string("weights", None, "As for wootz.launch.evaluate; the config's base model when "
                                "left out.")
  split = flags.DEFINE_enum("split", "train", SPLITS, "Which tasks.")
  tasks = flags.DEFINE_integer("tasks", 32, "Tasks to draw.", lower_bound=1)
  samples = flags.DEFINE_integer("samples", 8, "Samples per task.", lower_bound=2)
  program.run(lambda: probe(config.value, weights.value or config.value.model.path, split=split.value,
                            num_tasks=tasks.value, num_samples=samples.value), config.parse)


if __name__ == "__main__":
  main()
