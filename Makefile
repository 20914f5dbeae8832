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
.PHONY: help setup test lint format sanitize demo bench clean

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

# csrc/ built a second time, in a tree of links where nothing else finds it. The ops' tests reach 99 % of its lines (by
# gcov), and those of what calls the ops add views and sizes of their own; the rest would be minutes for nothing new.
# Then the ops once more with two threads, idle ones asleep: spinning, they would take the cores from each other.
# Python is preloaded with the runtime the library was linked with, which must come first, and with the C++ library that
# one needs by then. CPython leaks by design. Freed memory is kept back less than usual, as a test counts it. Reports
# are written to stderr, and shown without the frames of torch and Python.
SANITIZED := build/sanitized
RUN_SANITIZED = COMPGEN_BACKEND=cpp OMP_WAIT_POLICY=passive PYTHONPATH=$(CURDIR)/$(SANITIZED):$(CURDIR) \
  LD_PRELOAD="$$(ldd $(SANITIZED)/compgen_fast/_C*.so | awk '/lib(asan|stdc\+\+)\.so/ { printf "%s ", $$3 }')" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:quarantine_size_mb=64:print_legend=0 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  $(BIN)/pytest --quiet -n $(JOBS) --capture=sys -o pythonpath= -p tests.sanitized -p no:faulthandler \
  2> $(SANITIZED)/stderr.log
SHOW_FAULTS := { awk '!/^ *\#[0-9]/ || /\/csrc\//' $(SANITIZED)/stderr.log; \
  echo "sanitize: whole reports in $(SANITIZED)/stderr.log"; exit 1; }
sanitize: setup $(SANITIZED)/.compiled ## the C++ ops' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@find $(SANITIZED) -type l -delete
	@ln -s $(filter-out %.so %/_build_info.json,$(wildcard $(CURDIR)/compgen_fast/*)) $(CURDIR)/kernels $(CURDIR)/bench \
	  $(SANITIZED)/compgen_fast/
	@echo "sanitize: one thread"
	@OMP_NUM_THREADS=1 $(RUN_SANITIZED) tests/ops tests/jets tests/models tests/invert || $(SHOW_FAULTS)
	@echo "sanitize: two threads"
	@OMP_NUM_THREADS=2 $(RUN_SANITIZED) tests/ops || $(SHOW_FAULTS)

demo: setup ## decoders inverted by search and replay against encoders: progress, tables, a page in runs/demo
	@rm -rf runs/demo
	@$(BIN)/cgf study perception --scale quick --out runs/demo

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

$(SANITIZED)/.compiled: $(VENV)/.torch setup.py $(wildcard csrc/*)
	@echo "sanitize: compiling csrc/"
	@mkdir -p $(SANITIZED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" COMPGEN_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext \
	  --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects > $(SANITIZED)/compile.log 2>&1 && \
	  grep -q '"error": null' $(SANITIZED)/compgen_fast/_build_info.json || \
	  { grep -E 'rror|WARNING' $(SANITIZED)/compile.log; \
	  echo "sanitize: csrc/ does not compile with the sanitizers, nothing was tested. Log: $(SANITIZED)/compile.log"; \
  exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py constraints.txt | $(VENV)/.compiled
	@echo "setup: installing compgen-fast and its tools"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@
