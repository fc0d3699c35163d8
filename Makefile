# make demo, make test: everything they need is set up first, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Small models on few cores: one thread per process beats several that wait for each other.
export OMP_NUM_THREADS ?= 1
# Where it is set, each of some hundred processes compiles all modules again, and pytest rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest
# One more than cores: tests of several processes often wait.
WORKERS ?= $(shell expr $$(nproc) + 1)
# Files are not divided: their tests share processes.
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Other projects' clients of the API: versions are the newest, so what fails may be theirs.
CLIENTS := .venv-clients

.PHONY: setup demo test test-slow test-gpu test-clients lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh deploy/setup.sh
	touch $@

# Only one of its processes computes at a time.
demo: export OMP_NUM_THREADS = $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
demo: setup
	$(BIN)/python -m benchmarks.demo

test: setup
	$(PYTEST) $(IN_PARALLEL)

test-slow: setup
	$(PYTEST) $(IN_PARALLEL) -m slow

test-gpu: setup
	$(PYTEST) -m "" tests/gpu

test-clients: setup $(CLIENTS)/.installed
	CLIENTS=$(CLIENTS) $(PYTEST) tests/clients/third_party.py tests/clients/scores.py

$(CLIENTS)/.installed: deploy/clients.sh
	PYTHON=$(PYTHON) CLIENTS=$(CLIENTS) sh deploy/clients.sh
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
