# What a user and a developer type. `make` alone lists it.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST ?=
IMAGES ?= router engine engine-cpu
PREFIX ?=
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDER ?= docker
ENGINE_BASE ?=
export TORCH_INDEX

# Nor should make say on stdout which directory it leaves (`make -C`; heeded from make 4.4 on).
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup demo up test soak lint chart chart-golden proto proto-check docs lock images clean

# Made where it is missing; `make setup` also renews it.
STAMP := $(VENV)/.specdec-setup
BIN := $(VENV)/bin
PROTO := services/specdec/proto
# Generated as specdec/proto/speculation.proto, so that the stubs import each other from that package.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Ispecdec/proto=proto specdec/proto/speculation.proto

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo 'PYTHON=python3.12   the Python (3.11 to 3.14) that makes the environment'
	@echo 'TORCH_INDEX=URL     another package index for torch, for example one with its CPU build'
	@echo 'VENV=/path          the environment, in another place than .venv'
	@echo 'PREFIX=HOST/NAME/    for images: what stands before specdec-router and so on; TAG=, BUILDER=podman, ENGINE_BASE='
	@echo "ARGS='...'          for demo, up and soak: their options; PYTEST='...' for test: options of pytest"

# Everything on stderr: the demo's last line on stdout is its result.
setup:  ## check this machine and make the environment
	@$(PYTHON) tools/setup.py --venv $(VENV) >&2

$(STAMP):
	@$(PYTHON) tools/setup.py --venv $(VENV) >&2

demo: setup  ## speculation end to end on this machine, in one answer and twelve prompts
	@$(BIN)/specdec demo $(ARGS)

up:  ## keep the stack running; Ctrl-C stops all of it
	@$(PYTHON) tools/setup.py --venv $(VENV) --memory 5 >&2
	@$(BIN)/specdec up $(ARGS)

test: setup  ## all tests; PYTEST='-k name' for some
	$(BIN)/python -m pytest $(PYTEST)

soak: setup  ## a million frames and two hundred kills (20 minutes); the log is results/soak.log
	$(BIN)/python tests/soak.py $(ARGS)

lint: proto-check | $(STAMP)  ## style, types, import rules, fresh stubs and documents
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/metrics_doc.py --check
	$(BIN)/python tools/dashboards.py --check

docs: | $(STAMP)  ## write docs/metrics.md and the dashboards from their tables
	$(BIN)/python tools/metrics_doc.py
	$(BIN)/python tools/dashboards.py

chart: | $(STAMP)  ## lint, render and check the Helm chart; fetches helm once
	$(BIN)/python tools/chart_tools.py
	$(BIN)/python -m pytest tests/test_chart*.py $(PYTEST)

chart-golden: | $(STAMP)  ## write what the chart renders to helm/examples/golden
	$(BIN)/python tools/chart_tools.py
	$(BIN)/python tools/chart_golden.py

proto: | $(STAMP)  ## write the gRPC stubs from proto/speculation.proto
	$(PROTOC) --python_out=services --pyi_out=services --grpc_python_out=services

proto-check: | $(STAMP)  ## fail where the committed stubs are not what `make proto` writes
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh && \
	for file in $$fresh/specdec/proto/*; do \
	    diff -q $(PROTO)/$$(basename $$file) $$file || { echo 'stale stubs: run make proto' >&2; exit 1; }; \
	done

lock: | $(STAMP)  ## renew the lock files in requirements/
	PYTHON=$(BIN)/python requirements/compile.sh

images:  ## build the container images; IMAGES='router' for some
	@for image in $(IMAGES); do \
	    $(BUILDER) build --target $$image --tag $(PREFIX)specdec-$$image:$(TAG) --build-arg VERSION=$(TAG) \
	        $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
	        $(if $(ENGINE_BASE),--build-arg ENGINE_BASE=$(ENGINE_BASE)) . || exit 1; \
	done

clean:  ## remove the environment and all caches here
	rm -rf $(VENV) .cache .tools .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build dist services/*.egg-info
	find services tests tools -name __pycache__ -prune -exec rm -rf {} +
