"""Grades the trajectories of a store again and reports every grade that comes out otherwise.

  python -m wootz.launch.regrade --store=runs/mine --limit=200

Tells whether a grader is deterministic, and what a changed grader would have said. Nothing is written.
Exit status, as diff's: 0 all grades are the same; 1 some differ; 2 wrong input, named.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from absl import flags

from wootz.data.manifest import Entry
from wootz.data.records import Grade, Trajectory
from wootz.data.store import TrajectoryStore
from wootz.launch import program
from wootz.post_training import loop
from wootz.post_training.domains.base import get_domain
from wootz.post_training.rewards import find_task
from wootz.post_training.rollout.collect import GRADING_THREADS, grade_with_retries

EXIT_DIFFERS, EXIT_TROUBLE = 1, 2
_CHUNK = 256  # trajectories in memory at once


@dataclasses.dataclass(frozen=True)
class Difference:
  """One trajectory whose outcome or score has changed."""

  trajectory: Trajectory
  grade: Grade  # the new one

  def __str__(self) -> str:
    stored, t = self.trajectory.grade, self.trajectory
    return (f"update {t.update}, {t.domain}/{t.task_id}, sample {t.sample_index}: {_text(stored)} -> "
            f"{_text(self.grade)}")


def _text(grade: Grade) -> str:
  score = "" if grade.score is None else f" {grade.score:.4g}"
  return f"{grade.outcome.value}{score} ({grade.reason or 'no reason given'})"


def open_store(path: str) -> TrajectoryStore:
  """The store at a path, or in the run's directory at it. ValueError when it has no trajectories."""
  inside = pathlib.Path(path) / loop.STORE_FOLDER
  store = TrajectoryStore(inside if inside.is_dir() else path)
  if not len(store):
    raise ValueError(f"{store.directory} holds no committed trajectories")
  return store


def regrade(store: TrajectoryStore, entries: Sequence[Entry]) -> Iterator[Difference | None]:
  """For each entry in turn, how its grade has changed, or None.

  Raises KeyError naming a task or domain that there is no more: without it there is no grade.
  """
  with concurrent.futures.ThreadPoolExecutor(GRADING_THREADS) as pool:
    for start in range(0, len(entries), _CHUNK):
      yield from pool.map(_difference, store.read(entries[start:start + _CHUNK]))


def _difference(trajectory: Trajectory) -> Difference | None:
  task = find_task(trajectory.task_id, domain=trajectory.domain)
  grade, stored = grade_with_retries(get_domain(trajectory.domain), task, trajectory.text), trajectory.grade
  same = (grade.outcome, grade.score) == (stored.outcome, stored.score)
  return None if same else Difference(trajectory, grade)


def regrade_path(path: str, *, limit: int | None) -> int:
  """The program with its flags read; returns the exit status."""
  store = open_store(path)
  entries = store.entries[:limit]
  countdown = program.Countdown("graded again", len(entries))
  differences = 0
  for difference in regrade(store, entries):
    countdown()
    if difference is not None:
      differences += 1
      print(difference)
  print(f"{differences} of {len(entries)} grades differ ({len(store)} trajectories in {store.directory})")
  return EXIT_DIFFERS if differences else 0


def main() -> None:
  store = flags.DEFINE_string("store", None, "A trajectory store, or a run's directory.", required=True)
  limit = flags.DEFINE_integer("limit", None, "Grade only the first so many.", lower_bound=1)
  program.run(lambda: regrade_path(store.value, limit=limit.value), exit_failed=EXIT_TROUBLE)


if __name__ == "__main__":
  main()
