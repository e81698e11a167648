#!/usr/bin/env bash
# Sets up a virtual environment and what the sandbox needs: setup.sh PYTHON VENV
# Debian packages are installed only where they are missing, as root or through sudo.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

fail() { echo "setup: $*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then env DEBIAN_FRONTEND=noninteractive "$@"
  elif [ -t 0 ]; then sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else sudo -n env DEBIAN_FRONTEND=noninteractive "$@"; fi
}

debian_install() {
  echo "setup: installing $* (Debian/Ubuntu packages)"
  command -v apt-get >/dev/null ||
    fail "no apt-get here: install $* with this system's package manager and run make again"
  as_root apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { as_root apt-get update -qq && as_root apt-get install -y --no-install-recommends "$@" >/dev/null; } ||
    fail "could not install $*: run 'sudo apt-get install $*' and then make again"
}

if ! command -v "$python" >/dev/null; then
  [ "$python" = python3 ] || fail "$python is not installed; name another with make PYTHON=…"
  debian_install python3 python3-venv
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" -V 2>&1) is too old: Python 3.11 or newer is needed (make PYTHON=python3.12 …)"
"$python" -c 'import ensurepip' 2>/dev/null ||
  debian_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
command -v bwrap >/dev/null || debian_install bubblewrap

# A half-made environment of an interrupted call has no pip: make it anew.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
"$venv/bin/python" - <<'PY'
import sys
from wootz.post_training.sandbox import Sandbox, SandboxUnavailable
try:
  with Sandbox():
    pass
except SandboxUnavailable as error:
  sys.exit(f"setup: {error}")
PY
