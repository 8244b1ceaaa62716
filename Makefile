# Each target sets itself up: its own .venv, pinned by constraints.txt. Needed: Python 3.11+ and make.
#
#   make demo ARGS="--seed 0"   train the tiny agent, watch it learn
#   make test ARGS="-k router"  the quick tests, or a part of them (8 minutes on two cores)
#   make test-all               the slow ones too, as CI runs them
#   make chaos                  faults, searched for long: 5,000 rollouts, 50 trainers, 100,000 simulated meshes
#   make check                  format, lint, types, arrows, house rules, docs
#   make docs                   the documentation site, in site/
#   make bench BENCH=name       every benchmark, or one
#   make bench-peers            other gateways for the interception benchmark, in .venv-peers (1.4 GB)
#   make setup                  only the .venv        (PYTHON=python3.12 picks the interpreter)
#   make sglang                 a real SGLang in .venv-sglang, for tests/contract (3 GB, minutes)
#   make test-sglang            the engines' contract, ours and a real SGLang, in both stream forms
#   make test-ray               the backends' contract, and a run and the scheduler in a Ray cluster of several
#                               nodes; installs the extra `ray` (290 MB)
#   make test-hosts             a mesh over hosts of its own (network namespaces), with faults of the network;
#                               as root, 3 minutes on two cores
#   make test-containers        builds both images and runs docker/compose.yaml by podman; root, Debian's packages,
#                               4 GB of images
#   make test-clients           real agents and SDKs through the gateway; writes docs/reference/clients.md
#   make clients                only their environments, in .venv-clients (2.5 GB; npm for four)
#   make clean                  remove the .venv and the caches; runs/ stays

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SGLANG := .venv-sglang
CLIENTS := .venv-clients
PINS    := tests/clients/requirements
PEERS   := .venv-peers
PYTHON ?=
ARGS   ?=
BENCH  ?= $(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))
SOURCE := rollmesh tests $(wildcard benchmarks examples)

.PHONY: help demo test test-all chaos clients test-clients test-sglang test-ray test-hosts test-containers check format lint types arrows house docs bench \
        bench-peers setup sglang clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(STAMP)
	@$(BIN)/python -m rollmesh.cli.main demo $(ARGS)

# Two processes share the test files, in the order of their folders: the long files of tests/flow
# come early, so that neither is left alone with one. ARGS="-n0" is one process, which a debugger needs.
QUICK := not slow and not clients and not chaos and not containers

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$(QUICK)" $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-clients: $(STAMP) clients
	@sh tests/clients/offline $(BIN)/python -m pytest -m clients tests/clients tests/hosts $(ARGS)

test-sglang: $(STAMP) sglang
	@$(BIN)/python -m pytest tests/contract $(ARGS)

test-ray: $(VENV)/.ray
	@$(BIN)/python -m pytest tests/contract/test_tensor_backends.py tests/contract/test_ray_fleet.py tests/contract/test_ray_up.py $(ARGS)

# These tests wait most of the time, so that two cores run three.
test-hosts: $(STAMP)
	@$(BIN)/python -m pytest -n 3 --dist load tests/hosts $(ARGS)

test-containers: $(STAMP)
	@nice $(BIN)/python -m pytest -m containers tests/containers $(ARGS)

chaos: $(STAMP)
	@nice -n 15 $(BIN)/python -m pytest -m chaos -s tests/flow/test_chaos.py tests/flow/test_recovery.py tests/flow/test_publications.py tests/contract/test_pauses.py tests/security/test_kills_under_isolation.py tests/security/test_fuzz.py
	@$(BIN)/python -m tests.sim.search $(ARGS)
	@$(BIN)/python -m tests.sim.scheduler_search $(ARGS)

check: format lint types arrows house docs

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy $(SOURCE)

arrows: $(STAMP)
	$(BIN)/lint-imports --no-logo

house: $(STAMP)
	$(BIN)/python -m pytest -q tests/house

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet --clean

bench: $(STAMP)
	@for name in $(BENCH); do \
	    echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; \
	done

bench-peers: $(patsubst benchmarks/peers/%.txt,$(PEERS)/%/.installed,$(wildcard benchmarks/peers/*.txt))

setup: $(STAMP)

sglang: $(SGLANG)/.installed

clients: $(patsubst $(PINS)/%.txt,$(CLIENTS)/%/.installed,$(wildcard $(PINS)/*.txt)) \
         $(patsubst $(PINS)/%/package.json,$(CLIENTS)/%/.installed,$(wildcard $(PINS)/*/package.json))

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp makes a second call cost nothing; a changed pin or dependency installs again.
$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	@echo "rollmesh: installing the pinned packages into $(VENV); minutes, once (torch is large)"
	@$(BIN)/python -m pip install $$(test -t 1 || echo --quiet) -c constraints.txt pip
	@$(BIN)/python -m pip install $$(test -t 1 || echo --quiet) -c constraints.txt \
	    --group dev --editable '.[train]'
	@touch $@

$(VENV)/.docs: $(STAMP)
	@echo "rollmesh: installing MkDocs into $(VENV)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	@touch $@

$(VENV)/.ray: $(STAMP)
	@echo "rollmesh: installing Ray into $(VENV) (290 MB)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[train,ray]'
	@touch $@

$(BIN)/python:
	@PYTHON="$(PYTHON)" sh .ci/venv $(VENV)

# SGLang asks for CUDA wheels that a CPU never calls: torch brings its own needs, the rest none.
$(SGLANG)/.installed: tests/contract/sglang/pins.txt
	@echo "rollmesh: installing SGLang into $(SGLANG); minutes, once (3 GB)"
	@PYTHON="$(PYTHON)" sh .ci/venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet -c tests/contract/sglang/pins.txt torch
	@$(SGLANG)/bin/python -m pip install --quiet --no-deps -r tests/contract/sglang/pins.txt
	@touch $@

$(CLIENTS)/%/.installed: $(PINS)/%.txt
	@echo "rollmesh: installing a client into $(CLIENTS)/$*"
	@mkdir -p $(CLIENTS)
	@PYTHON="$(PYTHON)" sh .ci/venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install --quiet -r $<
	@touch $@

$(CLIENTS)/%/.installed: $(PINS)/%/package.json $(PINS)/%/package-lock.json
	@echo "rollmesh: installing a client into $(CLIENTS)/$*"
	@mkdir -p $(CLIENTS)/$* && cp $^ $(CLIENTS)/$*/
	@cd $(CLIENTS)/$* && npm install --ignore-scripts --no-audit --no-fund --silent
	@touch $@

$(PEERS)/%/.installed: benchmarks/peers/%.txt
	@echo "rollmesh: installing a peer into $(PEERS)/$*"
	@mkdir -p $(PEERS)
	@PYTHON="$(PYTHON)" sh .ci/venv $(PEERS)/$*
	@$(PEERS)/$*/bin/python -m pip install --quiet -r $<
	@touch $@
