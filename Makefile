# make sweep MODEL=qwen0.5b      everything from nothing: environment, sweep, figures, report
# make test                      set up and run the tests
#
# PYTHON=python3 VENV=           use an environment that is already there (rented GPU images come with torch)
# SWEEP=claims                   a preset of conf/sweep; its own models, unless MODEL= says another
# ARGS='seq_len=128,256 ...'     further overrides, as on Hydra's command line

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
DEVICE ?= auto
SWEEP ?= auto
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
TECHNIQUES :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TECHNIQUES := $(VENV)/.techniques
endif

GRID = -m $(MODEL:%=model=%) device=$(DEVICE) sweep=$(SWEEP) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup sweep plan status doctor report paper test test-all lint format gpu-check validate bench

help:  ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first: DeepSpeed is built from source and looks for it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "vramsweep needs Python 3.11 or 3.12; choose one with PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The optional packages that measure techniques, and those that users' scripts train with; the long tests need them.
$(VENV)/.techniques: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,techniques,scripts]'
	@touch $@

setup: $(READY)  ## the virtual environment, from pyproject.toml and constraints.txt

sweep: $(READY)  ## run a sweep, or go on with it: MODEL=, DEVICE=auto|cuda|cpu|simulated, SWEEP=, ARGS=
	$(PY) -m harness sweep $(GRID)

plan: $(READY)  ## list the sweep's trials, rejections and an estimated time
	@$(PY) -m harness plan $(GRID)

status: $(READY)  ## how far the sweeps under results/ are
	@$(PY) -m harness status

doctor: $(READY)  ## check machine, driver, torch build, disk, foreign GPU processes
	@$(PY) -m harness doctor

report: $(READY)  ## figures and report again: RESULTS=results/SWEEP
	$(PY) -m analysis report $(RESULTS)

paper: $(READY)  ## PDF figures, LaTeX tables, CSV, methods text: RESULTS=results/SWEEP
	$(PY) -m analysis paper $(RESULTS)

# Those on the GPU come first, one by one: they would be in each other's way. The others run in two processes, as most
# of them wait for workers of their own.
CARDS = $(PY) -c 'from vramsweep.harness import machine; print(len(machine.gpus()))'
NO_CARD = [ "$$($(CARDS))" = 0 ] && echo 'no NVIDIA card here: the tests marked gpu are left out'

test: $(READY)  ## run the tests, in under five minutes: the pure core and one path per runner
	@$(NO_CARD) || $(PY) -m pytest -m 'gpu and not slow' -rs
	$(PY) -m pytest -m 'not gpu and not slow' -n 2 --dist worksteal

test-all: $(READY) $(TECHNIQUES)  ## the same and the long ones, as CI does: wheel, ranks, browser, libraries of techniques
	@$(NO_CARD) || $(PY) -m pytest -m gpu -rs
	$(PY) -m pytest -m 'not gpu' -n 2 --dist worksteal

lint: $(READY)  ## ruff and mypy --strict
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	@MYPYPATH=benchmarks:tests $(PY) -m mypy --allow-untyped-calls $(wildcard benchmarks/*.py)

format: $(READY)  ## let ruff rewrite
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

gpu-check: $(READY)  ## prove it on a real card, in nine minutes: OUT=results/reference/NAME
	$(PY) benchmarks/gpu_check.py $(OUT)

validate: $(READY)  ## predict what others published, and write docs/validation.md: one to two hours on two cores
	$(PY) -m vramsweep validate benchmarks/published/*.yaml --others --out docs/validation.md \
	  --figure docs/images/validation.png $(ARGS)

bench: $(READY)  ## overhead per trial, cold and warm, and of the instruments
	$(PY) benchmarks/overhead.py
