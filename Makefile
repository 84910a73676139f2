# Every target makes what it needs: `make test` works on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEVICE := lightning_zeroplus/testing/simulated_cuda
# Where DeepSpeed and the simulated device keep what they compile; for pytest, too.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

.PHONY: demo test test-all matrix compat lint docs clean

demo: $(STAMP)
	$(BIN)/python examples/cached_contrastive.py

# Two workers: a test waits for its ranks half of the time. A file stays on one worker, which keeps its ranks.
test: $(VENV)/.simulated_cuda
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not alone'

# What `make test` leaves out: whole jobs, more combinations, and what measures time. A worker that has no tests left
# takes some of the other's.
test-all: $(VENV)/.simulated_cuda
	$(BIN)/python -m pytest --thorough -n 2 --dist worksteal -m '(slow or thorough) and not alone'
	$(BIN)/python -m pytest --thorough -m alone

matrix: $(STAMP)
	$(BIN)/python -m pytest -m matrix --every-cell

# Releases, each in a folder of its own: the oldest and the newest supported torch (5 GB each), the oldest supported
# DeepSpeed and 0.19.2. Others: TORCH_VERSIONS="2.14.1", none: TORCH_VERSIONS=, DEEPSPEED_VERSIONS="0.19.4 path/of/a.whl".
# A release that cannot be installed fails; `make test-all`, which asks for none, skips it.
compat: export TORCH_VERSIONS ?= 2.12.1 2.15.0
compat: export DEEPSPEED_VERSIONS ?= 0.18.9 0.19.2
compat: $(STAMP)
	$(BIN)/python -m pytest --every-cell tests/upstream/compat tests/upstream/test_upstream_contract.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# From this repository alone; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build
	@echo "docs/_build/index.html"

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis lightning_logs checkpoints outputs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and "constraints.txt pins releases for Python 3.11.5 or newer: set PYTHON=python3.12")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Installed again only when the declared or pinned dependencies change.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the package and its pinned dependencies into $(VENV) (several minutes the first time: torch is large)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test,examples,docs]'
	@touch $@
	@echo "Installed"

# The tests run the GPU's path on a simulated device where there is no GPU; without a compiler they skip it.
$(VENV)/.simulated_cuda: $(STAMP) $(wildcard $(DEVICE)/native/*)
	@echo "Building the simulated CUDA device"
	@$(BIN)/python -m lightning_zeroplus.testing.simulated_cuda --build || echo "Its tests will be skipped, or say why"
	@touch $@
