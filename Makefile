# make train: sets everything up and runs the main job.  make test: sets up and passes the tests.
# Variables: PYTHON (3.11 or newer), VENV, RUN (the run's directory), ARGS (more flags for the run).
PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Huge pages for large arrays (a twentieth less time on CPU) and few arenas (less memory kept by threads).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2

.PHONY: train test test-long lint bench setup clean

train: $(STAMP)
	$(BIN)/python -m wootz.launch.train --config=quickstart --config.run.directory=$(RUN) $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python tests/check_types.py

bench: $(STAMP)
	$(BIN)/python -m wootz.launch.bench grpo $(ARGS)

setup: $(STAMP)

# The stamp holds what was installed from: a second call does nothing until one of these changes.
$(STAMP): pyproject.toml launch/setup.sh
	bash launch/setup.sh "$(PYTHON)" "$(VENV)"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
