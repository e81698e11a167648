"""Type-checks the package as users get it: builds it, installs it aside, runs mypy over that copy."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                    folder, str(ROOT)], check=True)
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "wootz"]
    return subprocess.run(mypy, cwd=folder, env=os.environ | {"MYPYPATH": folder}).returncode


if __name__ == "__main__":
  sys.exit(main())
