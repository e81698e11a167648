"""The peer's virtual environment, made on first use."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import venv

_STAMP = ".installed-requirements.txt"


def peer_python(place: pathlib.Path, requirements: pathlib.Path) -> pathlib.Path:
  """The interpreter of the environment at `place`.

  An environment that was made elsewhere is used as it is. None there: it is made, with exactly the
  packages of `requirements`. One of ours is made anew when the requirements have changed, or when its
  installation was broken off. Raises RuntimeError when pip fails.
  """
  python, stamp = place / "bin" / "python", place / _STAMP
  wanted = requirements.read_text(encoding="utf-8")
  ours = stamp.exists()
  if ours and stamp.read_text(encoding="utf-8") == wanted and python.exists():
    return python
  if python.exists() and not ours:
    return python
  _install(place, python, stamp, requirements)
  return python


def _install(place: pathlib.Path, python: pathlib.Path, stamp: pathlib.Path,
             requirements: pathlib.Path) -> None:
  print(f"setting up the peer's environment in {place}, once (about 1.5 GB)", file=sys.stderr)
  place.mkdir(parents=True, exist_ok=True)
  stamp.write_text("", encoding="utf-8")  # ours, and not complete
  venv.create(place, with_pip=True, clear=False)
  command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--requirement", str(requirements)]
  if status := subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode:
    raise RuntimeError(f"pip could not install {requirements} into {place} (exit status {status}); see its "
                       "words above, then run this again, or name an environment with --peer_venv")
  stamp.write_text(requirements.read_text(encoding="utf-8"), encoding="utf-8")
