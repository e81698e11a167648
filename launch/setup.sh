#!/usr/bin/env bash
# Sets up a virtual environment and what the sandbox needs: setup.sh PYTHON VENV
# Debian packages are installed only where they are missing and root rights are at hand.
set -euo pipefail
python=$1 venv=$2

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

debian_install() {
  echo "setup: installing $* (Debian/Ubuntu packages)"
  if ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here; install $* with this system's package manager and run make again" >&2
    exit 1
  fi
  as_root apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { as_root apt-get update -qq && as_root apt-get install -y --no-install-recommends "$@" >/dev/null; } ||
    { echo "setup: could not install $*: run 'sudo apt-get install $*' and then make again" >&2; exit 1; }
}

if ! command -v "$python" >/dev/null; then debian_install python3 python3-venv; fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: $python is $("$python" -V 2>&1); Python 3.11 or newer is needed: make PYTHON=python3.12 …" >&2; exit 1; }
"$python" -c 'import ensurepip' 2>/dev/null ||
  debian_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
command -v bwrap >/dev/null || debian_install bubblewrap

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
