PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
ARGS ?=
BENCHMARKS := $(filter-out __init__ harness,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: help install train test emulator lint bench clean

help:
	@echo "make train    a small model learns on two data-parallel ranks, about three minutes"
	@echo "make test     the whole test suite"
	@echo "make emulator an accelerator on the CPU, for tests that are skipped without it; needs g++ and ninja"
	@echo "make lint     ruff and mypy"
	@echo "make bench    every benchmark, beside the peers that are installed"
	@echo "make install  .venv with everything development needs"
	@echo "Pass arguments on as ARGS: make train ARGS='plan.replicate=1 train.steps=50', make test ARGS=tests/test_plan.py"

install: .venv/.developing

train: .venv/.running
	$(BIN)/shardwise train examples/quickstart.toml $(ARGS)

test: .venv/.developing
	OMP_NUM_THREADS=1 $(BIN)/python -m tests $(ARGS)

emulator: .venv/.developing
	$(BIN)/python -m tests.emulator

lint: .venv/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.developing
	set -e; for name in $(BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name $(ARGS); done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# Two stamps: training a first model does not wait for the tools of development.
.venv/.running: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 on the PATH: install Python 3.11 or later, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shardwise needs Python 3.11 or later: set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, once"
	$(PIP) --editable .
	@touch $@

.venv/.developing: .venv/.running
	$(PIP) --editable '.[dev]'
	@touch $@
