# make demo | test | test-bare | test-gpu | families | integrations | sanitize | lint | bench | matrix. On a fresh machine each
# needs only make and Python >= 3.10.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
ARGS ?=

venv := .venv
bin := $(venv)/bin
# pip would compile 14,000 files on one core; compileall takes all of them, and passes over what is for a newer Python
install := $(bin)/python -m pip --disable-pip-version-check install --quiet --no-compile
compile := $(bin)/python -m compileall -qq -j 0 $(venv)/lib || true
# Tests start many processes: where bytecode may not be kept, each would compile what it imports anew.
tests_env := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
pytest_env := $(tests_env) TILESMITH_REQUIRE_ALL=$(REQUIRE_ALL)
gpu_tools := $(foreach tool,nvidia-smi rocminfo xpu-smi,$(shell command -v $(tool)))
# Without a GPU the CPU build is taken (a tenth of the size); an index that does not answer is only a warning.
cpu_index := $(if $(gpu_tools),,--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo test test-bare test-gpu families integrations sanitize lint bench matrix clean

demo: $(venv)/installed-demo
	@$(bin)/tilesmith demo $(ARGS)

test: $(venv)/installed-dev
	@$(pytest_env) $(bin)/python -m pytest -n $(WORKERS) -q $(ARGS)

# The tests that ask for tools, where these are not to be found: first those of the system, then packages too. What lacks
# its tool skips.
asking := $(addprefix tests/test_,runtime.py codegen_targets.py portable_backend.py browser.py \
  kernels.py::test_compilers_accept_every_kernel kernels.py::test_registers_hold_every_kernel)
asking_triton := $(addprefix tests/test_,offline.py philox.py replay.py tile_pins.py \
  attention_fp8.py::test_kernels_for_sixteen_bits_serve_what_they_are_handed \
  explain.py::test_linear_cross_entropy_on_hopper_tells_its_way)
test-bare: $(venv)/installed-dev
	@$(tests_env) $(bin)/python tests/bare.py vulkan chromium g++ -- -q -n $(WORKERS) $(asking) \
	  -k "swiglu or attention or wgsl_runs or accepts_metal or naga or the_page" $(ARGS)
	@$(tests_env) $(bin)/python tests/bare.py vulkan opengl chromium g++ triton compilers -- -q -n $(WORKERS) \
	  $(asking) $(asking_triton) -k "not golden and not values_and_gradients" $(ARGS)

# GPU_WORKERS processes, spread over the GPUs there are; then the cases that fill a GPU's memory, LARGE_WORKERS (one a GPU)
test-gpu:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q -m "not large" $(if $(GPU_WORKERS),-n $(GPU_WORKERS)) $(ARGS)
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q -m large $(if $(LARGE_WORKERS),-n $(LARGE_WORKERS)) $(ARGS)

# Every model of transformers that tests/all_families.py can build, at a tiny size, plain, optimised and undone; ARGS names
# tasks and families
families: $(venv)/installed-dev
	@$(tests_env) $(bin)/python tests/all_families.py $(ARGS)

# What asks for releases of its own of torch or transformers: training by it with and without ours, in an environment for
# each under build/; ARGS=torchtitan for one of them
needs_axolotl := '$(TORCH)' axolotl
needs_kernels := '$(TORCH)' 'transformers[kernels]>=5.17'
needs_llamafactory := llamafactory
needs_torchtitan := '$(TORCH)' 'torchtitan>=0.3' transformers triton==3.6.0  # it imports Triton
integrations: $(addprefix integration-,$(or $(ARGS),axolotl kernels llamafactory torchtitan))
integration-%:
	@$(PYTHON) -m venv build/integrations/$*
	@build/integrations/$*/bin/python -m pip --disable-pip-version-check install --quiet $(cpu_index) $(needs_$*) \
	  --editable . pytest pytest-timeout
	@$(tests_env) build/integrations/$*/bin/python -m pytest -q -W ignore tests/test_trainers.py tests/test_integrations.py \
	  -k "$*"

# memory accesses and barriers of Hopper's kernels, in processes beside one another
sanitize:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m tilesmith.validate.sanitized $(ARGS)

lint: $(venv)/installed-dev
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@PYTHONPATH=src $(bin)/lint-imports

# the site, into build/site; a broken link is an error. ARGS=serve shows it, anew after each change
.PHONY: docs
docs: $(venv)/installed-docs
	@NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs $(or $(ARGS),build --strict --quiet)

bench: $(venv)/installed-demo
	@$(bin)/tilesmith bench $(or $(ARGS),all)

# docs/triton-releases.md and docs/torch-releases.md, in environments of their own; ARGS=triton or ARGS=torch for one of
# them, ARGS="torch 2.13.0" for some of its releases
matrix: $(venv)/installed-dev
	@$(bin)/python -m tilesmith.validate.matrix $(ARGS)

clean:
	rm -rf $(venv) build dist tilesmith-demo

$(venv)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Tilesmith needs Python 3.10 or newer: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(venv)
	@touch $@

$(venv)/installed-torch: $(venv)/created
	@$(install) $(cpu_index) '$(TORCH)'
	@touch $@

$(venv)/installed-demo: $(venv)/installed-torch pyproject.toml
	@$(install) --editable '.[cli,hf,bench]'
	@$(compile)
	@touch $@

$(venv)/installed-dev: $(venv)/installed-torch pyproject.toml
	@$(install) --editable '.[dev]'
	@$(bin)/python -c 'import triton' 2>/dev/null || $(install) --editable '.[interpreter]'
	@$(compile)
	@touch $@ $(venv)/installed-demo

$(venv)/installed-docs: $(venv)/installed-torch pyproject.toml
	@$(install) --editable '.[docs]'
	@$(compile)
	@touch $@
