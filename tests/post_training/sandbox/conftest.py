import os
import pathlib
import secrets
import time

import pytest

from wootz.post_training.sandbox import Sandbox, SandboxUnavailable


@pytest.fixture(scope="session", autouse=True)
def _isolation():
  """These tests are about real isolation: skipped, loudly, only where the machine has none."""
  try:
    with Sandbox():
      pass
  except SandboxUnavailable as error:
    pytest.skip(f"no isolation on this machine: {error}")


@pytest.fixture
def marker():
  """A word to put on a program's command line, by which its processes are found again."""
  return f"marker-{secrets.token_hex(8)}"


@pytest.fixture(scope="session")
def processes_with():
  """Function: pids of processes, zombies excepted, with a word on their command line."""

  def find(word: str) -> list[int]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
      try:
        if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
          found.append(int(path.parent.name))
      except OSError:
        continue
    return found

  return find


@pytest.fixture(scope="session")
def eventually():
  """Function: waits until `condition()` holds, or fails after `seconds`."""

  def wait(condition, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < deadline, "condition did not come true"
      time.sleep(0.01)

  return wait
