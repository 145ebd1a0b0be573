# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Some virtual machines advertise AMX and fault on it; without the variable torch would use it. Harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# So that errors and logs name files the same way wherever the tests run.
export PYTHONDONTWRITEBYTECODE = 1
NATIVE := $(wildcard csrc/*.* csrc/*/*.* tests/native/*.*)

.PHONY: demo test test-all lint format bench clean

demo: $(VENV)/demo
	$(BIN)/python examples/digits.py

test: $(VENV)/test
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/test
	$(BIN)/python -m pytest

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(VENV)/bench
	$(BIN)/python -m pytest benchmarks

clean:
	rm -rf $(VENV) build out *.egg-info drq_fast/*.so

# One stamp per set of packages, made again when the package's description or its native code changes.
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/*/*.*)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(SOURCES) | $(VENV)/bin/python
	$(PIP) torch numpy
	$(PIP) -e .
	touch $@

$(VENV)/demo $(VENV)/test $(VENV)/lint $(VENV)/bench: $(VENV)/%: $(VENV)/installed
	$(PIP) -e ".[$*]"
	touch $@
