"""Reading configurations: nothing is ignored, and what is wrong is said with key and remedy."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from wootz.launch import config as config_lib
from wootz.launch import config_flags
from wootz.launch.config import Config, ConfigError, LearnerSection, RolloutSection, RunSection


def test_overrides_take_the_types_of_the_annotations():
  config = config_flags.parse_overrides(Config(), {
    "learner.learning_rate": "3e-4", "learner.epochs": "2", "run.resume": "True",
    "model.lora_targets": "gate, up", "evaluation.pass_at": "1,2,4", "learner.schedule": "cosine",
    "run.directory": "here=there", "learner.max_grad_norm": "2"})
  assert config.learner.learning_rate == 3e-4
  assert config.learner.epochs == 2
  assert config.run.resume is True
  assert config.model.lora_targets == ("gate", "up")
  assert config.evaluation.pass_at == (1, 2, 4)
  assert config.learner.schedule == "cosine"
  assert config.run.directory == "here=there"
  assert type(config.learner.max_grad_norm) is float
  assert config.rollout == Config().rollout


@pytest.mark.parametrize("key, nearest", [
  ("learner.lerning_rate", "learner.learning_rate"),
  ("learning_rate", "learner.learning_rate"),
  ("rollout.learning_rate", "learner.learning_rate"),
  ("rollout.sample_per_task", "rollout.samples_per_task"),
  ("checkpoints.keep", "checkpoint.keep"),
])
def test_unknown_key_fails_naming_the_nearest(key, nearest):
  with pytest.raises(ConfigError, match=rf"--config\.{key}.*--config\.{nearest}\?"):
    config_flags.parse_overrides(Config(), {key: "1"})


def test_a_section_is_no_key():
  with pytest.raises(ConfigError, match="learner is a section.*--config.learner.learning_rate"):
    config_flags.parse_overrides(Config(), {"learner": "1"})


@pytest.mark.parametrize("key, text, expected", [
  ("learner.epochs", "1.5", "int"), ("learner.epochs", "", "int"),
  ("learner.learning_rate", "fast", "float"), ("learner.learning_rate", "nan", "float"),
  ("run.resume", "maybe", "true or false"), ("evaluation.pass_at", "1,two", "int"),
  ("learner.schedule", "cos", "'constant' | 'linear' | 'cosine'"),
])
def test_mistyped_value_fails_naming_key_type_and_value(key, text, expected):
  with pytest.raises(ConfigError) as caught:
    config_flags.parse_overrides(Config(), {key: text})
  message = str(caught.value)
  assert f"--config.{key}" in message
  assert expected in message
  assert repr(text.split(",")[-1]) in message


def test_config_files_are_held_to_the_types_too():
  with pytest.raises(ConfigError, match="learner.learning_rate: expected float, got '1e-5'"):
    LearnerSection(learning_rate="1e-5")
  with pytest.raises(ConfigError, match="run.updates: expected int, got True"):
    RunSection(updates=True)


@pytest.mark.parametrize("baseline, scale", [("mean", "none"), ("leave_one_out", "none"),
                                             ("none", "std")])
def test_ad_3_group_of_one_is_refused_naming_the_setting(baseline, scale):
  """AD-3: with a group baseline, a group of one would give advantage 0 (or NaN) for ever."""
  learner = LearnerSection(baseline=baseline, advantage_scale=scale)
  with pytest.raises(ConfigError, match=r"rollout\.samples_per_task is 1 with learner\."):
    Config(rollout=RolloutSection(samples_per_task=1), learner=learner)
  with pytest.raises(ConfigError, match=r"rollout\.samples_per_task is 1"):
    config_flags.parse_overrides(Config(learner=learner), {"rollout.samples_per_task": "1"})


def test_ad_3_group_of_one_without_group_statistics_is_allowed():
  """AD-3, other side: overrides are applied together, so the order of keys does not matter."""
  config = config_flags.parse_overrides(Config(), {
    "rollout.samples_per_task": "1", "learner.advantage_scale": "none", "learner.baseline": "none"})
  assert config.rollout.samples_per_task == 1


@pytest.mark.parametrize("overrides, message", [
  ({"rollout.temperature": "0"}, "rollout.temperature is 0.0: must be above 0"),
  ({"rollout.top_p": "1.5"}, r"rollout.top_p is 1.5: must be in \(0, 1\]"),
  ({"rollout.slots": "0"}, "rollout.slots is 0: must be at least 1"),
  ({"learner.learning_rate": "-1"}, "learner.learning_rate is -1.0: must be above 0"),
  ({"learner.warmup_updates": "99"}, "learner.warmup_updates is 99 but run.updates is 10"),
  ({"learner.row_length": "50"}, "learner.row_length is 50 tokens.*rollout.max_new_tokens"),
  ({"learner.minibatches": "9"}, "learner.minibatches is 9 but rollout.tasks_per_update is 8"),
  ({"evaluation.pass_at": "8"}, "evaluation.pass_at is .*samples_per_task = 4"),
  ({"model.lora_rank": "4", "model.lora_targets": ""}, "model.lora_targets"),
  ({"run.seed": "4294967296"}, "run.seed"),
])
def test_values_out_of_range_are_refused_by_name(overrides, message):
  with pytest.raises(ConfigError, match=message):
    config_flags.parse_overrides(Config(), overrides)


def test_split_overrides_reads_both_spellings_and_leaves_the_rest():
  overrides, rest = config_flags.split_overrides([
    "prog", "--config=quickstart", "--config.run.seed=3", "-config.learner.epochs", "2",
    "--config.run.resume", "--verbosity=1", "--", "--config.run.seed=9"])
  assert overrides == {"run.seed": "3", "learner.epochs": "2", "run.resume": None}
  assert rest == ["prog", "--config=quickstart", "--verbosity=1", "--", "--config.run.seed=9"]
  config = config_flags.parse_overrides(Config(), overrides)
  assert (config.run.resume, config.run.seed, config.learner.epochs) == (True, 3, 2)


def test_a_key_without_value_suits_only_a_bool():
  with pytest.raises(ConfigError, match="run.directory: expected str, got nothing"):
    config_flags.parse_overrides(Config(), {"run.directory": None})


def test_a_key_given_twice_is_refused():
  with pytest.raises(ConfigError, match="run.seed is given twice: '1' and '2'"):
    config_flags.split_overrides(["prog", "--config.run.seed=1", "--config.run.seed=2"])


def test_a_config_is_found_by_name_package_path_and_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  by_name = config_flags.load_config("quickstart")
  assert config_flags.load_config("launch/configs/quickstart.py") == by_name
  own = tmp_path / "mine.py"
  own.write_text("import dataclasses\nfrom wootz.launch.config import Config, RunSection\n"
                 "def get_config():\n  return Config(run=RunSection(seed=77))\n")
  assert config_flags.load_config("mine.py").run.seed == 77
  assert config_flags.load_config(str(own)).run.seed == 77


@pytest.mark.parametrize("body, message", [
  ("x = 1\n", r"has no function get_config\(\)"),
  ("def get_config():\n  return {'a': 1}\n", "returned dict, not"),
])
def test_files_that_are_no_config_are_named(tmp_path, body, message):
  path = tmp_path / "broken.py"
  path.write_text(body)
  with pytest.raises(ConfigError, match=message) as caught:
    config_flags.load_config(str(path))
  assert "broken.py" in str(caught.value)


def test_missing_file_names_the_shipped_ones():
  with pytest.raises(ConfigError, match="no config file 'quick'.*quickstart"):
    config_flags.load_config("quick")


def test_every_shipped_config_can_be_built():
  folder = pathlib.Path(config_flags.configs.__file__).parent
  names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
  assert "quickstart" in names
  for name in names:
    assert isinstance(config_flags.load_config(name), Config)


def test_json_round_trip_and_frozen():
  config = config_flags.load_config("quickstart")
  assert config_lib.from_dict(json.loads(config_lib.to_json(config))) == config
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.run.seed = 1
  with pytest.raises(ConfigError, match="unknown key run.sead"):
    config_lib.from_dict({"run": {"sead": 1}})
  with pytest.raises(ConfigError, match="unknown section rum"):
    config_lib.from_dict({"rum": {}})


def test_diff_lists_exactly_the_changed_keys():
  changed = config_flags.parse_overrides(Config(), {"learner.epochs": "2", "run.seed": "5"})
  assert config_lib.diff(Config(), Config()) == ()
  assert config_lib.diff(Config(), changed) == (
    config_lib.Change("learner.epochs", 1, 2), config_lib.Change("run.seed", 0, 5))


def test_digest_ignores_what_a_resumed_run_may_change():
  base = config_lib.digest(Config())
  moved = {"run.directory": "elsewhere", "run.resume": "true", "checkpoint.keep": "7"}
  assert config_lib.digest(config_flags.parse_overrides(Config(), moved)) == base
  for key, value in {"learner.learning_rate": "2e-5", "run.seed": "1"}.items():
    assert config_lib.digest(config_flags.parse_overrides(Config(), {key: value})) != base
  assert config_lib.MAY_CHANGE_ON_RESUME <= {key for key, _, _ in config_lib.leaves(Config())}


def test_every_key_is_described():
  lines = config_flags.describe_keys(Config()).splitlines()
  keys = [key for key, _, _ in config_lib.leaves(Config())]
  assert len(lines) == len(keys)
  for key, line in zip(keys, lines, strict=True):
    assert line.startswith(f"--config.{key}=")
    assert line.rpartition(") ")[2].strip(), f"{key} has no comment that says what it is"


_PROGRAM = """
from absl import app
from wootz.launch import config_flags
CONFIG = config_flags.ConfigFlag(default="quickstart")
def main(argv):
  print("seed", CONFIG.value.run.seed, "rest", argv[1:])
app.run(main, flags_parser=CONFIG.parse)
"""


def _start(tmp_path, *arguments):
  program = tmp_path / "program.py"
  program.write_text(_PROGRAM)
  return subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True,
                        timeout=60, check=False)


def test_a_program_gets_overrides_beside_absl_flags(tmp_path):
  ended = _start(tmp_path, "--config.run.seed=11", "--verbosity=0")
  assert (ended.returncode, ended.stdout) == (0, "seed 11 rest []\n")


def test_helpshort_lists_the_keys(tmp_path):
  shown = _start(tmp_path, "--helpshort").stdout
  assert "--config.learner.learning_rate=1e-05 (float)" in shown
  assert "--config.run.resume=False (bool)" in shown


@pytest.mark.parametrize("argument, message", [
  ("--config.run.sead=1", "did you mean --config.run.seed?"),
  ("--confg.run.seed=1", "Unknown command line flag 'confg.run.seed'"),
  ("run.seed=1", "unexpected argument 'run.seed=1'"),
])
def test_a_program_refuses_what_it_would_ignore(tmp_path, argument, message):
  ended = _start(tmp_path, argument)
  assert ended.returncode == 1
  assert message in ended.stderr
  assert "Traceback" not in ended.stderr
