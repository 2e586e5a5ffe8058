# make demo | test | test-gpu | sanitize | lint | bench | matrix. On a fresh machine each needs only make and Python >= 3.10.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
ARGS ?=

venv := .venv
bin := $(venv)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
pytest_env := OMP_NUM_THREADS=1 TILESMITH_REQUIRE_ALL=$(REQUIRE_ALL)
gpu_tools := $(foreach tool,nvidia-smi rocminfo xpu-smi,$(shell command -v $(tool)))
# Without a GPU the CPU build is taken (a tenth of the size); an index that does not answer is only a warning.
cpu_index := $(if $(gpu_tools),,--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo test test-gpu sanitize lint bench matrix clean

demo: $(venv)/installed-demo
	@$(bin)/tilesmith demo $(ARGS)

test: $(venv)/installed-dev
	@$(pytest_env) $(bin)/python -m pytest -n $(WORKERS) -q $(ARGS)

# GPU_WORKERS processes, spread over the GPUs there are; then the cases that fill a GPU's memory, LARGE_WORKERS (one a GPU)
test-gpu:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q -m "not large" $(if $(GPU_WORKERS),-n $(GPU_WORKERS)) $(ARGS)
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q -m large $(if $(LARGE_WORKERS),-n $(LARGE_WORKERS)) $(ARGS)

# memory accesses and barriers of Hopper's kernels, in processes beside one another
sanitize:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m tilesmith.validate.sanitized $(ARGS)

lint: $(venv)/installed-dev
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@PYTHONPATH=src $(bin)/lint-imports

bench: $(venv)/installed-demo
	@$(bin)/tilesmith bench $(or $(ARGS),all)

matrix: $(venv)/installed-dev
	@$(bin)/python -m tilesmith.validate.matrix $(ARGS)

clean:
	rm -rf $(venv) build dist tilesmith-demo

$(venv)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Tilesmith needs Python 3.10 or newer: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(venv)
	@touch $@

$(venv)/installed-torch: $(venv)/created
	@$(pip) install --quiet $(cpu_index) '$(TORCH)'
	@touch $@

$(venv)/installed-demo: $(venv)/installed-torch pyproject.toml
	@$(pip) install --quiet --editable '.[cli,hf,bench]'
	@touch $@

$(venv)/installed-dev: $(venv)/installed-torch pyproject.toml
	@$(pip) install --quiet --editable '.[dev]'
	@$(bin)/python -c 'import triton' 2>/dev/null || $(pip) install --quiet --editable '.[interpreter]'
	@touch $@ $(venv)/installed-demo
