"""Grading stored trajectories again: equal grades say nothing, changed ones are each named."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from wootz.data.records import Grade, Outcome, Trajectory
from wootz.data.store import TrajectoryWriter
from wootz.launch import regrade
from wootz.post_training.domains.base import get_domain


@pytest.fixture(scope="module")
def honest():
  """A right answer, a wrong one and none, with the grades that they deserve."""
  task = get_domain("python_functions").tasks("train")[0]
  name = task.payload["function"]
  answers = [(task.payload["reference"], Grade(Outcome.SOLVED, 1.0)),
             (f"def {name}(*_):\n  return 'never'\n", Grade(Outcome.FAILED, 0.0)),
             ("no idea", Grade(Outcome.INVALID, 0.0))]
  return [Trajectory(
    task_id=task.id, domain=task.domain, family=task.family, update=0, weight_version=0,
    sample_index=index, prompt_length=1, tokens=np.zeros(2, np.int32), loss_mask=np.array([False, True]),
    behavior_logprobs=np.zeros(2, np.float32), temperature=1.0, finish_reason="stop", text=text,
    grade=grade) for index, (text, grade) in enumerate(answers)]


def write(directory, trajectories):
  with TrajectoryWriter(directory) as writer:
    writer.write(trajectories)
  return str(directory)


def test_same_grades(honest, tmp_path, capsys):
  write(tmp_path / "trajectories", honest)
  assert regrade.regrade_path(str(tmp_path), limit=None) == 0  # a run's directory serves too
  assert capsys.readouterr().out.startswith("0 of 3 grades differ (3 trajectories in ")


def test_each_difference_is_named(honest, tmp_path, capsys):
  wrong = [dataclasses.replace(honest[0], grade=Grade(Outcome.PARTIAL, 0.25, "old")), honest[1],
           dataclasses.replace(honest[2], grade=Grade(Outcome.FAILED, 0.0))]
  store = write(tmp_path / "store", wrong)
  assert regrade.regrade_path(store, limit=None) == 1
  first, second, last = capsys.readouterr().out.splitlines()
  assert f"{wrong[0].task_id}, sample 0: partial 0.25 (old) -> solved 1 (" in first
  assert "sample 2: failed 0" in second and "-> invalid 0" in second  # the same score, another outcome
  assert last.startswith("2 of 3 grades differ")
  assert regrade.regrade_path(store, limit=1) == 1
  assert "1 of 1 grades differ (3 trajectories" in capsys.readouterr().out


def test_a_task_that_is_gone_is_named(honest, tmp_path):
  store = write(tmp_path / "store", [dataclasses.replace(honest[0], task_id="gone/0001")])
  with pytest.raises(KeyError, match="no task 'gone/0001'"):
    regrade.regrade_path(store, limit=None)


def test_program_has_a_status_for_trouble():
  """Not 1, which says that grades differ."""
  done = subprocess.run([sys.executable, "-m", "wootz.launch.regrade", "--store=no/such/place"],
                        capture_output=True, text=True, check=False)
  assert done.returncode == 2 and "wootz: no trajectory store at no/such/place" in done.stderr


def test_an_empty_store_is_no_success(tmp_path):
  with TrajectoryWriter(tmp_path):
    pass
  with pytest.raises(ValueError, match="no committed trajectories"):
    regrade.regrade_path(str(tmp_path), limit=None)
  with pytest.raises(FileNotFoundError, match="no trajectory store"):
    regrade.regrade_path(str(tmp_path / "nowhere"), limit=None)
