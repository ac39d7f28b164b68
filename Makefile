# Each target that needs the environment makes it first. To use one that exists already (a ROCm container, say):
#     make test-gpu PY=python3
PY ?= .venv/bin/python
PYTEST_ARGS ?=
DEMO_ARGS ?=
FUZZ_ARGS ?= --minutes 10
ENV := $(if $(filter .venv/bin/python,$(PY)),.venv/.complete)
# A second Triton, which PYTHONPATH puts before the environment's.
OTHER := $(if $(ENV),.triton-3.9.0/.complete)

# The ops whose machine code the simulator runs; the rest of the suite does not reach a kernel, or repeats these.
SIM_ARCHS ?= gfx942 gfx950
SIM_TESTS ?= tests/simulator tests/test_mha.py tests/test_extend.py tests/test_mla_extend.py tests/test_mla_decode.py tests/test_cut.py tests/test_mla_cache.py tests/test_cases_router.py tests/test_bad_input.py

.PHONY: help venv demo test test-sim test-gpu test-vllm fuzz lint check clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  \1\t/' | expand -t 14

venv: $(ENV)     ## .venv with all that the demo and the tests need

.venv/.complete: pyproject.toml .ci/constraints.txt .ci/venv
	.ci/venv .venv

demo: $(ENV)     ## serve a real model through prefill, extend and decode; on the CPU where there is no GPU
	$(PY) -m tritonattn demo $(DEMO_ARGS)

test: $(ENV)     ## all tests on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(PYTEST_ARGS)

test-sim: $(ENV) ## the op tests and every table row as gfx942 and gfx950 machine code, in the simulator
	for arch in $(SIM_ARCHS); do TRITONATTN_SIM=$$arch TRITONATTN_SIM_THREADS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(SIM_TESTS) $(PYTEST_ARGS) || exit 1; done

test-gpu: $(ENV) ## the same tests on the GPU that torch sees
	$(PY) -m pytest $(PYTEST_ARGS)

test-vllm: .venv-vllm/.complete ## the plug-in under a real vLLM, on the CPU, in an environment of its own
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

.venv-vllm/.complete: pyproject.toml .ci/constraints.txt .ci/requirements-vllm.txt .ci/venv-vllm
	.ci/venv-vllm .venv-vllm

fuzz: $(ENV)     ## ten minutes of random calls, sound and unsound; on the CPU where there is no GPU (FUZZ_ARGS)
	OMP_NUM_THREADS=1 $(PY) -m tritonattn fuzz $(FUZZ_ARGS)

lint: $(ENV)     ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

check: $(ENV) $(OTHER) ## compile every table row for gfx942 and gfx950, without a GPU, and judge the code; with Triton 3.6.0 and 3.9.0
	for triton in "" $(dir $(OTHER)); do PYTHONPATH=$$triton:$$PYTHONPATH $(PY) -m tritonattn check --arch gfx942,gfx950 || exit 1; done

.triton-%/.complete:
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$*
	touch $@

clean:           ## everything that git ignores
	git clean -fdXq
