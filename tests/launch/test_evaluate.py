"""Evaluating the tiny model whose answers are known by hand: see conftest.py."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from wootz.launch import assemble, evaluate, program
from wootz.launch import config as config_lib
from wootz.models import hf, transformer
from wootz.post_training import loop
from wootz.post_training.checkpoint import Checkpointer
from wootz.post_training.evaluate import results
from wootz.post_training.learn import step


@pytest.fixture(scope="module")
def result(tiny_launch_config, tiny_model):
  return evaluate.evaluate(tiny_launch_config, program.load_weights(tiny_model))


def test_greedy_solves_and_samples_cost_what_they_must(result):
  assert [(task.split, task.greedy.outcome) for task in result.tasks] == [
    ("held_out", "solved"), ("held_out", "solved"), ("unseen_family", "solved")]
  assert all(task.greedy.tokens == 2 for task in result.tasks)  # the solution and the end
  drawn = [sample for task in result.tasks for sample in task.samples]
  # Whoever ends at once has delivered nothing.
  assert {(sample.outcome, sample.tokens) for sample in drawn} <= {("solved", 2), ("invalid", 1)}
  assert result.tokens == sum(sample.tokens for sample in drawn) + 6


def test_table_shows_splits_families_intervals_and_cost(result):
  lines = evaluate.result_lines(result, (1, 2))
  held_out = next(line for line in lines if line.startswith("Held-out tasks"))
  # Wilson's 95 % interval of 2 of 2: from 1 / (1 + 1.96^2 / 2) = 0.342
  assert "100.0 (34.2 to 100.0)" in held_out
  assert any(line.startswith("Unseen families") for line in lines)
  assert {task.family for task in result.tasks} <= {line.split()[0] for line in lines if line.strip()}
  assert "pass@2" in lines[0] and lines[-1].startswith(f"{result.tokens} tokens sampled in ")


def worse(result):
  """The same evaluation with every greedy answer wrong."""
  tasks = tuple(dataclasses.replace(task, greedy=dataclasses.replace(
    task.greedy, outcome="failed", score=0.0)) for task in result.tasks)
  return dataclasses.replace(result, tasks=tasks)


def test_compare_states_the_gain_and_the_verdict(result, capsys):
  assert evaluate.compare(worse(result), result) == 0
  printed = capsys.readouterr().out
  assert "Held-out tasks: greedy pass@1 +100.0 points" in printed and "gate: keep" in printed
  assert evaluate.compare(result, worse(result)) == evaluate.EXIT_ROLLED_BACK
  assert "-100.0 points" in (printed := capsys.readouterr().out) and "gate: roll_back" in printed


def test_another_suite_is_refused_before_sampling(result, tiny_launch_config, tmp_path):
  section = tiny_launch_config.evaluation
  fewer = dataclasses.replace(tiny_launch_config, evaluation=dataclasses.replace(section, unseen_tasks=0))
  with pytest.raises(ValueError, match="holds other tasks: .*1 such tasks.*unseen_tasks"):
    evaluate.check_comparable(result, fewer)
  longer = dataclasses.replace(tiny_launch_config,
                               evaluation=dataclasses.replace(section, max_new_tokens=9))
  with pytest.raises(ValueError, match="--config.evaluation.max_new_tokens=8"):
    evaluate.check_comparable(result, longer)
  (tmp_path / "other.json").write_text("{}")
  with pytest.raises(ValueError, match="other.json: no evaluation result"):
    evaluate.evaluate_path(tiny_launch_config, "none", output=None, other=str(tmp_path / "other.json"))


@pytest.fixture(scope="module")
def run_directory(tiny_launch_config, tiny_model, tmp_path_factory):
  """A run stopped after three updates, in which every weight became twice itself plus one."""
  directory = tmp_path_factory.mktemp("run")
  config = dataclasses.replace(tiny_launch_config, model=config_lib.ModelSection(path=tiny_model))
  (directory / "config.json").write_text(config_lib.to_json(config))
  model = assemble.load_base_model(tiny_model)
  learner, _ = assemble.make_learner(model, assemble.make_recipe(lora_rank=0), config)
  params = jax.tree.map(lambda leaf: jax.numpy.asarray(2 * leaf + 1), model.params)
  state = loop.RunState(3, step.init_state(params, learner.optimizer))
  with Checkpointer(directory / loop.CHECKPOINT_FOLDER) as checkpointer:
    checkpointer.save(3, state.train, state.host_values())
  return directory


def assert_weights(weights, params):
  expected = transformer.unstack_layers(params)
  assert jax.tree.structure(weights.params) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, weights.params, expected)


def test_a_run_is_its_newest_checkpoint_then_its_exported_model(run_directory, tiny_model):
  base = assemble.load_base_model(tiny_model)
  weights = program.load_weights(str(run_directory))
  assert weights.updates == 3 and "checkpoint of update 3" in weights.source
  assert_weights(weights, jax.tree.map(lambda leaf: 2 * leaf + 1, base.params))
  hf.save_hf(run_directory / "model", base.params, base.config, base.tokenizer)
  weights = program.load_weights(str(run_directory))
  assert weights.updates == 10 and weights.source.endswith("model")  # an export is the end of the run
  assert_weights(weights, base.params)
  assert program.load_weights(str(run_directory / "model")).updates == 0  # a folder with a config.json


def test_a_run_without_weights_is_named(run_directory, tmp_path):
  (tmp_path / "config.json").write_text((run_directory / "config.json").read_text())
  with pytest.raises(FileNotFoundError, match="neither an exported model nor a checkpoint"):
    program.load_weights(str(tmp_path))
  with pytest.raises(ValueError, match="neither a known model"):
    program.load_weights(str(tmp_path / "nothing"))


def test_program(tiny_model, tmp_path):
  """The command itself: a wrong flag is named, a right one writes the whole result."""
  output = tmp_path / "deep" / "result.json"
  command = [sys.executable, "-m", "wootz.launch.evaluate", f"--weights={tiny_model}", f"--output={output}"]
  settings = {"held_out_tasks": 1, "unseen_tasks": 0, "samples_per_task": 0, "max_new_tokens": 8}
  done = subprocess.run(
    [*command, *(f"--config.evaluation.{key}={value}" for key, value in settings.items())],
    capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "Held-out tasks" in done.stdout
  assert results.from_json(output.read_text()).tasks[0].greedy.solved
  assert len(json.loads(output.read_text())["tasks"]) == 1


def test_program_says_what_is_wrong():
  done = subprocess.run([sys.executable, "-m", "wootz.launch.evaluate", "--weights=no/such/place"],
                        capture_output=True, text=True, check=False)
  assert done.returncode == 1
  assert "wootz: model.path 'no/such/place' is neither" in done.stderr and "Traceback" not in done.stderr
