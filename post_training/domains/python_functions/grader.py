"""Grades one submission: runs it on the hidden inputs in a sandbox, compares out here.

    outcome          when                                                        score
    solved, partial  outputs equal to the reference's on all, some of the tests  share passed
    failed           on none; or it raised when loaded, or ended the process     0
    invalid          no code, no program, or the function is not defined         0
    timed_out        wall or processor time ran out                              0, whatever passed
    limit_exceeded   memory, output or disk                                      0, whatever passed
    tampered         the channel holds what the runner does not write; or an     0, alerted
                     output of monstrous size or with hooks for picklers
    infra_lost       the sandbox failed, or ended before the runner had begun    none
    unscorable       this grader broke                                           none

The verdict is made of expected values that never enter the sandbox. The order of the tests is shuffled by
task and submission, so equal submissions get equal grades, and counting calls tells nothing.
"""

from __future__ import annotations

import hashlib
import pathlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wootz.data.records import Grade, Outcome, Task
from wootz.post_training.domains.python_functions.extract import extract_code
from wootz.post_training.domains.python_functions.hidden_tests import same_value
from wootz.post_training.domains.python_functions.transcript import (
  Tampered,
  Transcript,
  read_transcript,
)
from wootz.post_training.sandbox import Outcome as RunOutcome
from wootz.post_training.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxUnavailable

# A right answer needs some 10 ms. Short limits keep endless loops from holding up a whole batch.
WALL_SECONDS = 5.0
LIMITS = SandboxLimits(
  cpu_seconds=1.0, memory_bytes=256 * 2**20, processes=16, file_bytes=2**20, open_files=256,
  output_bytes=64 * 1024, channel_bytes=512 * 1024, workdir_bytes=4 * 2**20,
)
MAX_SOURCE_CHARACTERS = 50_000

# No site packages, no byte code, nothing from the work directory (the runner sees to the last). The
# environment is the sandbox's own; a fixed hash seed makes the order of sets repeatable.
_RUNNER = pathlib.Path(__file__).with_name("runner.py")
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}

RunSubmission = Callable[[str], SandboxResult]


def grade_completion(task: Task, completion_text: str,
                     run: RunSubmission | None = None) -> Grade:
  """The verdict on one completion. `run` replaces the sandbox in tests of what cannot be provoked.

  Raises:
    SandboxUnavailable: this machine cannot isolate programs; no grade could be right.
  """
  started = time.monotonic()
  try:
    outcome, score, reason = _judge_completion(task, completion_text, run or run_in_sandbox)
  except SandboxUnavailable:
    raise
  except Exception as error:  # whatever breaks in here is not the policy's doing
    outcome, score, reason = Outcome.UNSCORABLE, None, f"{type(error).__name__}: {error}"
  return Grade(outcome, score, reason, time.monotonic() - started)


Verdict = tuple[Outcome, float | None, str]


def _judge_completion(task: Task, completion_text: str, run: RunSubmission) -> Verdict:
  source = extract_code(completion_text)
  if not source.strip():
    return Outcome.INVALID, 0.0, "no code"
  if len(source) > MAX_SOURCE_CHARACTERS:
    return Outcome.INVALID, 0.0, f"{len(source)} characters of code"
  tests: Sequence[Mapping[str, Any]] = task.payload["tests"]
  if not tests:
    raise ValueError(f"task {task.id!r} has no tests")
  nonce = secrets.token_hex(16)
  result = run(runner_input(task, source, nonce))
  return judge_run(result, nonce, [test["expected"] for test in tests])


def runner_input(task: Task, source: str, nonce: str) -> str:
  """What the runner reads: a literal, without any expected value."""
  numbered = [(i, test["inputs"]) for i, test in enumerate(task.payload["tests"])]
  digest = hashlib.sha256(f"{task.id}\0{source}".encode(errors="replace")).digest()
  random.Random(digest).shuffle(numbered)
  return ascii((nonce, task.payload["function"], source, numbered))


def run_in_sandbox(stdin: str) -> SandboxResult:
  """One run of the runner in a sandbox of its own."""
  command = ["python3", "-s", "-S", "-B", "-c", _RUNNER.read_text()]
  with Sandbox(timeout=WALL_SECONDS, limits=LIMITS) as sandbox:
    return sandbox.run(cmd=command, stdin=stdin, channel=True, env=_ENVIRONMENT)


def judge_run(result: SandboxResult, nonce: str, expected: Sequence[Any]) -> Verdict:
  """The verdict on a finished run, from its end and its channel."""
  if result.outcome is RunOutcome.INFRA_ERROR:
    return Outcome.INFRA_LOST, None, result.detail
  stopped = result.outcome not in (RunOutcome.OK, RunOutcome.NONZERO_EXIT)
  try:
    transcript = read_transcript(result.channel, nonce, len(expected), stopped=stopped)
  except Tampered as error:
    return Outcome.TAMPERED, 0.0, str(error)
  if not transcript.ready:
    how = result.detail or result.stderr.strip()[-200:] or result.outcome.value
    return Outcome.INFRA_LOST, None, f"the runner did not begin: {how}"
  return (_stopped_verdict(result) or _kind_verdict(transcript)
          or _unfinished_verdict(result, transcript) or _compare(transcript, expected))


def _stopped_verdict(result: SandboxResult) -> Verdict | None:
  if result.outcome in (RunOutcome.TIMED_OUT, RunOutcome.CPU_LIMIT):
    return Outcome.TIMED_OUT, 0.0, result.detail
  limits = (RunOutcome.MEMORY_LIMIT, RunOutcome.OUTPUT_LIMIT, RunOutcome.DISK_LIMIT)
  if result.outcome in limits:
    return Outcome.LIMIT_EXCEEDED, 0.0, result.detail or result.outcome.value
  return None


def _kind_verdict(transcript: Transcript) -> Verdict | None:
  """What one record decides for the whole run."""
  if transcript.load_failure in ("no_program", "no_function"):
    reasons = {"no_program": "no Python program", "no_function": "the function is not defined"}
    return Outcome.INVALID, 0.0, reasons[transcript.load_failure]
  if transcript.load_failure == "raised":
    return Outcome.FAILED, 0.0, "it raises when it is loaded"
  kinds = {record["kind"] for record in transcript.tests.values()} | {transcript.load_failure}
  if "hooked" in kinds or "oversized" in kinds:
    return Outcome.TAMPERED, 0.0, "an output of monstrous size or with hooks for picklers"
  if "out_of_memory" in kinds:
    return Outcome.LIMIT_EXCEEDED, 0.0, "out of memory"
  return None


def _unfinished_verdict(result: SandboxResult, transcript: Transcript) -> Verdict | None:
  if transcript.done:
    return None
  return Outcome.FAILED, 0.0, f"it ended the process ({result.outcome.value})"


def _compare(transcript: Transcript, expected: Sequence[Any]) -> Verdict:
  """The share of tests passed; a test that is missing or has no value is not passed."""
  passed = [i for i, value in enumerate(expected)
            if transcript.tests.get(i, {}).get("kind") == "value"
            and same_value(transcript.tests[i]["value"], value)]
  score = len(passed) / len(expected)
  outcome = {1.0: Outcome.SOLVED, 0.0: Outcome.FAILED}.get(score, Outcome.PARTIAL)
  return outcome, score, f"{len(passed)} of {len(expected)} tests passed"
