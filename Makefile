# `make demo` and `make test` need Python 3.11+ and make; everything else is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test test-oldest proof check check-types check-imports-and-rules bench fuzz gpu gpu-wheels docs clean

setup: .venv/dev.done

.venv/base.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "motet needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Say which to use: make PYTHON=python3.12 ..."; exit 2; }
	@echo "Installing motet into .venv (a minute or two the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --editable .
	@$(BIN)/python -m compileall -q src  # As pip does for what it copies: commands start in a third less time
	@touch $@

.venv/dev.done: .venv/base.done
	@$(PIP) --editable '.[dev]'
	@touch $@

.venv-oldest/dev.done: pyproject.toml constraints.txt constraints-oldest.txt
	@echo "Installing motet with the oldest torch into .venv-oldest (some minutes) ..."
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@{ grep -Ev '^(torch|triton|numpy)==' constraints.txt; cat constraints-oldest.txt; } > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt --editable '.[dev]'
	@touch $@

.venv/bench.done: .venv/dev.done
	@$(PIP) --editable '.[docs]' accelerate lightning
	@if command -v mpirun > /dev/null; then $(PIP) mpi4py; else echo "No mpirun here: Open MPI is left out of benchmarks/collectives.py (on Debian: apt-get install openmpi-bin)."; fi
	@$(PIP) deepspeed || echo "DeepSpeed cannot be installed here: it is left out of benchmarks/data_parallel.py."
	@touch $@

.venv/docs.done: .venv/base.done
	@$(PIP) --editable '.[docs]'
	@touch $@

demo: .venv/base.done        ## train the built-in job on two CPU ranks, in fewer tokens than it has
	@$(BIN)/motet train tiny data.batch_sequences=8 monitor.sample_temperature=0.6 monitor.sample_prompt='        if not isinstance('

test: .venv/dev.done         ## the tests
	@$(BIN)/python scripts/run_tests.py

# What depends on torch: its kernels, collectives, hooks and private names.
OLDEST_TESTS = tests/memory tests/precision tests/models tests/checkpoint tests/collectives tests/parallel \
  $(addprefix tests/train/test_,rehearsal.py measured_memory.py tensor_parallel_training.py pipeline_training.py parity.py twin_of_job.py \
    compiled_training.py replayed_calls.py prefetch.py)

test-oldest: .venv-oldest/dev.done  ## the tests of what depends on torch, under the oldest torch that pyproject.toml allows
	@.venv-oldest/bin/python -m pytest -n 2 --dist worksteal --quiet $(OLDEST_TESTS)

proof: .venv/dev.done        ## the tests with the line coverage of the torch-free half, and the full matrices; may take hours
	@$(BIN)/python scripts/run_tests.py --coverage
	@$(BIN)/python -m pytest -m proof

check: .venv/dev.done        ## lint, types, import directions, rules of names, prose and size
	@$(BIN)/ruff format --check --quiet . || { echo "run .venv/bin/ruff format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(MAKE) --no-print-directory --jobs=2 check-types check-imports-and-rules

check-types: .venv/dev.done
	@$(BIN)/mypy

check-imports-and-rules: .venv/dev.done
	@$(BIN)/lint-imports --no-cache > .venv/lint-imports.txt || { cat .venv/lint-imports.txt; exit 1; }
	@$(BIN)/python scripts/source_rules.py

# Those that train many times take hours, and are started by hand.
BENCHMARKS = $(filter-out benchmarks/compressed_training.py benchmarks/server_training.py benchmarks/mutations.py,$(wildcard benchmarks/*.py))

bench: .venv/bench.done      ## ratios against peers and limits, measured side by side
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

MINUTES ?= 2
fuzz: .venv/dev.done         ## changed input of every kind; MINUTES=30 TARGET=jobs SEED=7, and CASE=123 repeats one
	@$(BIN)/python scripts/fuzz.py --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

gpu:                         ## correctness, speed and memory of a CUDA device; needs torch in $(PYTHON), and no installation
	@$(PYTHON) scripts/gpu.py $(if $(wildcard build/gpu-wheels),--wheels build/gpu-wheels)

PY ?= 3.12
gpu-wheels:                  ## what a GPU machine without a network is missing, for its version of Python: PY=3.12
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(PY) --implementation cp --dest build/gpu-wheels --constraint constraints.txt pydantic pydantic-core annotated-types typing-inspection

docs: .venv/docs.done        ## the site, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
