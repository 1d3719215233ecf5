# What a user types. Everything runs in the project's own virtual environment, .venv.
#
#   make help            this text, as make alone
#   make install         make .venv with all that is pinned; the other targets do so when needed
#   make install LOCKED=1  the same, and refuse every package whose sha256 is not in locks/
#   make lock            write locks/: the sha256 of every package in constraints.txt, by its index
#   make run             build, train, export, evaluate and report every experiment in params.yaml
#   make test            every module and a short path through each engine, in six minutes
#   make test-rest       the other tests, in 20 minutes; agents learn their toys with one seed each
#   make test-all        both
#   make test-tools      the tests of benchmarks/ and tools/, which no user runs
#   make test-pythons    the unit tests that need no torch, with each other Python from 3.11 to 3.13
#   make test-learning   every learning proof in full, three seeds each
#   make test-mutations  small mistakes in the package, and the share that unit tests notice
#   make fuzz SECONDS=60 input at random, so many seconds for each kind of it; see tests/fuzz
#   make site            the documentation as a site, in build/site; the reference is made of the code
#   make check           formatting, types, import layers, and both descriptions of the DAG
#   make peer            install mlagents-learn 1.1.0 in .venv-mlagents, for benchmarks/
#   make clean           remove builds, results and logs; DVC's cache and MLflow's store stay
#
# Variables:
#   PYTHON=python3.12              the interpreter that makes .venv (3.11 to 3.13)
#   LOCKED=1                       install only packages whose sha256 is in locks/
#   TORCH_INDEX_URL=<index>        where pip finds torch, for example PyTorch's index of CPU-only
#                                  builds, which spares gigabytes of CUDA libraries; empty: pip's own
#   VENV=<folder>                  use this virtual environment as it is, and install nothing
#   PEER_PYTHON=python3.10         the interpreter for mlagents-learn 1.1.0, the reference
#   TEST_PROCESSES=1               how many tests run at once (half as many again as cores)
#   PYTHONS="3.12 3.13"            test only these, which are on PATH or below PYENV_ROOT
#   TARGET="demo onnx"             fuzz only these (tests/fuzz/test_<target>.py)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX_URL ?=
PEER_PYTHON ?= python3.10
# Half as many again as cores: many tests wait for processes that they have started.
TEST_PROCESSES ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) * 3 // 2)')
SECONDS ?= 60
PYTHONS ?= 3.11 3.12 3.13
TEST_TOOLS := hypothesis pytest pytest-timeout pytest-xdist
WITHOUT_TORCH := settings wire demos envs simulators data test_config_command.py
ifdef VENV
STAMP :=
else
VENV := $(CURDIR)/.venv
STAMP := $(VENV)/.installed
endif
# Without dependencies, because the locks name all of them.
CHECKED := --require-hashes --no-deps
TORCH := $(shell grep -m1 '^torch==' constraints.txt)
export PATH := $(VENV)/bin:$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export NO_MKDOCS_2_WARNING := true
# Each process has one core, so its arithmetic one thread.
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n $(TEST_PROCESSES)
# Benchmarks have no complete types, so only their names and calls are checked.
NAMES_ONLY := $(addprefix --disable-error-code=,arg-type assignment call-overload func-returns-value index misc \
  operator union-attr var-annotated)
# A file's tests share fixtures; the slowest files come first, as tests/conftest.py orders them.
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help install run test test-rest test-all test-tools test-pythons test-learning test-mutations \
  fuzz site check peer lock clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(STAMP)

$(VENV)/.installed: pyproject.toml constraints.txt $(if $(LOCKED),$(wildcard locks/*.txt))
	@echo "making .venv: two to seven minutes, most of them for downloads, and about 3 GB"
	@echo "1 of 3: the virtual environment, of $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: $(TORCH)"
	@$(VENV)/bin/python -m pip install $(if $(TORCH_INDEX_URL),--$(if $(LOCKED),extra-)index-url $(TORCH_INDEX_URL)) \
	  $(if $(LOCKED),$(CHECKED) -r locks/$(if $(TORCH_INDEX_URL),torch-cpu,torch).txt,$(TORCH))
	@echo "3 of 3: everything else, about $$(grep -c == constraints.txt) packages"
	@$(VENV)/bin/python -m pip install $(if $(LOCKED),$(CHECKED) -r locks/train.txt -r locks/dev.txt,-c constraints.txt -e '.[dev]')
	@$(if $(LOCKED),$(VENV)/bin/python -m pip install --no-deps --no-build-isolation -e .)
	@touch $@
	@echo "done: source .venv/bin/activate"

run: $(STAMP)
	pipeline run --cores 2

test: $(STAMP)
	$(PYTEST) $(BY_FILE) -m "not slow and not tools"

test-rest: $(STAMP)
	$(PYTEST) $(BY_FILE) -m "slow and not tools"

test-all: test test-rest

test-tools: $(STAMP)
	$(PYTEST) $(BY_FILE) tests/benchmarks tools

# PyPI has no small build of torch, so the other Pythons test what stands below `nets`.
test-pythons: $(STAMP)
	@for version in $(PYTHONS); do \
	  if [ "$$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = $$version ]; then \
	    echo "Python $$version: that of .venv, which \`make test\` tests"; continue; \
	  fi; \
	  own=.venv-$$version; \
	  if [ ! $$own/.installed -nt constraints.txt ] || [ ! $$own/.installed -nt pyproject.toml ]; then \
	    for found in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python ""; do \
	      if [ -n "$$found" ] && $$found -c "" 2> /dev/null; then break; fi; \
	    done; \
	    if [ -z "$$found" ]; then echo "Python $$version: skipped, it is neither on PATH nor below PYENV_ROOT"; continue; fi; \
	    $$found -m venv $$own; \
	    $$own/bin/python -m pip install --quiet -c constraints.txt -e '.[games,minari]' 'mujoco-core[rendering]' optuna pandas pyarrow $(TEST_TOOLS); \
	    touch $$own/.installed; \
	  fi; \
	  echo "Python $$version:"; \
	  $$own/bin/python -W error -m compileall -q -f src tests benchmarks docs workflow; \
	  PATH="$$PWD/$$own/bin:$$PATH" $(PYTEST) $(BY_FILE) -q -m "not slow" $(WITHOUT_TORCH:%=tests/unit/%); \
	done

test-learning: $(STAMP)
	$(PYTEST) --dist load tests/learning --learning-seeds 3 --learning-table results/learning.md

test-mutations: $(STAMP)
	OMP_NUM_THREADS=1 python tools/mutations

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 python tools/fuzzing --seconds $(SECONDS) $(addprefix --target ,$(TARGET))

check: $(STAMP)
	ruff check .
	ruff format --check .
	mypy
	MYPYPATH=src:benchmarks mypy --config-file= --ignore-missing-imports $(NAMES_ONLY) benchmarks
	lint-imports
	snakefmt --check Snakefile workflow
	pipeline plan --check
	python -m pytest -q -n 0 tests/workflow/test_parity.py::test_dvc_and_snakemake_describe_the_same_dag
	mkdocs build  # not --quiet, which counts no warnings

# Strict: a page that is in no menu, and a link that leads to nothing, are errors (mkdocs.yml).
site: $(STAMP)
	mkdocs build
	@echo "open $(CURDIR)/build/site/index.html"

peer:
	$(PEER_PYTHON) -m venv .venv-mlagents
	.venv-mlagents/bin/python -m pip install --quiet 'setuptools<70' wheel
	.venv-mlagents/bin/python -m pip install --quiet --ignore-requires-python mlagents==1.1.0 mlagents-envs==1.1.0 torch==2.6.0

# uv locks for all platforms and Pythons at once. Each file leaves out the packages of those before
# it: torch and its CUDA libraries, which another index replaces; what reproduces results; the rest.
# Builds of torch from TORCH_INDEX_URL have other bytes, so torch-cpu.txt has their hashes.
COMPILE = .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header -c constraints.txt
EXCEPT = $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' $(1))
lock:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip install --quiet 'uv>=0.9,<1'
	echo torch | $(COMPILE) --python-version 3.11 - -o locks/torch.txt
	$(if $(TORCH_INDEX_URL),echo '$(TORCH)' | $(COMPILE) --python-version 3.11 \
	  --index $(TORCH_INDEX_URL) --index-strategy unsafe-best-match --no-emit-index-url - -o locks/torch-cpu.txt)
	echo 'setuptools-scm wheel' | tr ' ' '\n' | $(COMPILE) --python-version 3.11 pyproject.toml - \
	  --extra train --extra games --extra minari --extra hub $(call EXCEPT,locks/torch.txt) -o locks/train.txt
	$(COMPILE) --python-version 3.11.5 pyproject.toml --extra dev --extra video \
	  $(call EXCEPT,locks/torch.txt locks/train.txt) -o locks/dev.txt

clean:
	rm -rf build results .snakemake logs benchmarks/stages
