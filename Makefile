# Every target sets up what it needs in .venv; Python 3.11 or newer and make are enough to start.
#
#   make demo ARGS="--steps 10"     options for `aiosync demo`
#   make test ARGS="-k lane"        options for pytest
#   make PYTHON=python3.12 ...      the interpreter that .venv is made from
#   make PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" ...
#                                   torch without CUDA (constraints.txt says why)

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

PY := $(VENV)/bin/python
# Only what is used gets compiled: all of torch would take as long as installing it.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet --no-compile -c constraints.txt $(PIP_ARGS)

COMPILE := env -u PYTHONDONTWRITEBYTECODE $(PY) -c
COMPILED_RUN := aiohttp, anyio, click, msgspec, rich.live, safetensors.torch, torch, transitions
COMPILED_DEV := $(COMPILED_RUN), hypothesis, numpy, pytest, torch.distributed, transformers, trio

# What must hold in full; elsewhere coverage is reported, not enforced.
COVERED := statemachines/*,transports/planning.py,aiosync/messages.py,aiosync/codec.py

SECONDS ?= 60
SEED ?=

.PHONY: help demo test coverage test-faults sweep model leaks fuzz lint bench clean distclean

help:
	@echo "make demo    reinforcement learning with live weight updates, in processes of its own"
	@echo "make test    all tests, with coverage"
	@echo "make sweep   every moment of a round cancelled and broken, on every backend (half an hour)"
	@echo "make model   the protocol explored exhaustively (half a minute)"
	@echo "make leaks   1,000 cancelled rounds, and what is left of them (a few minutes)"
	@echo "make test-faults    each fault of docs/faults.md, and whether its tests pass"
	@echo "make fuzz    random calls to a worker's routes: SECONDS=60, SEED=... repeats a run"
	@echo "make lint    ruff and mypy"
	@echo "make bench   each engine beside the raw primitive it is built on"
	@echo "make clean   remove caches and build products; distclean removes $(VENV) too"

demo: $(VENV)/.stamp-run
	@$(VENV)/bin/aiosync demo $(ARGS)

bench: $(VENV)/.stamp-run
	@$(PY) -m benchmarks run $(or $(ARGS),all)

test: $(VENV)/.stamp-dev
	@$(PY) -m pytest --cov --cov-report= $(ARGS) || { echo $$? > .pytest_cache/ended; exit 1; }
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory coverage
endif

coverage: $(VENV)/.stamp-dev
	@$(PY) -m coverage report --skip-covered --include='aiosync/*,transports/*,statemachines/*'
	@$(PY) -m coverage report --skip-covered --show-missing --include='$(COVERED)' --fail-under=100

sweep: $(VENV)/.stamp-dev
	@TORCH_CPP_LOG_LEVEL=FATAL $(PY) tests/support/full_sweep.py $(ARGS)

model: $(VENV)/.stamp-dev
	@$(PY) tests/support/protocol_model.py

leaks: $(VENV)/.stamp-dev
	@TORCH_CPP_LOG_LEVEL=FATAL $(PY) tests/support/leaks.py $(ARGS)

test-faults: $(VENV)/.stamp-dev
	@$(PY) -m pytest --faults -q --no-header $(ARGS)

fuzz: $(VENV)/.stamp-dev
	@PYTHONPATH=tests/support $(PY) tests/support/route_fuzz.py $(SECONDS) $(SEED)

lint: $(VENV)/.stamp-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m mypy examples benchmarks

# A stamp is out of date as soon as one of the two files that decide what is installed is newer.
$(VENV)/.stamp-run: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo "installing aiosync into $(VENV): once, and torch is large ..."
	@$(PIP) -e '.[cli,digest]'
	@$(COMPILE) 'import $(COMPILED_RUN)'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo "installing aiosync and the development tools into $(VENV): once, and torch is large ..."
	@$(PIP) -e '.[dev]'
	@$(COMPILE) 'import $(COMPILED_DEV)'
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-venv:
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHONS); do \
	    if $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then $$python -m venv $(VENV); break; fi; \
	  done; \
	fi
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  echo "Python 3.11+ with venv is needed; none of: $(PYTHONS) (set PYTHON=...)" >&2; exit 1; }
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
