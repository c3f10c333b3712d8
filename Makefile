# Every task of the repository. `make serve` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup serve test test-slow test-all check format bench docs size gpu-test clean

help:  ## show the tasks
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) scripts/install_torch.py $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

setup: $(STAMP)  ## create .venv with the cardcage command in it

serve: $(STAMP)  ## serve the embedded model on 127.0.0.1:8000
	$(BIN)/cardcage serve

test: $(DEV_STAMP)  ## run the default tests
	$(BIN)/python -m pytest

test-slow: $(DEV_STAMP)  ## run the slow tier
	$(BIN)/python -m pytest --timeout 1200 -m 'slow and not gpu'

test-all: test test-slow  ## both tiers

gpu-test:  ## run the tests that need a GPU, with the Python that is active
	$(PYTHON) -m pytest -m gpu

check: $(DEV_STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_docs.py

format: $(DEV_STAMP)  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure the CPU workloads and write benchmarks/results
	$(BIN)/python benchmarks/run.py c1 c2 c3 c4 --out benchmarks/results/latest-cpu.json

docs: $(DEV_STAMP)  ## write the generated pages
	$(BIN)/cardcage plugins --markdown > docs/plugins.md
	$(BIN)/python scripts/check_docs.py --write

size:  ## print how long the code is, by part
	@$(PYTHON) scripts/size.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
