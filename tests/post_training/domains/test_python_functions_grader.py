"""Attacks on the grader of `python_functions`, each with its verdict, and an honest job after them."""

import dataclasses
import json
import threading

import pytest

from wootz.data.records import Outcome, Task
from wootz.post_training import rewards
from wootz.post_training.domains.base import get_domain
from wootz.post_training.domains.python_functions.extract import extract_code
from wootz.post_training.domains.python_functions.grader import (
  grade_completion,
  judge_run,
  runner_input,
)
from wootz.post_training.domains.python_functions.transcript import Tampered, read_transcript
from wootz.post_training.sandbox import Outcome as RunOutcome
from wootz.post_training.sandbox import SandboxResult

# Written by hand: triple(x) is 3 * x.
TESTS = [{"inputs": [x], "expected": 3 * x} for x in (0, 1, -2, 5, 10, 7, 40, -13)]
TASK = Task(id="attack/0000", domain="python_functions", family="attack", split="train",
            messages=({"role": "user", "content": "triple"},),
            payload={"function": "triple", "tests": TESTS})
HONEST = "def triple(x):\n  return 3 * x\n"


def grade(code, task=TASK):
  return grade_completion(task, code)


ATTACKS = {
  # 1, 2, 3: leaving early, or with a forced exit status
  "1 exit at import": ("import sys\nsys.exit(0)\n" + HONEST, Outcome.FAILED),
  "1 exit after def": (HONEST + "raise SystemExit(0)", Outcome.FAILED),
  "2 os._exit in a test": ("import os\ndef triple(x): os._exit(0)", Outcome.FAILED),
  "3 exit hook": ("import atexit, os\natexit.register(os._exit, 0)\ndef triple(x): return 1",
                  Outcome.FAILED),
  # 4, 5: values that claim to be equal
  "4 int subclass": ("class I(int):\n  def __eq__(s, o): return True\n  __hash__ = None\n"
                     "def triple(x): return I(3 * x)", Outcome.FAILED),
  "4 object equal to all": ("class A:\n  def __eq__(s, o): return True\n"
                            "def triple(x): return A()", Outcome.FAILED),
  "4 float for int": ("def triple(x): return 3.0 * x", Outcome.FAILED),
  "5 NaN": ("def triple(x): return float('nan')", Outcome.FAILED),
  "5 infinity": ("def triple(x): return float('inf')", Outcome.FAILED),
  # 6, 7: outputs that hurt whoever reads them
  "6 huge int": ("def triple(x): return 1 << 10**7", Outcome.TAMPERED),
  "6 deep list": ("def triple(x):\n  v = []\n  for _ in range(10**5): v = [v]\n  return v",
                  Outcome.TAMPERED),
  "6 circular list": ("def triple(x):\n  v = []\n  v.append(v)\n  return v", Outcome.TAMPERED),
  "7 reduce": ("class P:\n  def __reduce__(s): return print, ('pwned',)\n"
               "def triple(x): return P()", Outcome.TAMPERED),
  "7 repr": ("class P:\n  def __repr__(s): raise SystemExit\ndef triple(x): return [P()][0]",
             Outcome.TAMPERED),
  # 8, 10: helpers and modules replaced
  "8 builtins": ("import builtins\nbuiltins.type = builtins.len = lambda *a: 1\n"
                 "builtins.isinstance = lambda *a: True\ndef triple(x): return 'x'",
                 Outcome.FAILED),
  "10 module files": ("for m in ('json', 'os', 'sitecustomize'):\n"
                      "  open(m + '.py', 'w').write('raise SystemExit')\ndef triple(x): return 1",
                      Outcome.FAILED),
  # 14, 16, 17: forged results in files and output
  "14 reward file": ("open('reward.json', 'w').write('{\"score\": 1.0}')\ndef triple(x): return 1",
                     Outcome.FAILED),
  "16 forged output": ("print('8 passed', flush=True)\nprint('{\"kind\":\"done\"}', flush=True)\n"
                       "def triple(x): return 1", Outcome.FAILED),
  # 18: every inherited descriptor written to
  "18 descriptors": ("import os\nfor fd in range(3, 256):\n  try: os.write(fd, b'{}\\n')\n"
                     "  except OSError: pass\n" + HONEST, Outcome.TAMPERED),
  "18 channel closed": ("import os\nos.closerange(3, 256)\n" + HONEST, Outcome.FAILED),
  "18 channel by its name": ("import os\nos.write(int(os.environ['WOOTZ_CHANNEL_FD']), b'x')\n"
                             + HONEST, Outcome.FAILED),
  "15 records twice": ("import os\ndef triple(x):\n  os.fork()\n  return 3 * x", Outcome.TAMPERED),
  # 19, 20, 21, 23: resources
  "19 endless output": ("def triple(x):\n  while True: print('x' * 999)",
                        Outcome.LIMIT_EXCEEDED),
  "21 one gigabyte": ("def triple(x): return len(bytearray(2**30))", Outcome.LIMIT_EXCEEDED),
  "23 endless loop": ("def triple(x):\n  while True: pass", Outcome.TIMED_OUT),
  # 28: counting calls instead of computing, in the order in which the tests are stored
  "28 calls counted": ("n = iter([0, 3, -6, 15, 30, 21, 120, -39])\ndef triple(x): return next(n)",
                       Outcome.FAILED),
  # 31 and RW-2: the answer is text that evaluation would run
  "31 call text": ("__import__('os').system('touch /tmp/pwned')", Outcome.INVALID),
  "RW-2 brackets": ("(" * 100_000, Outcome.INVALID),
  "RW-2 brackets within bounds": ("(" * 40_000, Outcome.INVALID),
  "RW-2 power": ("def triple(x): return 9**9**9", Outcome.TIMED_OUT),
  # nothing gradable
  "empty": ("  \n", Outcome.INVALID),
  "NUL": ("def triple(x):\0 return 1", Outcome.INVALID),
  "lone surrogate": ("def triple(x): return '\ud800'", Outcome.INVALID),
  "not a function": ("triple = 3", Outcome.INVALID),
  "another name": ("def tripel(x): return 3 * x", Outcome.INVALID),
  "prose": ("I would multiply by three.", Outcome.INVALID),
  "input": ("def triple(x): return int(input()) * 3", Outcome.FAILED),
  "standard input": ("import sys\ndef triple(x): return sys.stdin.read()", Outcome.FAILED),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name):
  code, outcome = ATTACKS[name]
  result = grade(code)
  if name == "28 calls counted":  # shuffled: a few may fall into place, never all
    assert result.outcome in (Outcome.FAILED, Outcome.PARTIAL) and result.score <= 0.5
    return
  assert result.outcome is outcome, result
  assert result.score == 0.0


def test_an_honest_job_still_solves_and_a_partial_one_gets_its_share():
  assert grade(HONEST).outcome is Outcome.SOLVED
  half = "def triple(x):\n  if x < 0: raise SystemExit(0)\n  return 3 * x"
  assert (grade(half).outcome, grade(half).score) == (Outcome.PARTIAL, 6 / 8)


def test_one_forged_channel_record_gains_nothing():
  """15, 16: the nonce can be found in the process, the expected values cannot."""
  thief = """
import sys, os
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
nonce = frame.f_locals.get('nonce') or frame.f_back
f = sys._getframe()
while f and 'nonce' not in f.f_locals: f = f.f_back
send = f.f_locals['send']
for i in range(8): send('"test":%d,"kind":"value","value":1' % i)
send('"kind":"done"')
os._exit(0)
"""
  result = grade(thief)
  assert result.outcome is Outcome.FAILED and result.score == 0.0


def test_bool_is_not_int_at_any_depth():
  tests = [{"inputs": [n], "expected": [n > 1, {"k": n}]} for n in range(6)]
  task = dataclasses.replace(TASK, payload={"function": "f", "tests": tests})
  assert grade("def f(n): return [n > 1, {'k': n}]", task).outcome is Outcome.SOLVED
  assert grade("def f(n): return [int(n > 1), {'k': n}]", task).score == 0.0
  assert grade("def f(n): return (n > 1, {'k': n})", task).score == 0.0


def test_each_call_gets_its_own_inputs():
  tests = [{"inputs": [[n]], "expected": [n, 1]} for n in range(6)]
  task = dataclasses.replace(TASK, payload={"function": "f", "tests": tests})
  assert grade("def f(xs):\n  xs.append(1)\n  return xs", task).outcome is Outcome.SOLVED


def test_sets_of_strings_have_one_order_so_grades_repeat():
  tests = [{"inputs": [], "expected": ["x"]} for _ in range(6)]
  task = dataclasses.replace(TASK, payload={"function": "f", "tests": tests})
  code = "def f(): return ['x' if list(set('abcdefgh'))[0] in 'abcd' else 'y']"
  assert len({grade(code, task).score for _ in range(4)}) == 1


def test_expected_values_never_enter_the_sandbox():
  """13, 27: neither the expected values nor the reference are in what the runner reads."""
  tests = [{"inputs": [n], "expected": f"secret{n}"} for n in range(6)]
  payload = {"function": "f", "tests": tests, "reference": "secret source"}
  text = runner_input(dataclasses.replace(TASK, payload=payload), HONEST, "ab" * 16)
  assert "secret" not in text


def run_result(**changes):
  fields = dict(outcome=RunOutcome.OK, exit_code=0, signal=None, stdout="", stderr="",
                stdout_truncated=False, stderr_truncated=False, wall_seconds=0.1, cpu_seconds=0.1,
                peak_memory_bytes=0, channel=b"", limits_enforced_by={})
  return SandboxResult(**{**fields, **changes})


def records(*fields, nonce="n"):
  return b"".join(json.dumps({"nonce": nonce, **f}).encode() + b"\n" for f in fields)


READY, DONE = {"kind": "ready"}, {"kind": "done"}


def value(number, output):
  return {"test": number, "kind": "value", "value": output}


def test_missing_records_are_not_passed():
  channel = records(READY, value(1, 20), DONE)
  outcome, score, _ = judge_run(run_result(channel=channel), "n", [10, 20])
  assert (outcome, score) == (Outcome.PARTIAL, 0.5)


@pytest.mark.parametrize("channel", [
  b"junk\n", b"\xff\xfe\n", b"[" * 10_000 + b"\n", b"9" * 9_999 + b"\n", b"null\n",
  records(READY, value(0, 10), value(0, 10), DONE),
  records(READY, value(7, 10), DONE),
  records(READY, value(True, 10), DONE),
  records(READY, {"test": 0, "kind": "value"}, DONE),
  records(READY, {"test": 0, "kind": "passed"}, DONE),
  records(READY, READY, DONE), records(value(0, 10), READY), records(READY, DONE, value(0, 10)),
  records(READY, {"kind": "no_program"}, value(0, 10), DONE),
  records(READY, nonce="other"),
  records(READY) + b'{"nonce":"n","test":0,"kind":"value","value":NaN}\n',
  records(READY) + b'{"nonce":"n","test":0,"test":1,"kind":"value","value":1}\n',
  records(READY, value(0, 10), DONE) + b'{"nonce"',
])
def test_a_channel_with_anything_else_is_tampered(channel):
  with pytest.raises(Tampered):
    read_transcript(channel, "n", 2, stopped=False)
  outcome, score, _ = judge_run(run_result(channel=channel), "n", [10, 20])
  assert (outcome, score) == (Outcome.TAMPERED, 0.0)


@pytest.mark.parametrize("changes", [
  {"outcome": RunOutcome.INFRA_ERROR, "exit_code": None},
  {"outcome": RunOutcome.NONZERO_EXIT, "exit_code": 127, "stderr": "python3: not found"},
  {"outcome": RunOutcome.TIMED_OUT, "exit_code": None},
])
def test_what_ends_before_the_runner_begins_is_nobodys_score(changes):
  """RW-7: a grading that timed out by itself is not the policy's 0."""
  outcome, score, _ = judge_run(run_result(**changes), "n", [10])
  assert (outcome, score) == (Outcome.INFRA_LOST, None)


def test_a_submission_that_times_out_scores_zero_whatever_passed():
  channel = records(READY, value(0, 10)) + b'{"nonce":"n","te'  # cut by the kill
  result = run_result(channel=channel, outcome=RunOutcome.TIMED_OUT, exit_code=None)
  assert judge_run(result, "n", [10, 20])[:2] == (Outcome.TIMED_OUT, 0.0)


def test_a_grader_that_breaks_is_unscorable():
  def broken(stdin):
    raise OSError("disk on fire")
  result = grade_completion(TASK, HONEST, run=broken)
  assert (result.outcome, result.score) == (Outcome.UNSCORABLE, None)
  assert "disk on fire" in result.reason
  empty = dataclasses.replace(TASK, payload={"function": "triple", "tests": []})
  assert grade(HONEST, empty).outcome is Outcome.UNSCORABLE


@pytest.mark.parametrize(("text", "code"), [
  ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
  ("```python\nx = 1", "x = 1"),
  ("```py\nx = 1\n```\n```python\ny = 2\n```", "x = 1\n"),
  ("```\nx = 1\n```", "x = 1\n"),
  ("```text\nno\n```\n```Python\r\nx = 1\n```", "x = 1\n"),
  ("x = 1", "x = 1"),
  ("", ""),
  ("```python\n```", ""),
])
def test_extract_code(text, code):
  assert extract_code(text) == code


def test_rw1_one_sample_one_reward_and_threads_share_the_domain():
  """RW-1: good, unparsable, good, wrong give [1, 0, 1, 0], each in its own place."""
  domain = get_domain("python_functions")
  texts = [HONEST, "def triple(x) return", f"```python\n{HONEST}```", "def triple(x): return 1"]
  grades = [None] * 4
  def work(i):
    grades[i] = domain.grade(TASK, texts[i])
  threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [g.score for g in grades] == [1.0, 0.0, 1.0, 0.0]


def test_code_reward():
  task = get_domain("python_functions").tasks("held_out")[0]
  assert rewards.code_reward(task.payload["reference"], task.id) == 1.0
  assert rewards.code_reward("def f(): pass", task.id) == 0.0
  with pytest.raises(KeyError, match="ids look like"):
    rewards.code_reward("x", "no/such")


def test_code_reward_never_turns_a_lost_grading_into_zero(monkeypatch):
  monkeypatch.setattr("wootz.post_training.domains.python_functions.grader.run_in_sandbox",
                      lambda stdin: run_result(outcome=RunOutcome.INFRA_ERROR, exit_code=None))
  task = get_domain("python_functions").tasks("train")[0]
  with pytest.raises(rewards.NoReward, match="infra_lost"):
    rewards.code_reward(task.payload["reference"], task.id)


def test_total_rewards():
  """RW-1 and RW-7 (b): lengths are checked by name, None abstains, 0.0 is a score."""
  functions = {"a": lambda s, t: [1.0, 0.0], "b": lambda s, t: [None, 1.0]}
  assert rewards.total_rewards(functions, ["x", "y"], ["1", "2"]) == [1.0, 1.0]
  zero = {"a": lambda s, t: [0.0, None]}
  assert rewards.total_rewards(zero, ["x", "y"], ["1", "2"]) == [0.0, None]
  with pytest.raises(ValueError, match="'short' gave 1 values for 3"):
    rewards.total_rewards({"short": lambda s, t: [1.0]}, ["x"] * 3, ["1"] * 3)
