"""The main program, whole: refusals, signals, kills and resumption, in real processes on a tiny model."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from wootz.data.store import TrajectoryStore
from wootz.launch import assemble, config_flags
from wootz.post_training import loop
from wootz.post_training.checkpoint import Checkpointer
from wootz.post_training.evaluate import report, results
from wootz.post_training.learn import step
from wootz.post_training.metrics import read_metrics

# One training task of the two is solved by the tiny model in three of four samples: groups have spread.
TINY = {
  "rollout.tasks_per_update": "2", "rollout.samples_per_task": "8", "rollout.max_new_tokens": "8",
  "rollout.slots": "16", "learner.row_length": "256", "learner.remat": "none",
  "learner.learning_rate": "1e-3", "evaluation.held_out_tasks": "2", "evaluation.unseen_tasks": "1",
  "evaluation.samples_per_task": "2", "evaluation.sampled_tasks": "3", "evaluation.pass_at": "1,2",
  "evaluation.max_new_tokens": "8", "checkpoint.every_updates": "1", "run.updates": "4",
}
REAL = {
  "rollout.tasks_per_update": "2", "rollout.samples_per_task": "4", "rollout.max_new_tokens": "24",
  "rollout.slots": "8", "learner.row_length": "160", "evaluation.held_out_tasks": "2",
  "evaluation.unseen_tasks": "1", "evaluation.samples_per_task": "0", "evaluation.max_new_tokens": "24",
  "checkpoint.every_updates": "1", "run.updates": "2",
}


def command(directory, settings, *more):
  flags = [f"--config.{key}={value}" for key, value in settings.items()]
  return [sys.executable, "-m", "wootz.launch.train", "--config=quickstart",
          f"--config.run.directory={directory}", *flags, *more]


ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def tiny(tiny_model):
  return TINY | {"model.path": tiny_model}


def run(directory, settings, *more, timeout=400):
  return subprocess.run(command(directory, settings, *more), env=ENVIRONMENT, capture_output=True,
                        text=True, timeout=timeout)


def start(directory, settings, *more):
  return subprocess.Popen(command(directory, settings, *more), env=ENVIRONMENT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process, seconds=300):
  """Polls until the condition holds; fails when the process ends before."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert process.poll() is None, process.stdout.read()
    assert time.monotonic() < deadline
    time.sleep(0.02)


def kill_and_resume(directory, settings, condition, straight):
  """Starts a run, kills it with -9 once the condition holds, and resumes it to the same end as `straight`."""
  process = start(directory, settings)
  wait_for(condition, process)
  process.kill()
  process.communicate()
  resumed = run(directory, settings, "--resume")
  assert resumed.returncode == straight[1].returncode, resumed.stdout + resumed.stderr


def fingerprint(directory, settings):
  """Digest of everything the newest checkpoint holds."""
  overrides = {**settings, "run.directory": str(directory)}
  config = config_flags.parse_overrides(config_flags.load_config("quickstart"), overrides)
  model = assemble.load_base_model(config.model.path)
  learner, _ = assemble.make_learner(model, assemble.make_recipe(lora_rank=config.model.lora_rank), config)
  trained, _ = assemble.initial_weights(model, config.model, seed=config.run.seed)
  abstract = jax.eval_shape(lambda params: step.init_state(params, learner.optimizer), trained)
  with Checkpointer(Path(directory) / loop.CHECKPOINT_FOLDER) as checkpointer:
    number, tree, host = checkpointer.restore_latest(abstract)
  digest = hashlib.sha256(json.dumps(host, sort_keys=True).encode())
  for leaf in jax.tree.leaves(tree):
    digest.update(np.asarray(leaf).tobytes())
  return number, digest.hexdigest()


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
  """A run that nothing disturbs."""
  directory = tmp_path_factory.mktemp("straight") / "run"
  done = run(directory, tiny)
  assert done.returncode in (0, 3), done.stdout + done.stderr
  return directory, done


@pytest.mark.slow
def test_a_run_leaves_all_it_promises(straight, tiny):
  directory, done = straight
  for name in (report.CONFIG_FILE, report.VERSIONS_FILE, report.BEFORE_FILE, report.AFTER_FILE,
               report.REPORT_FILE, "tensorboard", loop.STORE_FOLDER):
    assert (directory / name).exists(), name
  assert (directory / "model").exists() == (done.returncode == 0)
  rows = read_metrics(directory)
  assert [row["update"] for row in rows] == [1, 2, 3, 4]
  assert any(row["scalars"]["optimizer_updates"] for row in rows), "no update learned anything"
  store = TrajectoryStore(directory / loop.STORE_FOLDER)
  assert len(store) == 4 * 2 * 8
  # Sampler and learner are one function on the same weights.
  gaps = [row["scalars"]["logprob_gap"] for row in rows if "logprob_gap" in row["scalars"]]
  assert gaps and max(gaps) < 1e-4
  before = results.from_json((directory / report.BEFORE_FILE).read_text())
  assert len(before.tasks) == 3 and all(len(task.samples) == 2 for task in before.tasks)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(straight, tiny, tmp_path):
  done = run(tmp_path / "again", tiny)
  assert done.returncode == straight[1].returncode
  assert fingerprint(tmp_path / "again", tiny) == fingerprint(straight[0], tiny)


@pytest.mark.slow
def test_a_used_directory_and_other_settings_are_refused(straight, tiny):
  """LA-3: a fresh run never continues in, or on, another run's files."""
  fresh = run(straight[0], tiny)
  assert fresh.returncode == 1 and "--resume" in fresh.stderr
  other = run(straight[0], tiny | {"learner.learning_rate": "2e-3"}, "--resume")
  assert other.returncode == 1 and "learner.learning_rate: 0.001 -> 0.002" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["first checkpoint", "in a rollout", "in a save"])
def test_killed_and_resumed_ends_with_the_same_bits(moment, straight, tiny, tmp_path):
  """CK-4, CK-6: kill -9 at different moments; the resumed run equals the one that was never killed."""
  directory = tmp_path / "run"
  checkpoints = directory / loop.CHECKPOINT_FOLDER
  conditions = {
    "first checkpoint": lambda: (checkpoints / "step_00000001").exists(),
    "in a rollout": lambda: (directory / report.BEFORE_FILE).exists(),
    "in a save": lambda: list(checkpoints.glob("step_00000002.*tmp*")) or
                         (checkpoints / "step_00000002").exists(),
  }
  kill_and_resume(directory, tiny, conditions[moment], straight)
  assert fingerprint(directory, tiny) == fingerprint(straight[0], tiny)
  # Each task was trained on exactly once, and each update is reported once.
  assert [row["update"] for row in read_metrics(directory)] == [1, 2, 3, 4]
  keys = [(t.update, t.task_id, t.sample_index) for t in TrajectoryStore(directory / loop.STORE_FOLDER)]
  assert len(keys) == len(set(keys)) == 4 * 2 * 8


@pytest.mark.slow
def test_several_updates_lost_between_checkpoints_are_done_again(straight, tiny, tmp_path):
  """Killed two updates behind the newest checkpoint."""
  directory, settings = tmp_path / "run", tiny | {"checkpoint.every_updates": "4"}
  kill_and_resume(directory, settings, lambda: len(read_metrics(directory)) >= 2, straight)
  assert fingerprint(directory, tiny) == fingerprint(straight[0], tiny)
  assert [row["update"] for row in read_metrics(directory)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_stopped_twice_in_one_update_keeps_its_checkpoint(straight, tiny, tmp_path):
  """A resumed run that is stopped at once saves nothing anew: the good copy is never set aside."""
  directory = tmp_path / "run"
  checkpoints = directory / loop.CHECKPOINT_FOLDER
  process = start(directory, tiny)
  wait_for((checkpoints / "step_00000001").exists, process)
  process.send_signal(signal.SIGTERM)
  assert process.wait(300) == 75
  started = (directory / report.VERSIONS_FILE).stat().st_mtime_ns
  again = start(directory, tiny, "--resume")
  wait_for(lambda: (directory / report.VERSIONS_FILE).stat().st_mtime_ns > started, again)
  again.send_signal(signal.SIGTERM)
  assert again.wait(300) == 75
  assert not list(checkpoints.glob("*superseded*"))
  resumed = run(directory, tiny, "--resume")
  assert resumed.returncode == straight[1].returncode, resumed.stdout + resumed.stderr
  assert fingerprint(directory, tiny) == fingerprint(straight[0], tiny)


@pytest.mark.slow
def test_a_finished_run_may_be_resumed(straight, tiny):
  done = run(straight[0], tiny, "--resume")
  assert done.returncode == straight[1].returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("settings, named", [
  ({"learner.row_length": "40"}, "learner.row_length"),
  ({"model.path": "nowhere.gguf"}, "nowhere.gguf"),
  ({"evaluation.held_out_tasks": "100000"}, "held_out"),
])
def test_what_cannot_run_is_refused_before_anything_is_written(settings, named, tiny, tmp_path):
  done = run(tmp_path / "run", tiny | settings)
  assert done.returncode == 1 and named in done.stderr, done.stdout + done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_without_a_sandbox_nothing_runs(tiny, tmp_path):
  """Never unprotected, never graded 0 or left unscored in silence: refused, with the remedy."""
  environment = ENVIRONMENT | {"PATH": str(tmp_path)}
  done = subprocess.run(command(tmp_path / "run", tiny), env=environment, capture_output=True, text=True,
                        timeout=300)
  assert done.returncode == 1 and "bubblewrap" in done.stderr, done.stdout + done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["evaluation", "training"])
def test_sigterm_saves_and_exits_with_75(moment, straight, tiny, tmp_path):
  """LA-2: also in an evaluation, and twice in a row."""
  directory = tmp_path / "run"
  process = start(directory, tiny)
  waited = {"evaluation": directory / report.CONFIG_FILE, "training": directory / report.BEFORE_FILE}
  wait_for(waited[moment].exists, process)
  if moment == "evaluation":
    wait_for((directory / "metrics.jsonl").exists, process)  # the loop has begun
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 75, output
  assert "--resume" in output
  assert sorted((directory / loop.CHECKPOINT_FOLDER).glob("step_*"))
  resumed = run(directory, tiny, "--resume")
  assert resumed.returncode == straight[1].returncode, resumed.stdout + resumed.stderr
  assert fingerprint(directory, tiny) == fingerprint(straight[0], tiny)


@pytest.mark.slow
def test_several_minibatches_with_a_reference(tiny, tmp_path):
  """The other paths of the learner in the whole program: KL, old logprobs of before, several steps."""
  settings = tiny | {"learner.kl_coefficient": "0.01", "learner.minibatches": "2", "learner.epochs": "2"}
  done = run(tmp_path / "run", settings)
  assert done.returncode in (0, 3), done.stdout + done.stderr
  learned = [row["scalars"] for row in read_metrics(tmp_path / "run") if row["scalars"]["optimizer_updates"]]
  # The reference is the base model, not the policy of the moment: the distance grows from 0.
  assert learned and learned[-1]["kl"] > 1e-6
  assert any(abs(scalars["ratio"] - 1) > 1e-6 for scalars in learned)


@pytest.mark.slow
def test_adapters_and_the_learnable_curriculum(tiny, tmp_path):
  settings = tiny | {"model.lora_rank": "2", "rollout.curriculum": "learnable", "run.updates": "2"}
  done = run(tmp_path / "run", settings)
  assert done.returncode in (0, 3), done.stdout + done.stderr
  assert [row["update"] for row in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.long
def test_the_real_job_killed_and_resumed_ends_with_the_same_bits(tmp_path):
  straight, killed = tmp_path / "straight", tmp_path / "killed"
  assert run(straight, REAL, timeout=1800).returncode in (0, 3)
  process = start(killed, REAL)
  wait_for((killed / loop.CHECKPOINT_FOLDER / "step_00000001").exists, process, seconds=900)
  process.kill()
  process.communicate()
  assert run(killed, REAL, "--resume", timeout=1800).returncode in (0, 3)
  assert fingerprint(killed, REAL) == fingerprint(straight, REAL)


@pytest.mark.slow
def test_two_updates_of_the_real_job_killed_between_them(tmp_path):
  """The real model, sandbox, store, learner and checkpoint; kill -9 after the first update, then resume."""
  directory = tmp_path / "run"
  process = start(directory, REAL)
  wait_for((directory / loop.CHECKPOINT_FOLDER / "step_00000001").exists, process, seconds=900)
  process.kill()
  process.communicate()
  done = run(directory, REAL, "--resume", timeout=900)
  assert done.returncode in (0, 3), done.stdout + done.stderr
  rows = read_metrics(directory)
  assert [row["update"] for row in rows] == [1, 2]
  assert all(row["scalars"]["infra_lost_share"] == 0 for row in rows)
  assert (directory / report.REPORT_FILE).stat().st_size > 10_000
