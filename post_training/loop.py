"""The training loop: draw tasks, sample, grade, store, learn, save; evaluation before and after."""

from __future__ import annotations

import dataclasses
import pathlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wootz.data import curriculum
from wootz.data.curriculum import CurriculumState
from wootz.data.records import Outcome, Task, Trajectory
from wootz.data.store import TrajectoryStore, TrajectoryWriter
from wootz.data.task_pool import TaskPool, TaskPoolState
from wootz.data.tokenizer import Tokenizer
from wootz.models.params import Tree
from wootz.post_training import alerts
from wootz.post_training.checkpoint import Checkpointer
from wootz.post_training.domains.base import Domain
from wootz.post_training.evaluate import report, results
from wootz.post_training.evaluate import suite as suites
from wootz.post_training.learn import learner as learning
from wootz.post_training.learn.step import TrainState
from wootz.post_training.metrics import MetricsWriter, mean_of
from wootz.post_training.preemption import Preempted, StopSignal
from wootz.post_training.progress import Progress
from wootz.post_training.rollout.collect import Sampling, Seconds, collect
from wootz.post_training.rollout.engine import Request, Sample

STORE_FOLDER = "trajectories"
CHECKPOINT_FOLDER = "checkpoints"


@dataclasses.dataclass(frozen=True)
class Policy:
  """The model as the loop needs it."""

  # (params of the state, frozen, requests) -> samples as they end
  generate: Callable[[Tree, Tree, Sequence[Request]], Iterator[Sample]]
  tokenizer: Tokenizer
  frozen: Tree  # parameters that are not trained; {} for full training
  reference: Tree  # trained part of the reference policy; None without a KL
  place: Callable[[Any], Any]  # host rows to devices


@dataclasses.dataclass(frozen=True)
class RunState:
  """All that decides the future of a run. Arrays and host values are saved together."""

  update: int  # updates done
  train: TrainState
  pool: TaskPoolState = TaskPoolState()
  curriculum: CurriculumState = CurriculumState()

  def host_values(self) -> dict[str, Any]:
    """The part that is not arrays, as plain JSON values."""
    return {"update": self.update, "pool": dataclasses.asdict(self.pool),
            "curriculum": dataclasses.asdict(self.curriculum)}


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run does, in plain values."""

  directory: pathlib.Path
  seed: int
  updates: int
  tasks_per_update: int
  sampling: Sampling
  packing: learning.Packing
  curriculum_mode: str
  suite: suites.Suite
  checkpoint_every: int
  learning_rate: Callable[[int], float]


@dataclasses.dataclass
class Outputs:
  """Where a run writes to and what it listens to."""

  writer: TrajectoryWriter
  store: TrajectoryStore
  checkpointer: Checkpointer
  metrics: MetricsWriter
  progress: Progress
  stop: StopSignal
  saved: int | None = None  # update of the newest checkpoint


def run(plan: Plan, policy: Policy, domain: Domain, pool: TaskPool, learner: learning.Learner,
        state: RunState, out: Outputs) -> RunState:
  """Runs from `state` to the last update. Raises Preempted, with all saved, when told to stop."""
  try:
    out.stop.check()
    _evaluate_once(plan, policy, domain, state, out, report.BEFORE_FILE)
    while state.update < plan.updates:
      state = _update(plan, policy, domain, pool, learner, state, out)
      if state.update % plan.checkpoint_every == 0 or state.update == plan.updates:
        _save(state, out)
      out.stop.check()
    _evaluate_once(plan, policy, domain, state, out, report.AFTER_FILE)
  except Preempted:
    _save(state, out)
    raise
  finally:
    out.checkpointer.wait()
  return state


def _update(plan, policy, domain, pool, learner, state: RunState, out: Outputs) -> RunState:
  """One round: tasks, samples, grades, store, weights. The state given is spent."""
  started = time.monotonic()
  tasks, pool_state = curriculum.draw(pool, state.pool, state.curriculum, plan.tasks_per_update,
                                      step=state.update, mode=plan.curriculum_mode)
  trajectories, seconds = _sample(plan, policy, domain, state, tasks, out)
  out.progress.phase("learning")
  sampled = time.monotonic()
  train, learned = learning.learn(
    learner, state.train, policy.frozen, policy.reference, out.store, update=state.update,
    group_size=plan.sampling.num_samples, packing=plan.packing, seed=plan.seed, place=policy.place)
  ended = time.monotonic()
  metrics = {**rollout_metrics(trajectories), **learned, "sampling_seconds": seconds.sampling,
             "grading_seconds": seconds.grading, "learning_seconds": ended - sampled,
             "seconds": ended - started, "peak_memory_gib": _peak_memory_gib(),
             # None where no step was taken, and where the samples are those of an earlier life.
             "learning_rate": float(plan.learning_rate(int(train.step) - 1)) if learned["optimizer_updates"]
                              else None,
             "tokens_per_second": sum(t.loss_mask.sum() for t in trajectories) / (ended - started)
                                  if seconds.sampling else None}
  update = state.update + 1
  # Truncated to top-k or top-p, the sampler's distribution is another than the learner's, by design.
  whole = plan.sampling.top_k == 0 and plan.sampling.top_p == 1
  found = alerts.check(metrics, **({} if whole else {"max_logprob_gap": float("inf")}))
  out.metrics.write(update, metrics, alerts.as_texts(found))
  out.progress.update(update, metrics)
  for alert in found:
    out.progress.message(str(alert))
  return RunState(update, train, pool_state, curriculum.update(state.curriculum, trajectories))


def _sample(plan, policy, domain, state: RunState, tasks: Sequence[Task],
            out: Outputs) -> tuple[list[Trajectory], Seconds]:
  """Samples and grades the update's tasks and stores the result, unless the store has it already."""
  total = len(tasks) * plan.sampling.num_samples
  stored = out.store.of_update(state.update)
  if len(stored) == total:
    return out.store.read(stored), Seconds(0.0, 0.0)
  graded = _Countdown(out, f"update {state.update + 1}: sampling and grading", total)
  trajectories, seconds = collect(
    _stoppable(policy, state, out), tasks, domain=domain, tokenizer=policy.tokenizer,
    kinds=lambda task: (plan.sampling,), seed=plan.seed, update=state.update,
    weight_version=int(state.train.step), on_grade=graded)
  out.writer.write(trajectories)
  out.writer.commit()
  out.store.refresh()
  return trajectories, seconds


def _stoppable(policy: Policy, state: RunState, out: Outputs):
  """The engine with the state's weights; looks at the stop signal between samples."""
  def generate(requests):
    for sample in policy.generate(state.train.params, policy.frozen, requests):
      out.stop.check()
      yield sample
  return generate


class _Countdown:
  """Shows each graded trajectory, and how many are still to come."""

  def __init__(self, out: Outputs, name: str, total: int) -> None:
    """`total`: trajectories to come."""
    self._out, self._name, self._total, self._done = out, name, total, 0
    out.progress.phase(name, done=0, total=total)

  def __call__(self, trajectory: Trajectory) -> None:
    self._out.stop.check()
    self._done += 1
    self._out.progress.phase(self._name, done=self._done, total=self._total)
    self._out.progress.sample(trajectory.task_id, trajectory.grade.outcome.value, trajectory.text)


def _evaluate_once(plan, policy, domain, state: RunState, out: Outputs, file_name: str) -> None:
  """Evaluates and writes the result, unless an earlier life of this run has done so."""
  path = plan.directory / file_name
  if path.exists():
    return
  if file_name == report.BEFORE_FILE and state.update:
    raise FileNotFoundError(f"{path} is gone, and these weights are no longer the base model's: bring it "
                            "back, or start another run")
  name = "evaluating the base model" if file_name == report.BEFORE_FILE else "evaluating"
  out.progress.message(f"{name}: {plan.suite.num_completions} completions of {len(plan.suite.tasks)} tasks")
  result = suites.evaluate(
    _stoppable(policy, state, out), plan.suite, domain=domain, tokenizer=policy.tokenizer,
    seed=plan.seed, update=state.update,
    on_grade=_Countdown(out, name, plan.suite.num_completions))
  aside = path.with_suffix(".new")
  aside.write_text(results.to_json(result), encoding="utf-8")
  aside.rename(path)
  out.progress.message(f"{name}: {suites.one_line(result)}")


def _save(state: RunState, out: Outputs) -> None:
  if out.saved == state.update:
    return
  out.progress.phase("saving")
  out.checkpointer.save(state.update, state.train, state.host_values())
  out.saved = state.update


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
  """What one update's samples say. Those without a score are counted, and in no mean of scores."""
  scored = [t for t in trajectories if t.grade.score is not None]
  lengths = [int(t.loss_mask.sum()) for t in trajectories]
  total = max(len(trajectories), 1)
  return {
    "reward": mean_of(t.grade.score for t in scored).value,
    "pass_rate": mean_of(t.grade.outcome == Outcome.SOLVED for t in scored).value,
    "completion_length": sum(lengths) / total,
    "truncated_share": sum(t.finish_reason == "length" for t in trajectories) / total,
    "sampled_tokens": float(sum(lengths)),
    "tampered": float(sum(t.grade.outcome == Outcome.TAMPERED for t in trajectories)),
    "infra_lost_share": 1 - len(scored) / total,
  }


def _peak_memory_gib() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def restore(checkpointer: Checkpointer, abstract_train: TrainState) -> RunState | None:
  """The state of the newest intact checkpoint; None when there is none."""
  found = checkpointer.restore_latest(abstract_train)
  if found is None:
    return None
  _, train, host = found
  return RunState(host["update"], train, TaskPoolState.from_json(host["pool"]),
                  CurriculumState.from_json(host["curriculum"]))


def rewind_store(state: RunState, writer: TrajectoryWriter, store: TrajectoryStore) -> None:
  """Sets aside what the store holds of later updates than the one that comes next.

  What it holds of that one stays: those samples were drawn from these very weights.
  """
  writer.rewind(update=state.update + 1)
  store.refresh()
