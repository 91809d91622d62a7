# Each target builds .venv on its first call; PYTHON=/path/to/python uses a ready environment instead.
#   make train ARGS="data=cora"     make test ARGS="tests/training -x"     make test-full

SYSTEM_PYTHON = python3
PYTHON = .venv/bin/python
# Named exactly: a range would let pip take a newer build with several GB of CUDA packages on a machine without a GPU.
TORCH = torch==2.13.0
JOBS = $(shell nproc 2>/dev/null || echo 1)
ARGS =
GRID = covering

PIP = $(PYTHON) -m pip --quiet --quiet --disable-pip-version-check
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations=25
GPU = $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

ifeq ($(PYTHON),.venv/bin/python)
RUN_ENV = .venv/run.stamp
TEST_ENV = .venv/test.stamp
endif

.PHONY: train test test-full test-gpu test-sparse lint types check bench clean

train: $(RUN_ENV)
	$(PYTHON) train.py $(ARGS)

test: $(TEST_ENV)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not cuda and not sparse" --grid=$(GRID) $(ARGS)

test-full: GRID = full
test-full: test

test-gpu: $(TEST_ENV)
	$(PYTEST) -m cuda $(ARGS)

test-sparse: $(TEST_ENV)
	$(PYTHON) .ci/install_torch_sparse.py
	$(PYTEST) -m sparse $(ARGS)

check: lint types

lint: $(TEST_ENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(TEST_ENV)
	$(PYTHON) -m mypy

bench: $(RUN_ENV)
	$(PYTHON) -m benchmarks $(ARGS)

clean:
	rm -rf .venv build dist outputs multirun *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/run.stamp: pyproject.toml
	@echo "setting up .venv (first call only)"
	@test -x $(PYTHON) || $(SYSTEM_PYTHON) -m venv .venv
	@$(PIP) install "$(TORCH)" "setuptools>=77"
	@$(PIP) install --editable ".[train,data$(if $(GPU),$(CUDA_EXTRA))]"
	@touch $@

.venv/test.stamp: .venv/run.stamp
	@$(PIP) install --editable ".[test,dev$(if $(GPU),,$(comma)ci)]"
	@touch $@

comma := ,
# cupy must match the CUDA version that torch was built for.
CUDA_EXTRA = $(comma)$(shell $(PYTHON) -c "import torch; print('cuda' + torch.version.cuda.split('.')[0])")
