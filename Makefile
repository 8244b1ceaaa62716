# Each target sets itself up: its own .venv, pinned by constraints.txt. Needed: Python 3.11+ and make.
#
#   make demo ARGS="--seed 0"   train the tiny agent, watch it learn
#   make test ARGS="-k ledger"  the whole test suite, or a part of it
#   make check                  format, lint, types, arrows, house rules
#   make bench BENCH=name       every benchmark, or one
#   make setup                  only the .venv        (PYTHON=python3.12 picks the interpreter)
#   make clean                  remove the .venv and the caches; runs/ stays

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTHON ?=
ARGS   ?=
BENCH  ?= $(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))
SOURCE := rollmesh tests $(wildcard benchmarks examples)

.PHONY: help demo test check format lint types arrows house bench setup clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(STAMP)
	@$(BIN)/python -m rollmesh.cli.main demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

check: format lint types arrows house

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

bench: $(STAMP)
	@for name in $(BENCH); do \
	    echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; \
	done

setup: $(STAMP)

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

$(BIN)/python:
	@PYTHON="$(PYTHON)" sh .ci/venv $(VENV)
