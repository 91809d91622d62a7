# Each target builds .venv on its first call; PYTHON=/path/to/python uses a ready environment instead.
#   make train ARGS="data=cora"     make test ARGS="tests/training -x"     make help

SYSTEM_PYTHON = python3
PYTHON = .venv/bin/python
# Named exactly, so that each machine gets this release. The index of pip decides whether it is built for CPUs or, as on PyPI, for CUDA.
TORCH = torch==2.13.0
JOBS = $(shell nproc 2>/dev/null || echo 1)
ARGS =
GRID = covering

PIP = $(PYTHON) -m pip --quiet --quiet --disable-pip-version-check
# Each process would compile what it imports of tests and of the package again if it kept nothing.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -q --durations=25
GPU = $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

ifeq ($(PYTHON),.venv/bin/python)
RUN_ENV = .venv/run.stamp
TEST_ENV = .venv/test.stamp
DOCS_ENV = .venv/docs.stamp
endif

.PHONY: help train test test-full test-gpu test-sparse test-versions lint types check docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "%-13s %s\n", $$1, $$2 }'

train: $(RUN_ENV)  ## run train.py with ARGS
	$(PYTHON) train.py $(ARGS)

test: $(TEST_ENV)  ## run the tests that need no GPU
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not cuda and not sparse" --grid=$(GRID) $(ARGS)

test-full: GRID = full
test-full: test  ## run them on every case of each grid

test-gpu: $(TEST_ENV)  ## run the tests that need a GPU
	$(PYTEST) -m cuda $(ARGS)

test-sparse: $(TEST_ENV)  ## build torch_sparse and run the tests that need it
	$(PYTHON) .ci/install_torch_sparse.py
	$(PYTEST) -m sparse $(ARGS)

test-versions:  ## try the oldest and the newest releases of torch and PyTorch Geometric
	$(SYSTEM_PYTHON) .ci/try_versions.py

check: lint types  ## run lint and types

lint: $(TEST_ENV)  ## check style with ruff
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(TEST_ENV)  ## check types with mypy
	$(PYTHON) -m mypy

docs: $(DOCS_ENV)  ## build the documentation site
	$(PYTHON) -m mkdocs build --strict $(ARGS)

bench: $(RUN_ENV)  ## run a benchmark with ARGS
	$(PYTHON) -m benchmarks $(ARGS)

clean:  ## delete what make and the tools have made, but no outputs of runs
	rm -rf .venv build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./outputs -prune -o -path ./multirun -prune -o -name __pycache__ -prune -exec rm -rf {} +

.venv/run.stamp: pyproject.toml
	@echo "setting up .venv (first call only)"
	@test -x $(PYTHON) || $(SYSTEM_PYTHON) -m venv .venv
	@$(PIP) install "$(TORCH)" "setuptools>=77"
	@$(PIP) install --editable ".[train,data$(if $(GPU),$(CUDA_EXTRA))]"
	@touch $@

.venv/test.stamp: .venv/run.stamp
	@$(PIP) install --editable ".[test,dev$(if $(GPU),,$(comma)ci)]"
	@touch $@

.venv/docs.stamp: .venv/run.stamp
	@$(PIP) install --editable ".[docs]"
	@touch $@

comma := ,
# cupy must match the CUDA version that torch was built for.
CUDA_EXTRA = $(comma)$(shell $(PYTHON) -c "import torch; print('cuda' + torch.version.cuda.split('.')[0])")
