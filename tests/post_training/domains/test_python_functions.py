"""The tasks of `python_functions`: their number, splits, fairness and hidden tests."""

import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from wootz.data.records import Outcome
from wootz.post_training.domains import base
from wootz.post_training.domains.python_functions.domain import PythonFunctions
from wootz.post_training.domains.python_functions.families import SEEN, UNSEEN
from wootz.post_training.domains.python_functions.hidden_tests import same_value
from wootz.post_training.domains.python_functions.specs import compile_function
from wootz.post_training.domains.python_functions.tasks import build_tasks

TASKS = build_tasks()
ALL = [task for split in base.SPLITS for task in TASKS[split]]


def passed(function, task):
  """Number of hidden tests a trusted function passes."""
  count = 0
  for test in task.payload["tests"]:
    inputs = json.loads(json.dumps(test["inputs"]))
    try:
      count += same_value(function(*inputs), test["expected"])
    except Exception:
      pass
  return count


def test_there_are_enough_tasks_of_enough_families():
  assert len(ALL) > 2000 and len({task.id for task in ALL}) == len(ALL)
  assert len(SEEN) >= 14 and len(UNSEEN) == 2
  assert len(TASKS["held_out"]) >= 240 and len(TASKS["unseen_family"]) >= 120
  assert {task.family for task in TASKS["train"]} == set(SEEN)
  assert {task.family for task in TASKS["held_out"]} == set(SEEN)
  assert {task.family for task in TASKS["unseen_family"]} == set(UNSEEN)
  assert all(task.split == split for split in base.SPLITS for task in TASKS[split])


@pytest.mark.parametrize("split", base.SPLITS)
def test_every_prefix_is_balanced_over_the_families(split):
  families = [task.family for task in TASKS[split]]
  count = len(set(families))
  for start in range(0, len(families), count):
    assert set(families[start:start + count]) == set(families)


def test_references_pass_all_their_hidden_tests():
  for task in ALL:
    function = compile_function(task.payload["reference"], task.payload["function"])
    assert passed(function, task) == len(task.payload["tests"]) >= 6, task.id


def test_doing_nothing_passes_at_most_a_little_over_half():
  """Attack 28: None, any constant, or an argument handed back, never pass all."""
  for task in ALL:
    tests = task.payload["tests"]
    lazy = [lambda *a: None]
    lazy += [lambda *a, v=test["expected"]: v for test in tests]
    lazy += [lambda *a, i=i: a[i] for i in range(len(tests[0]["inputs"]))]
    assert max(passed(f, task) for f in lazy) <= 0.6 * len(tests), task.id


def test_small_mistakes_fail():
  """Mutants written by hand, one for each border that such tasks turn on."""
  wrong = {
    "scale_add": ("+", "-"), "keep_above": (">", ">="), "keep_below": ("<", "<="),
    "divisible": ("== 0", "== 1"), "is_below": ("<", "<="), "sort_down_with": (", reverse=True", ""),
    "at_least": ("max", "min"), "distinct_above": ("set(", "list("), "both_above": ("and", "or"),
    "rec_affine": ("== 0", "<= 1"), "first_num": ("[:", "[1:"),
  }
  tried = set()
  for task in ALL:
    if (spec := task.payload["spec"]) not in wrong:
      continue
    source = task.payload["reference"]
    mutant = source.replace(*wrong[spec])
    assert mutant != source, task.id
    assert passed(compile_function(mutant, task.payload["function"]), task) \
      < len(task.payload["tests"]), task.id
    tried.add(spec)
  assert tried == set(wrong)


def test_no_held_out_task_asks_for_the_behaviour_of_a_training_task():
  """No training reference of as many arguments solves a held-out or unseen task."""
  train = [(task, compile_function(task.payload["reference"], task.payload["function"]))
           for task in TASKS["train"]]
  for other in (*TASKS["held_out"], *TASKS["unseen_family"]):
    count = len(other.payload["tests"][0]["inputs"])
    for task, function in train:
      if len(task.payload["tests"][0]["inputs"]) == count:
        assert not solves(function, other), (task.id, other.id)


def solves(function, task):
  for test in task.payload["tests"]:
    try:
      if not same_value(function(*test["inputs"]), test["expected"]):
        return False
    except Exception:
      return False
  return True


def test_prompts_are_short_distinct_and_name_the_function():
  prompts = [" ".join(message["content"] for message in task.messages) for task in ALL]
  assert len(set(prompts)) == len(prompts)
  assert max(map(len, prompts)) <= 260
  for task, prompt in zip(ALL, prompts, strict=True):
    assert f"`{task.payload['function']}(" in prompt
    assert "expected" not in prompt and task.payload["reference"] not in prompt


def test_payloads_are_plain_json_without_floats():
  def check(value):
    assert type(value) in (bool, int, str, list, dict, type(None)), value
    for item in value.values() if type(value) is dict else value if type(value) is list else ():
      check(item)
  for task in ALL:
    check(task.payload)
    assert json.loads(json.dumps(task.payload)) == task.payload


def test_tasks_are_equal_in_another_process_with_another_hash_seed():
  code = ("import hashlib; from wootz.post_training.domains.python_functions.tasks import build_tasks;"
          "print(hashlib.sha256(repr(build_tasks()).encode()).hexdigest())")
  other = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "1"},
                         capture_output=True, text=True, check=True).stdout
  assert other.strip() == hashlib.sha256(repr(TASKS).encode()).hexdigest()


def test_references_solve_in_the_sandbox():
  domain = PythonFunctions()
  sample = [*TASKS["held_out"][:len(SEEN)], *TASKS["unseen_family"][:4]]
  with ThreadPoolExecutor(2) as pool:
    grades = list(pool.map(lambda t: domain.grade(t, f"```python\n{t.payload['reference']}```"),
                           sample))
  assert [grade.outcome for grade in grades] == [Outcome.SOLVED] * len(sample)
  assert all(grade.score == 1.0 for grade in grades)


def test_the_registry_names_the_nearest_domain_and_the_splits():
  assert base.get_domain("python_functions") is base.get_domain("python_functions")
  assert isinstance(base.get_domain("python_functions"), base.Domain)
  with pytest.raises(KeyError, match="did you mean 'python_functions'"):
    base.get_domain("python_function")
  with pytest.raises(ValueError, match="train, held_out, unseen_family"):
    base.get_domain("python_functions").tasks("heldout")


def test_every_phrasing_is_whole():
  """Quotes close, and what the function is given is named, so no phrasing was cut at a mark it contains."""
  for family in (*SEEN.values(), *UNSEEN.values()):
    for spec in family():
      for phrasing in spec.what:
        assert phrasing.count("'") % 2 == 0, spec
        named = set(re.findall(r"\b[XYZ]\b", phrasing))
        assert named == set(re.findall(r"\b[XYZ]\b", spec.body)), spec
