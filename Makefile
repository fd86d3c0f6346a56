# Two commands: `make retrain` runs the line, `make test` runs the tests. Both make the environment first, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install retrain test use checks sglang peers clean

PYTHON := $(shell command -v python3)
VENV := .venv
STAMP := $(VENV)/.installed
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
PEERS := .peers
PEERS_STAMP := $(PEERS)/.fetched
PEER_VERSIONS := specforge==0.2.0 speculators==0.3.0 speculators==0.4.0 speculators==0.9.0 nemo_automodel==0.7.0

# The stages call `python`; DVC must find the environment's own. Bytecode halves every start.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE :=
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export HF_HUB_OFFLINE := 1

help: ## what there is
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## the environment in .venv, from constraints.txt

$(STAMP): constraints.txt pyproject.toml requirements-data.txt
	@[ -n "$(PYTHON)" ] || { echo "error: no python3 here; install Python 3.11 or later" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$($(PYTHON) --version) found; Python 3.11 or later is needed" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: python3 has no venv; on Debian: apt-get install python3-venv" >&2; exit 2; }
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -c constraints.txt -e '.[dev]'
	$(VENV)/bin/pip install --no-deps -r requirements-data.txt
	@touch $@

retrain: $(STAMP) ## the whole line, then a table of what came out; a second run does nothing
	@dvc repro
	@python -m stages.glance

test: $(STAMP) ## the tests (minutes); ARGS="-m slow" for the slow ones
	@python -m pytest -n logical --maxprocesses 4 $(ARGS)

use: ## another set of parameters: make use PARAMS=llama-3.1-8b
	@[ -n "$(PARAMS)" ] && [ -f "params/$(PARAMS).yaml" ] || { \
	  echo "error: no parameter set '$(PARAMS)'" >&2; \
	  echo "  expected: PARAMS= one of $$(cd params && ls *.yaml 2>/dev/null | sed 's/\.yaml$$//' | xargs)" >&2; exit 2; }
	@cp "params/$(PARAMS).yaml" params.yaml
	@echo "params.yaml is now $(PARAMS); 'dvc params diff' shows what changed"

checks: $(STAMP) ## format, lint, types
	@ruff format --check .
	@ruff check .
	@pyright

sglang: $(SGLANG_STAMP) ## the real SGLang on this CPU, in .venv-sglang (1.6 GB)

$(SGLANG_STAMP): requirements-sglang.txt requirements-sglang-engine.txt $(shell find sglang_cpu -name '*.py' -o -name pyproject.toml)
	[ -x $(SGLANG)/bin/python ] || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -r requirements-sglang.txt
	$(SGLANG)/bin/pip install --no-deps -r requirements-sglang-engine.txt
	@# from a copy: building leaves its traces beside the sources
	@copy=$$(mktemp -d); cp -r sglang_cpu "$$copy"; $(SGLANG)/bin/pip install --no-deps --force-reinstall "$$copy/sglang_cpu"; rm -r "$$copy"
	@touch $@

peers: $(PEERS_STAMP) ## other tools' trainers and readers, for the tests that run them (40 MB)

$(PEERS_STAMP): requirements-peers.txt Makefile | $(STAMP)
	rm -rf $(PEERS)
	@for peer in $(PEER_VERSIONS); do \
	  $(VENV)/bin/pip install -q --no-deps --no-compile --target "$(PEERS)/$${peer/==/-}" "$$peer" || exit 1; done
	$(VENV)/bin/pip install -q --no-deps --no-compile --target $(PEERS)/deps -r requirements-peers.txt
	@touch $@

clean: ## the environments and the work cache; data, models and releases stay
	rm -rf $(VENV) $(SGLANG) $(PEERS) .cache
