"""The planning program, in a process of its own: it decides how many devices there are."""

import os
import pathlib
import subprocess
import sys


def test_in_a_process_of_its_own():
  checks = pathlib.Path(__file__).with_name("plan_alone.py")
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  run = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)],
      env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert run.returncode == 0, run.stdout + run.stderr
