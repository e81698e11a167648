"""Runs eight_devices.py on eight fake CPU devices: their number is fixed when a process starts."""

import os
import pathlib
import subprocess
import sys


def test_on_eight_fake_devices():
  checks = pathlib.Path(__file__).with_name("eight_devices.py")
  environment = {**os.environ, "JAX_PLATFORMS": "cpu",
                 "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  run = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)],
      env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert run.returncode == 0, run.stdout + run.stderr
