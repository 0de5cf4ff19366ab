# make sweep MODEL=qwen0.5b      set up the environment, run a sweep, make figures and a report
# make test                      set up and run the tests
#
# PYTHON=python3 VENV=           use an existing environment (rented GPU images come with torch)
# HASHES=                        set up without hashes, if your index serves other files than locked*.txt names
# SWEEP=claims                   a preset of conf/sweep; MODEL= replaces its models
# ARGS='seq_len=128,256 ...'     further settings

PYTHON ?= python3
VENV ?= .venv
HASHES ?= 1
MODEL ?=
DEVICE ?= auto
SWEEP ?= auto
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
TECHNIQUES :=
REACH := :
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TECHNIQUES := $(VENV)/.techniques
# The last lines of targets that set up: without them the shell finds no `vramsweep`.
REACH := $(if $(filter $(abspath $(VENV)),$(VIRTUAL_ENV)),:,printf '%s\n' 'To use the command vramsweep in this shell:' '  source $(VENV)/bin/activate')
endif

GRID = -m $(MODEL:%=model=%) device=$(DEVICE) sweep=$(SWEEP) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup sweep plan status doctor check report paper test test-all lint format docs gpu-check validate bench torture lock audit

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Everything that constraints.txt pins is installed by its hash in locked*.txt, except torch and what its build brings
# (CUDA's libraries, triton), because the index chooses the build, CPU or CUDA. Torch's other requirements are installed
# before it, packages that are built from source after it, because DeepSpeed looks for torch.
INSTALL = $(VENV)/bin/python -m pip install --quiet
LOCKED = $(INSTALL) --require-hashes --no-deps --no-build-isolation --requirement
FITS = $(VENV)/bin/python -m pip check >/dev/null || { $(VENV)/bin/python -m pip check; exit 1; }

$(VENV)/.ready: pyproject.toml constraints.txt locked.txt locked-built.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "vramsweep needs Python 3.11 or 3.12; choose one with PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(strip $(HASHES)),)
	$(INSTALL) --constraint constraints.txt torch numpy setuptools wheel
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
else
	$(LOCKED) locked.txt
	$(INSTALL) --constraint constraints.txt torch
	$(LOCKED) locked-built.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@$(FITS)
endif
	@touch $@
	@$(if $(filter setup sweep test,$(MAKECMDGOALS)),:,$(REACH))

# The optional packages that measure techniques, and those that users' scripts train with; the long tests need them.
# liger_kernel needs a triton, and a torch for CPUs brought none.
$(VENV)/.techniques: $(VENV)/.ready locked-techniques.txt
ifeq ($(strip $(HASHES)),)
	$(INSTALL) --constraint constraints.txt --editable '.[dev,techniques,scripts]'
else
	$(LOCKED) locked-techniques.txt
	$(INSTALL) --constraint constraints.txt 'triton; sys_platform == "linux"'
	@$(FITS)
endif
	@touch $@

setup: $(READY)  ## create the virtual environment from pyproject.toml, constraints.txt and the hashes in locked*.txt
	@$(REACH)

sweep: $(READY)  ## run a sweep, or resume it: MODEL=, DEVICE=auto|cuda|cpu|simulated, SWEEP=, ARGS=
	$(PY) -m vramsweep sweep $(GRID)
	@$(REACH)

plan: $(READY)  ## list the sweep's trials, those that cannot run, and the expected time
	@$(PY) -m vramsweep plan $(GRID)

status: $(READY)  ## show the progress of sweeps: RESULTS=results/SWEEP; WATCH=1 keeps watching, WATCH=5 every 5 s
	@$(PY) -m vramsweep status $(RESULTS) $(if $(WATCH),--watch $(filter-out 1,$(WATCH)))

doctor: $(READY)  ## check machine, driver, torch build, disk, other GPU processes
	@$(PY) -m vramsweep doctor

check: $(READY)  ## check whether memory and speed can be published, and why not: RESULTS=results/SWEEP
	@$(PY) -m vramsweep check $(RESULTS)

report: $(READY)  ## write figures and report again: RESULTS=results/SWEEP
	$(PY) -m vramsweep report $(RESULTS)

paper: $(READY)  ## write PDF figures, LaTeX tables, CSV, methods text: RESULTS=results/SWEEP
	$(PY) -m vramsweep paper $(RESULTS)

# Those on the GPU come first, one by one: they would be in each other's way. The others run in two processes, as most
# of them wait for workers of their own.
GPUS = $(PY) -c 'from vramsweep.harness.machine import machine; print(len(machine.gpus()))'
NO_GPU = [ "$$($(GPUS))" = 0 ] && echo 'no NVIDIA GPU here: skipping the tests marked gpu'

test: $(READY)  ## run the short tests (three minutes): the pure core and one path per runner
	@$(NO_GPU) || $(PY) -m pytest -m gpu -rs
	$(PY) -m pytest -m 'not gpu and not slow' -n 2 --dist worksteal
	@$(REACH)

# tests/unchanged.py skips tests that depend on code and packages alone and have passed with the present ones.
test-all: $(READY) $(TECHNIQUES) test  ## also run the long tests: wheel, ranks, browser, libraries; ALL=1: even if their code has not changed
	$(PY) -m pytest -m 'not gpu and slow' -n 2 --dist worksteal -rs --durations=20 --unchanged=$(if $(filter-out 0,$(ALL)),keep,skip)

lint: $(READY)  ## run ruff and mypy --strict
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	@MYPYPATH=benchmarks:tests $(PY) -m mypy --allow-untyped-calls $(wildcard benchmarks/*.py)

format: $(READY)  ## format the code with ruff
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(READY)  ## build the documentation: build/docs/index.html; needs no network
	$(PY) docs/reference.py
	$(PY) -m sphinx -W --keep-going --quiet -b html docs build/docs

gpu-check: $(READY)  ## compare predictions with a real GPU, in nine minutes: OUT=results/reference/NAME
	$(PY) benchmarks/gpu_check.py $(OUT)

validate: $(READY)  ## predict published runs, and write docs/published_runs.md: one to two hours on two cores
	@rm -f results/validation/readings.json
	$(PY) benchmarks/validate.py benchmarks/published/*.yaml $(ARGS) results=results name=validation; status=$$?; [ $$status -le 1 ] || exit $$status; \
	cp results/validation/readings.json results/reference/validation/readings.json && \
	$(PY) benchmarks/validation_page.py results/reference/validation/readings.json docs/published_runs.md docs/images/validation.png \
		results/reference/validation/every_reading.csv && exit $$status

torture: $(READY)  ## inject the faults a sweep should survive, and count what is lost: two hours; ARGS='--only SIGKILL'
	$(PY) benchmarks/faults.py $(ARGS)

bench: $(READY)  ## measure the overhead per trial, cold and warm, and of the instruments
	$(PY) benchmarks/overhead.py

# The hashes of every file that the index serves of each version, whatever its platform. Left out: torch and what it brings,
# and what only other systems need; torch's other requirements are named instead. tests/secure/test_locked.py compares.
TOOLS := .venv-tools
LEFT_OUT := torch triton colorama httpx2-jsfetch appnope cffi pycparser
OF_TORCH := setuptools wheel filelock fsspec jinja2 networkx sympy typing-extensions
BUILT := antlr4-python3-runtime deepspeed
LOCK = printf '%s\n' $(OF_TORCH) | $(TOOLS)/bin/uv pip compile - pyproject.toml --extra dev --constraint constraints.txt \
  --excludes $(TOOLS)/left-out.txt --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
  --custom-compile-command 'make lock'
NAMES = $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package=\1/p' $(1))

lock:  ## write locked*.txt after a change of constraints.txt; needs the network
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet uv
	@printf '%s\n' $(LEFT_OUT) > $(TOOLS)/left-out.txt
	@rm -f locked.txt locked-built.txt locked-techniques.txt
	$(LOCK) $(BUILT:%=--no-emit-package=%) --output-file locked.txt >/dev/null
	$(LOCK) $(call NAMES,locked.txt) --output-file locked-built.txt >/dev/null
	$(LOCK) --extra techniques --extra scripts $(call NAMES,locked.txt locked-built.txt) \
	  --output-file locked-techniques.txt >/dev/null

# Strict, because advisories that cannot be read would otherwise count as none.
audit:  ## look up known vulnerabilities of the pinned packages; needs the network
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet pip-audit
	@$(TOOLS)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt || \
	  { echo "'could not be audited' means that the advisories could not be read; try again where they can" >&2; exit 1; }
