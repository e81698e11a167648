"""The records that cross stage borders on the host: tasks, grades, trajectories."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np


class Outcome(enum.StrEnum):
  """How a graded attempt ended. `has_score` says whether it may reach a baseline or a loss."""

  SOLVED = "solved"
  PARTIAL = "partial"
  FAILED = "failed"
  INVALID = "invalid"  # nothing gradable was delivered, for example no code
  TIMED_OUT = "timed_out"
  LIMIT_EXCEEDED = "limit_exceeded"
  TAMPERED = "tampered"  # scores 0 and is alerted
  INFRA_LOST = "infra_lost"  # nobody's score: retried, then left out
  UNSCORABLE = "unscorable"  # the grader itself broke: left out

  @property
  def has_score(self) -> bool:
    return self not in (Outcome.INFRA_LOST, Outcome.UNSCORABLE)


@dataclasses.dataclass(frozen=True)
class Grade:
  """A grader's typed verdict on one attempt."""

  outcome: Outcome
  score: float | None  # in [0, 1]; None exactly when the outcome has no score
  reason: str = ""  # one line for a person, never shown to the policy
  seconds: float = 0.0  # wall time the grading took

  def __post_init__(self) -> None:
    if self.outcome.has_score != (self.score is not None):
      raise ValueError(f"outcome {self.outcome.value!r} with score {self.score!r}: a score belongs "
                       "to every outcome except infra_lost and unscorable")
    if self.score is not None and not 0.0 <= self.score <= 1.0:
      raise ValueError(f"score {self.score!r} lies outside [0, 1]")


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem of a domain. `messages` is what the policy sees; `payload` is the grader's alone."""

  id: str  # unique within its domain and equal in every run, for example "clamp/0173"
  domain: str
  family: str
  split: str  # "train", "held_out" (seen families) or "unseen_family"
  messages: tuple[Mapping[str, str], ...]  # chat messages: role and content
  payload: Mapping[str, Any]  # plain JSON values


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """Everything the policy was fed and sampled on one attempt, in ids, and its grade.

  T counts the tokens of prompt and completion together. Ids are stored as they were sampled and fed;
  nothing is decoded and encoded again.
  """

  task_id: str
  domain: str
  family: str
  update: int  # the learner update this sample was drawn for
  weight_version: int  # number of optimizer updates the sampling weights had received
  sample_index: int  # place in its group, 0-based
  prompt_length: int  # the first `prompt_length` ids were fed before sampling began
  tokens: np.ndarray  # int32 [T]
  loss_mask: np.ndarray  # bool [T], True where the policy sampled the token
  behavior_logprobs: np.ndarray  # float32 [T], nats, of the distribution sampled from; 0 where fed
  temperature: float
  finish_reason: str  # "stop" (end token or stop string) or "length" (cut by the limit)
  text: str  # the completion as text, for people; never encoded again
  grade: Grade

  @property
  def group(self) -> str:
    """Samples with the same group compete with each other in group-relative methods."""
    return f"{self.update}/{self.domain}/{self.task_id}"
