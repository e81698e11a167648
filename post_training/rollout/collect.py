"""From tasks to graded trajectories: requests to the engine, grading beside sampling, records."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wootz.data import chat
from wootz.data.records import Grade, Outcome, Task, Trajectory
from wootz.data.tokenizer import Tokenizer
from wootz.post_training.domains.base import Domain
from wootz.post_training.rollout.engine import Request, Sample
from wootz.post_training.sandbox import SandboxUnavailable

GRADING_THREADS = 4
GRADING_TRIES = 3  # a grade lost to the infrastructure is tried again, up to this many times in all

# Requests in, samples out in the order they end: `engine.generate` with the weights bound to it.
Generate = Callable[[Sequence[Request]], Iterator[Sample]]


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one kind of sample is drawn."""

  num_samples: int
  temperature: float
  max_new_tokens: int
  top_k: int = 0
  top_p: float = 1.0
  stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Wall time of a rollout. Grading runs beside sampling; its share is what was waited for after."""

  sampling: float
  grading: float


@dataclasses.dataclass(frozen=True)
class _Attempt:
  """A request and the task it is made of."""

  task: Task
  request: Request


def collect(
  generate: Generate,
  tasks: Sequence[Task],
  *,
  domain: Domain,
  tokenizer: Tokenizer,
  kinds: Callable[[Task], Sequence[Sampling]],
  seed: int,
  update: int,
  weight_version: int,
  on_grade: Callable[[Trajectory], None] = lambda trajectory: None,
) -> tuple[list[Trajectory], Seconds]:
  """Samples every task and grades every sample.

  Args:
    generate: the engine with its weights.
    tasks: distinct tasks of `domain`.
    kinds: what is drawn of a task; sample indexes count through the kinds in order.
    seed: of the run; with update, task id and sample index it fixes each sample.
    update: the update that the samples are drawn for (any label, for an evaluation).
    weight_version: optimizer updates that the weights had received.
    on_grade: called with each trajectory as it is graded; what it raises ends the rollout.

  Returns:
    Trajectories in the order of tasks and sample indexes, and the time spent.
  """
  attempts = _attempts(tasks, tokenizer, kinds, seed, update)
  started = time.monotonic()
  pool = concurrent.futures.ThreadPoolExecutor(GRADING_THREADS)
  try:
    pending = {}
    for sample in generate([attempt.request for attempt in attempts.values()]):
      text = completion_text(tokenizer, sample)
      task = attempts[sample.request_id].task
      pending[pool.submit(grade_with_retries, domain, task, text)] = sample, text
    sampled = time.monotonic()
    graded = []
    for future in concurrent.futures.as_completed(pending):
      sample, text = pending[future]
      graded.append(_trajectory(attempts[sample.request_id], sample, text, future.result(),
                                update=update, weight_version=weight_version))
      on_grade(graded[-1])
  finally:
    # Whatever ends the rollout early must not wait for every grade that is still queued.
    pool.shutdown(wait=True, cancel_futures=True)
  place = {task.id: index for index, task in enumerate(tasks)}
  graded.sort(key=lambda trajectory: (place[trajectory.task_id], trajectory.sample_index))
  return graded, Seconds(sampled - started, time.monotonic() - sampled)


def _task_seed(seed: int, update: int, task: Task) -> int:
  text = f"{seed}/{update}/{task.domain}/{task.id}"
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _attempts(tasks, tokenizer, kinds, seed, update) -> dict[str, _Attempt]:
  """One request per task and kind. The kinds of a task share its seed but not their sample indexes."""
  attempts = {}
  for task in tasks:
    prompt = np.asarray(chat.render_chat(tokenizer, task.messages), np.int32)
    first = 0
    for number, kind in enumerate(kinds(task)):
      request = Request(
        id=f"{task.id}#{number}", prompt=prompt, num_samples=kind.num_samples,
        first_sample=first, seed=_task_seed(seed, update, task), max_new_tokens=kind.max_new_tokens,
        temperature=kind.temperature, top_k=kind.top_k, top_p=kind.top_p,
        stop_ids=tokenizer.end_ids, stop_strings=kind.stop_strings)
      attempts[request.id] = _Attempt(task, request)
      first += kind.num_samples
  return attempts


def completion_text(tokenizer: Tokenizer, sample: Sample) -> str:
  """What a grader reads: no control tokens, and nothing from a stop string on."""
  text = tokenizer.decode(sample.tokens, skip_control=True)
  return text if sample.stop_string is None else text.partition(sample.stop_string)[0]


def grade_with_retries(domain: Domain, task: Task, text: str, tries: int = GRADING_TRIES) -> Grade:
  """The domain's grade. A grader that breaks is never a zero; a lost one is tried again."""
  for attempt in range(tries):
    try:
      grade = domain.grade(task, text)
    except SandboxUnavailable:
      raise  # nothing can be graded here: the run ends, naming the remedy
    except Exception as error:  # whatever a grader raises, the sample has no score
      return Grade(Outcome.UNSCORABLE, None, f"grader raised {type(error).__name__}: {error}")
    if grade.outcome != Outcome.INFRA_LOST or attempt == tries - 1:
      break
  return grade


def _trajectory(attempt: _Attempt, sample: Sample, text: str, grade: Grade, *, update: int,
                weight_version: int) -> Trajectory:
  task, prompt = attempt.task, attempt.request.prompt
  sampled = np.arange(len(prompt) + len(sample.tokens)) >= len(prompt)
  return Trajectory(
    task_id=task.id, domain=task.domain, family=task.family, update=update,
    weight_version=weight_version, sample_index=sample.sample_index, prompt_length=len(prompt),
    tokens=np.concatenate([prompt, sample.tokens]).astype(np.int32), loss_mask=sampled,
    behavior_logprobs=np.concatenate([np.zeros(len(prompt)), sample.logprobs]).astype(np.float32),
    temperature=attempt.request.temperature, finish_reason=sample.finish_reason, text=text,
    grade=grade)
