"""Post-trains a model on graded tasks: sample, grade, learn, evaluate before and after.

  python -m wootz.launch.train --config=quickstart --config.run.directory=runs/mine

Exit status: 0 done and the gate keeps the weights; 1 wrong configuration or a failure, named; 3 done, but
the evaluation cannot rule out a loss, and the weights are not exported; 75 stopped by SIGTERM or SIGINT
with everything saved (run the same command with --resume).
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sys

import jax
from absl import flags

from wootz.data.store import TrajectoryStore, TrajectoryWriter
from wootz.launch import assemble, config_flags, program
from wootz.launch import config as configs
from wootz.launch.config import Config, ConfigError
from wootz.models import hf
from wootz.models.params import Tree
from wootz.post_training import loop
from wootz.post_training.checkpoint import Checkpointer
from wootz.post_training.evaluate import environment, report, results
from wootz.post_training.evaluate.gate import Action, Decision, gate
from wootz.post_training.learn import step
from wootz.post_training.learn.learner import Learner
from wootz.post_training.metrics import MetricsWriter
from wootz.post_training.preemption import EXIT_PREEMPTED, Preempted, StopSignal
from wootz.post_training.progress import Progress

EXIT_ROLLED_BACK = 3


def main() -> None:
  config = config_flags.ConfigFlag(default="quickstart")
  resume = flags.DEFINE_bool(
    "resume", False, "Continue the run in the config's directory; the same as --config.run.resume. An empty "
    "directory starts a fresh run.")
  program.run(lambda: train(config.value, resume=resume.value or config.value.run.resume), config.parse)


def train(config: Config, *, resume: bool) -> int:
  """Runs a configuration to its end; returns the exit status."""
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(StopSignal())
    directory, used = check_directory(config, resume=resume)
    domain, pool = assemble.make_task_pool(config)
    domain.check()
    model = assemble.load_base_model(config.model.path)
    assemble.check_lengths(config, model, pool.tasks)
    recipe = assemble.make_recipe(lora_rank=config.model.lora_rank)
    learner, schedule = assemble.make_learner(model, recipe, config)
    plan = assemble.make_plan(config, domain, schedule)
    claim_directory(directory, config)  # nothing is written before all of this has passed
    writer = stack.enter_context(TrajectoryWriter(directory / loop.STORE_FOLDER, resume=used))
    store = TrajectoryStore(directory / loop.STORE_FOLDER)
    checkpointer = stack.enter_context(
      Checkpointer(directory / loop.CHECKPOINT_FOLDER, keep=config.checkpoint.keep))
    policy, state = start(model, recipe, learner, config, checkpointer)
    loop.rewind_store(state, writer, store)
    metrics = stack.enter_context(
      MetricsWriter(directory, next_update=state.update + 1 if used else None))
    progress = stack.enter_context(
      Progress(config.run.updates, title=f"wootz {directory.name}", first_update=state.update))
    # What was restored is on disk: saving it again would first set the good copy aside.
    saved = state.update if state.update in checkpointer.steps() else None
    out = loop.Outputs(writer, store, checkpointer, metrics, progress, stop, saved)
    try:
      state = loop.run(plan, policy, domain, pool, learner, state, out)
    except Preempted as signal:
      print(f"wootz: stopped by {signal}; all is saved. Continue with --resume.", file=sys.stderr)
      return EXIT_PREEMPTED
    decision = judge(directory)
    if decision.action == Action.KEEP:
      export(directory / program.EXPORT_FOLDER, recipe.plain_params(state.train.params, policy.frozen), model)
  return finish(directory, decision)


def start(model: assemble.BaseModel, recipe: assemble.Recipe, learner: Learner, config: Config,
          checkpointer: Checkpointer) -> tuple[loop.Policy, loop.RunState]:
  """The policy, and the state of the newest intact checkpoint or, without one, of the base model."""
  trained, frozen = assemble.initial_weights(model, config.model, seed=config.run.seed)
  model.params.clear()  # the host's copy has served
  policy = assemble.make_policy(model, recipe, trained, frozen, config)
  abstract = jax.eval_shape(lambda params: step.init_state(params, learner.optimizer), trained)
  state = loop.restore(checkpointer, abstract)
  if state is None:
    state = loop.RunState(0, step.init_state(trained, learner.optimizer))
  return policy, state


def check_directory(config: Config, *, resume: bool) -> tuple[pathlib.Path, bool]:
  """The run's directory, and whether a run was there before. Writes nothing.

  Raises ConfigError for a used directory without `resume`, or with another configuration.
  """
  directory = pathlib.Path(config.run.directory).absolute()
  path = directory / report.CONFIG_FILE
  used = path.exists()
  if used and not resume:
    raise ConfigError(f"{directory} holds a run already: continue it with --resume, or choose another "
                      "--config.run.directory")
  if used:
    before = configs.from_dict(json.loads(path.read_text()))
    changed = [str(change) for change in configs.diff(before, config)
               if change.key not in configs.MAY_CHANGE_ON_RESUME]
    if changed:
      raise ConfigError(f"the run in {directory} was started with other settings: {'; '.join(changed)}. "
                        "Resume it with its own, or start another run elsewhere")
  return directory, used


def claim_directory(directory: pathlib.Path, config: Config) -> None:
  """Writes the configuration and the versions in use into the run's directory."""
  directory.mkdir(parents=True, exist_ok=True)
  _write(directory / report.VERSIONS_FILE, json.dumps(environment.versions(), indent=2))
  _write(directory / report.CONFIG_FILE, configs.to_json(config))


def export(folder: pathlib.Path, params: Tree, model: assemble.BaseModel) -> None:
  """The weights in Hugging Face's layout, whole or not at all: a kill leaves no half model there."""
  if folder.exists():
    return  # an earlier life of this run has written these very weights
  aside = folder.with_name(folder.name + ".new")
  shutil.rmtree(aside, ignore_errors=True)
  hf.save_hf(aside, jax.device_get(params), model.config, model.tokenizer)
  aside.rename(folder)


def _write(path: pathlib.Path, text: str) -> None:
  """All of the text or none: a kill leaves no half file under this name."""
  aside = path.with_suffix(".new")
  aside.write_text(text, encoding="utf-8")
  aside.rename(path)


def judge(directory: pathlib.Path) -> Decision:
  """The gate's verdict on the run's two evaluations."""
  before, after = (results.from_json((directory / name).read_text(encoding="utf-8"))
                   for name in (report.BEFORE_FILE, report.AFTER_FILE))
  return gate(before, after)


def finish(directory: pathlib.Path, decision: Decision) -> int:
  """Writes the report, says where everything is; returns the exit status."""
  page = report.write_report(directory)
  print(decision.reason)
  print(f"report: {page}")
  if decision.action == Action.KEEP:
    print(f"weights (Hugging Face layout): {directory / program.EXPORT_FOLDER}")
    return 0
  print("the evaluation cannot rule out a loss: the weights stay in the checkpoints and are not exported")
  return EXIT_ROLLED_BACK


if __name__ == "__main__":
  main()
