# Each target does all its own set-up, in .venv. `make demo` and `make test` are the two to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check style types setup benchmark clean

demo: $(READY)
	$(BIN)/reprieve demo --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest

check: style types test

style: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(READY)
	$(BIN)/mypy

benchmark: $(READY)
	$(BIN)/python benchmarks/engine.py --out runs/benchmark

setup: $(READY)

# torch first, from the constraints: its CPU build where the machine offers one.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
