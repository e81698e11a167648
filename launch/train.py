"""Post-trains a model on graded tasks: sample, grade, learn, evaluate before and after.

  python -m wootz.launch.train --config=quickstart --config.run.directory=runs/mine

Exit status: 0 done and the gate keeps the weights; 1 wrong configuration or a failure, named; 3 done, but
the evaluation does not show a gain, and the weights are not exported; 75 stopped by SIGTERM or SIGINT
with everything saved (run the same command with --resume).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys

import jax
from absl import app, flags, logging

from wootz.data.store import TrajectoryStore, TrajectoryWriter
from wootz.launch import assemble, config_flags
from wootz.launch import config as configs
from wootz.launch.config import Config, ConfigError
from wootz.models import hf
from wootz.post_training import loop
from wootz.post_training.checkpoint import Checkpointer
from wootz.post_training.evaluate import environment, report, results
from wootz.post_training.evaluate.gate import Action, Decision, gate
from wootz.post_training.learn import step
from wootz.post_training.learn.learner import Learner
from wootz.post_training.metrics import MetricsWriter
from wootz.post_training.preemption import EXIT_PREEMPTED, Preempted, StopSignal
from wootz.post_training.progress import Progress

EXIT_FAILED = 1
EXIT_ROLLED_BACK = 3
EXPORT_FOLDER = "model"
COMPILATION_CACHE = pathlib.Path(os.environ.get("WOOTZ_CACHE", "~/.cache/wootz")).expanduser() / "xla"

_CONFIG = config_flags.ConfigFlag(default="quickstart")
_RESUME = flags.DEFINE_bool(
  "resume", False, "Continue the run in the config's directory; the same as --config.run.resume. An "
  "empty directory starts a fresh run.")


def main(_: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)
  jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  try:
    sys.exit(train(_CONFIG.value, resume=_RESUME.value or _CONFIG.value.run.resume))
  except (ConfigError, FileExistsError) as error:
    print(f"wootz: {error}", file=sys.stderr)
    sys.exit(EXIT_FAILED)


def train(config: Config, *, resume: bool) -> int:
  """Runs a configuration to its end; returns the exit status."""
  directory, used = claim_directory(config, resume=resume)
  model = assemble.load_base_model(config.model.path)
  domain, pool = assemble.make_task_pool(config)
  recipe = assemble.make_recipe(lora_rank=config.model.lora_rank)
  learner, schedule = assemble.make_learner(model, recipe, config)
  plan = assemble.make_plan(config, domain, schedule)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(StopSignal())
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
    out = loop.Outputs(writer, store, checkpointer, metrics, progress, stop)
    try:
      state = loop.run(plan, policy, domain, pool, learner, state, out)
    except Preempted as signal:
      print(f"wootz: stopped by {signal}; all is saved. Continue with --resume.", file=sys.stderr)
      return EXIT_PREEMPTED
    decision = judge(directory)
    if decision.action == Action.KEEP:
      params = recipe.plain_params(state.train.params, policy.frozen)
      hf.save_hf(directory / EXPORT_FOLDER, jax.device_get(params), model.config, model.tokenizer)
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


def claim_directory(config: Config, *, resume: bool) -> tuple[pathlib.Path, bool]:
  """The run's directory with its configuration in it, and whether a run was there before.

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
  directory.mkdir(parents=True, exist_ok=True)
  _write(directory / report.VERSIONS_FILE, json.dumps(environment.versions(), indent=2))
  _write(path, configs.to_json(config))
  return directory, used


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
    print(f"weights (Hugging Face layout): {directory / EXPORT_FOLDER}")
    return 0
  print("the evaluation does not show a gain: the weights stay in the checkpoints and are not exported")
  return EXIT_ROLLED_BACK


if __name__ == "__main__":
  app.run(main, flags_parser=_CONFIG.parse)
