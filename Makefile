# One command per job. `make help` lists them; ARGS="..." is passed to the job's program.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

ARGS ?=
PYTHON ?=
CXX ?= g++

# Python keeps what it compiles. Without that, each of the many processes that tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Test files run concurrently, in the order of tests/conftest.py. How many follows: quick tests wait more than those that start services.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder --numprocesses

REHEARSAL := $(addprefix tests/, serve/test_gpus.py sync/test_nccl_link.py sync/test_choice.py sync/test_live_weights.py \
  sync/test_parity.py flows/test_gpu_memory.py flows/test_presets.py flows/test_doctor.py train/test_memory_plan.py \
  train/test_saved_activations.py train/test_batch_reading.py train/test_nodes.py deploy/test_two_nodes.py \
  flows/test_two_nodes.py flows/test_bfloat16.py)

UV := .venv/bin/uv
MAIN_STAMP := .venv/.complete
VLLM_STAMP := .venv-vllm/.complete
OPENENV_STAMP := .venv-openenv/.complete

# Passes pip's find-links and the choice of torch's build on to uv.
INSTALL := .venv/bin/python -m rollmill.flows.project.uv_install

.PHONY: help setup quickstart deploy test test-all rehearsal test-packages check docs bench bench-full release clean

help:  ## list the jobs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup: $(MAIN_STAMP) $(VLLM_STAMP)  ## make both environments, or bring them up to date

quickstart: setup  ## set everything up, then run the main job; ARGS="--set seed=1" for another seed
	@.venv/bin/rollmill run quickstart --again $(ARGS)

deploy: setup  ## create the work pool and all deployments of prefect.yaml on the Prefect server
	@.venv/bin/rollmill deploy $(ARGS)

test: setup $(OPENENV_STAMP) test-packages  ## tests with services, and slow ones, which `check` leaves out; not the long ones
	@.venv/bin/pytest $(SIDE_BY_SIDE) 2 -m "(service or slow or sandbox) and not long" $(ARGS)

test-all: setup $(OPENENV_STAMP) test-packages  ## all tests
	@.venv/bin/pytest $(SIDE_BY_SIDE) 2 -m "" $(ARGS)

rehearsal: setup  ## what can be tried of a GPU without one: devices, memory, NCCL links, bfloat16, planted faults
	@.venv/bin/pytest $(SIDE_BY_SIDE) 2 -m "" $(REHEARSAL) $(ARGS)

check: $(MAIN_STAMP)  ## format, lint, types, import rules, quick tests
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/pytest -q $(SIDE_BY_SIDE) 3 -m "not service and not slow and not long" $(ARGS)

docs: $(MAIN_STAMP)  ## build the documentation as a site with search in .rollmill/site, and serve it until Ctrl-C
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@.venv/bin/python -m http.server --directory .rollmill/site --bind 127.0.0.1 8000

bench: setup  ## quick benchmarks, without peers, in 15 minutes; ARGS="sync lag" for these alone
	@.venv/bin/python -m benchmarks.run quick $(ARGS)

bench-full: setup  ## all benchmarks and those of peers, in about two hours
	@.venv/bin/python -m benchmarks.run full $(ARGS)

release: $(MAIN_STAMP)  ## build wheel and source distribution in dist/, and try each in an empty environment
	@rm -rf dist
	@$(UV) build --quiet --out-dir dist
	@ROLLMILL_DISTRIBUTIONS="$(CURDIR)/dist" .venv/bin/pytest -q -m "" tests/test_package.py tests/looking/test_base_install.py $(ARGS)
	@ls -l dist/*

clean:  ## stop the Prefect server, remove environments and caches; runs/ and models/ stay
	@if [ -x .venv/bin/rollmill ]; then .venv/bin/rollmill down || true; fi
	rm -rf .venv .venv-vllm .venv-openenv .rollmill/peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find flows tasks tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# OpenEnv's server, which tests start: its pins conflict with those of verifiers. Its web page, made with gradio, is not needed.
$(OPENENV_STAMP): constraints-openenv.txt | $(MAIN_STAMP)
	@echo "installing the OpenEnv server of the tests in .venv-openenv"
	@[ -x .venv-openenv/bin/python ] || $(UV) venv --quiet --python .venv/bin/python .venv-openenv
	@$(INSTALL) --python .venv-openenv --constraints constraints-openenv.txt --absent gradio openenv
	@touch $@

# What tests start besides the environments: sandboxes, a browser, and what a cluster has.
test-packages:
	@missing=""; \
	command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$$missing postgresql"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends -qq $$missing >/dev/null; \
	else \
	  echo "the tests need$$missing: install them (Debian: apt install$$missing)" >&2; exit 1; \
	fi

# The first of these that is Python 3.11 with venv and with the headers needed to build DeepSpeed's ops.
define find_python
python=""; \
for candidate in $(PYTHON) python3.11 python3 python /usr/bin/python3.11 /usr/local/bin/python3.11; do \
  if "$$candidate" -c 'import ensurepip, os, sys, sysconfig, venv; \
header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
sys.exit(sys.version_info[:2] != (3, 11) or not os.path.exists(header))' 2>/dev/null; \
  then python="$$candidate"; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "Rollmill needs Python 3.11 with venv and headers: install it (Debian 12: apt install python3.11-venv" \
    "python3.11-dev), or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; \
fi
endef

define find_compiler
if ! command -v $(CXX) >/dev/null; then \
  echo "Rollmill needs a C++ compiler, $(CXX) is not here: install one (Debian, Ubuntu: apt install g++)," \
    "or name one: make CXX=clang++ ..." >&2; exit 1; \
fi
endef

$(UV): | constraints.txt
	@$(find_python); $(find_compiler); \
	if [ ! -x .venv/bin/pip ]; then echo "making .venv with $$python"; "$$python" -m venv .venv; fi; \
	.venv/bin/pip install --quiet --disable-pip-version-check "$$(grep '^uv==' constraints.txt)"

$(MAIN_STAMP): pyproject.toml constraints.txt | $(UV)
	@echo "installing flows and trainer in .venv, and compiling them: one to five minutes, more on a busy machine"
	@$(find_compiler); $(INSTALL) --python .venv --constraints constraints.txt --compile-bytecode --editable '.[dev]'
	@touch $@

$(VLLM_STAMP): pyproject.toml $(wildcard conf/vllm/*.txt) | $(MAIN_STAMP)
	@.venv/bin/rollmill setup
	@touch $@
