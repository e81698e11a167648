"""Shared makers for the tests of stored data."""

import numpy as np
import pytest

from wootz.data.records import Grade, Outcome, Trajectory


def _make_trajectory(update=0, task_id="a", sample_index=0, *, prompt=(1, 2, 3), completion=(4, 5),
                     fed=(), domain="d", family="f", score=0.5, text="x"):
  """A trajectory with recognisable values; `fed` are places of the completion without loss."""
  mask = np.array([False] * len(prompt) + [i not in fed for i in range(len(completion))])
  logprobs = np.where(mask, -0.01 * np.arange(1, len(mask) + 1) - sample_index, 0.0)
  if score is None:
    grade = Grade(Outcome.INFRA_LOST, None)
  else:
    grade = Grade(Outcome.SOLVED if score == 1 else Outcome.PARTIAL, score, "as made", 0.25)
  return Trajectory(
    task_id=task_id, domain=domain, family=family, update=update, weight_version=update,
    sample_index=sample_index, prompt_length=len(prompt),
    tokens=np.array([*prompt, *completion], np.int32), loss_mask=mask,
    behavior_logprobs=logprobs.astype(np.float32), temperature=0.8, finish_reason="stop",
    text=text, grade=grade)


@pytest.fixture(scope="session")
def make_trajectory():
  return _make_trajectory
