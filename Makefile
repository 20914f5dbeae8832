# Everything runs in .venv, made on first use. `make` alone lists the targets.

PYTHON ?= python3
JOBS ?= 2
# torch's CUDA and ROCm builds pin their own triton (2.13.0 from PyPI: 3.7.1), its CPU build brings none. A line in
# constraints.txt would make the first uninstallable, so this version is asked for only where torch brought nothing.
TRITON := 3.9.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq
# An op without kernels of its own, made of one that has: seconds of interpreting for nothing new.
INTERPRETED := tests/ops tests/kernels --ignore tests/ops/test_projected_slot_attention.py
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/pytest --quiet -n $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help setup test lint format demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed $(VENV)/.compiled ## virtual environment, pinned torch, compiled kernels, installed package

test: lint ## format, lint and type checks, then the tests once per backend
	@echo "tests: the backend each device gets by itself"
	@$(RUN_TESTS) tests
	@echo "tests: plain torch"
	@COMPGEN_BACKEND=torch $(RUN_TESTS) tests/ops tests/models tests/jets
	@echo "tests: Triton's source in the interpreter"
	@COMPGEN_BACKEND=triton TRITON_INTERPRET=1 $(RUN_TESTS) $(INTERPRETED)

# mypy knows packages by where they lie, so it is shown a tree of links in which kernels/ and bench/ lie where they are
# installed.
TREE := build/installed_tree
lint: setup ## ruff and mypy, changing nothing
	@$(BIN)/ruff format --quiet --check . || { echo "some files are not formatted: run make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@rm -rf $(TREE) && mkdir -p $(TREE)/compgen_fast
	@ln -s $(CURDIR)/compgen_fast/* $(CURDIR)/kernels $(CURDIR)/bench $(TREE)/compgen_fast/
	@cd $(TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
	  --no-error-summary -p compgen_fast

format: setup ## rewrite the sources the way `make lint` wants them
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

demo: setup ## decoders inverted by search and replay against encoders: progress, tables, a page in runs/demo
	@rm -rf runs/demo
	@$(BIN)/compgen study perception --scale quick --out runs/demo

bench: setup ## the benchmark suites under pytest-benchmark, one thread
	@OMP_NUM_THREADS=1 $(BIN)/pytest --quiet bench

clean: ## remove the environment, builds and caches
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	@rm -f compgen_fast/_C*.so compgen_fast/_build_info.json

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "compgen-fast needs Python 3.11 or newer; $(PYTHON) is older or missing. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setup: $(VENV) with pinned torch"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch setuptools wheel ninja
	@$(BIN)/python -c 'import sys, importlib.util as u; sys.exit(u.find_spec("triton") is None)' || \
	  $(PIP) install -c constraints.txt "triton==$(TRITON); platform_system == 'Linux'"
	@touch $@

# setup.py succeeds without a working compiler, so the outcome is read from what it wrote.
$(VENV)/.compiled: $(VENV)/.torch setup.py $(wildcard csrc/*)
	@echo "setup: compiling csrc/"
	@mkdir -p build
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace > build/compile.log 2>&1 || \
	  { cat build/compile.log; exit 1; }
	@grep -q '"error": null' compgen_fast/_build_info.json || \
	  { grep -E 'error|WARNING' build/compile.log; echo "setup: going on without C++ kernels. Log: build/compile.log. Try again: touch csrc/* && make setup"; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py constraints.txt | $(VENV)/.compiled
	@echo "setup: installing compgen-fast and its tools"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@
