"""Samples and grades training tasks into a trajectory store, without learning.

  python -m wootz.launch.rollout --config=quickstart --tasks=16 --samples=8 --output=runs/looked-at

Temperature, limits, slots and seed come from the config's rollout and run sections. What was graded
is committed group by group of tasks, so a killed program leaves a whole store. Exit status: 0 done;
1 wrong input, named.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from wootz.data.records import Outcome, Task, Trajectory
from wootz.data.store import TrajectoryWriter
from wootz.data.task_pool import TaskPool, TaskPoolState
from wootz.launch import assemble, config_flags, program
from wootz.launch.config import Config
from wootz.post_training.domains.base import get_domain
from wootz.post_training.rollout.collect import collect

UPDATE = 0  # the label of all trajectories in the store


def draw_tasks(config: Config, count: int, *, split: str = "train") -> tuple[Task, ...]:
  """`count` different tasks of a split, in the order in which a run with this seed would draw them."""
  pool = TaskPool(tuple(get_domain(config.domain.name).tasks(split)), seed=config.run.seed)
  return pool.draw(TaskPoolState(), count)[0]


def sample_graded(config: Config, weights: program.Weights, tasks: Sequence[Task], num_samples: int, *,
                  on_grade: Callable[[Trajectory], None]) -> Iterator[list[Trajectory]]:
  """Graded trajectories of some tasks at a time, as many as keep the config's slots busy twice over."""
  section, domain = config.rollout, get_domain(config.domain.name)
  if num_samples < 1:
    raise ValueError(f"--samples={num_samples}: at least one sample per task is needed")
  sampling = assemble.make_sampling(section, num_samples=num_samples)
  generate = program.generator(weights, slots=section.slots)
  size = max(1, 2 * section.slots // num_samples)
  for start in range(0, len(tasks), size):
    yield collect(generate, tasks[start:start + size], domain=domain, tokenizer=weights.tokenizer,
                  kinds=lambda task: (sampling,), seed=config.run.seed, update=UPDATE,
                  weight_version=weights.updates, on_grade=on_grade)[0]


@dataclasses.dataclass(frozen=True)
class Summary:
  """What some groups of samples say. Shares are of 1, None where there is nothing to divide by."""

  groups: int
  samples: int
  reward: float | None  # mean score
  pass_rate: float | None  # of samples with a score
  flat_groups: float | None  # groups whose scores are all alike: they teach group-relative methods nothing
  invalid: float | None  # nothing gradable was delivered
  truncated: float | None  # cut by the length limit
  unscored: int  # lost or unscorable samples, nobody's score
  tokens: int  # sampled


def summarise(trajectories: Sequence[Trajectory]) -> Summary:
  """The summary of trajectories of one or more groups."""
  scored = [t for t in trajectories if t.grade.score is not None]
  scores: dict[str, set[float | None]] = {t.group: set() for t in trajectories}
  for trajectory in scored:
    scores[trajectory.group].add(trajectory.grade.score)
  return Summary(
    groups=len(scores), samples=len(trajectories), reward=_mean([t.grade.score for t in scored]),
    pass_rate=_mean([t.grade.outcome == Outcome.SOLVED for t in scored]),
    flat_groups=_mean([len(values) < 2 for values in scores.values()]),
    invalid=_mean([t.grade.outcome == Outcome.INVALID for t in scored]),
    truncated=_mean([t.finish_reason == "length" for t in trajectories]),
    unscored=len(trajectories) - len(scored), tokens=sum(int(t.loss_mask.sum()) for t in trajectories))


def _mean(values: Sequence) -> float | None:
  return sum(values) / len(values) if values else None


def summary_lines(trajectories: Sequence[Trajectory]) -> list[str]:
  """A table: one line per family, then one for all; shares in percent."""
  families = sorted({t.family for t in trajectories})
  parts = [(name, [t for t in trajectories if t.family == name]) for name in families]
  title = (f"{'family':<20}{'tasks':>6}{'samples':>9}{'reward':>8}{'solved':>8}{'flat':>7}{'invalid':>9}"
           f"{'cut':>7}{'unscored':>10}{'tokens':>8}")
  return [title, *(_row(name, summarise(part)) for name, part in [*parts, ("all", trajectories)])]


def _row(name: str, part: Summary) -> str:
  reward = "-" if part.reward is None else f"{part.reward:.3f}"
  return (f"{name:<20}{part.groups:>6}{part.samples:>9}{reward:>8}{share(part.pass_rate):>8}"
          f"{share(part.flat_groups):>7}{share(part.invalid):>9}{share(part.truncated):>7}"
          f"{part.unscored:>10}{part.tokens:>8}")


def share(value: float | None) -> str:
  """"42 %", or a dash."""
  return "-" if value is None else f"{100 * value:.0f} %"


def rollout(config: Config, path: str, *, num_tasks: int, num_samples: int, output: str) -> int:
  """The program with its flags read; returns the exit status."""
  tasks = draw_tasks(config, num_tasks)
  with TrajectoryWriter(output) as writer:  # refuses a used directory before the model is loaded
    weights = program.load_weights(path, compute_dtype=config.model.compute_dtype)
    countdown = program.Countdown("graded", num_tasks * num_samples)
    started, trajectories = time.monotonic(), []
    for some in sample_graded(config, weights, tasks, num_samples, on_grade=countdown):
      writer.write(some)
      writer.commit()
      trajectories += some
  print(f"weights: {weights.source}")
  print("\n".join(summary_lines(trajectories)))
  print(f"{len(trajectories)} trajectories in {output}; {time.monotonic() - started:.1f} s")
  return 0


def main() -> None:
  config = config_flags.ConfigFlag(default="quickstart")
  weights = flags.DEFINE_string("weights", None, "As for wootz.launch.evaluate; the config's base model when "
                                "left out.")
  tasks = flags.DEFINE_integer("tasks", 16, "Training tasks to draw.", lower_bound=1)
  samples = flags.DEFINE_integer("samples", None, "Samples per task; the config's when left out.",
                                 lower_bound=1)
  output = flags.DEFINE_string("output", None, "Directory of the new trajectory store.", required=True)
  program.run(lambda: rollout(
    config.value, weights.value or config.value.model.path, num_tasks=tasks.value, output=output.value,
    num_samples=samples.value or config.value.rollout.samples_per_task), config.parse)


if __name__ == "__main__":
  main()
