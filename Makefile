# Everything here works on a bare clone with Python 3.11+ and make: each target does the set-up it needs, once.
# The first interpreter that is new enough and whole (some builds lack ssl, some distributions split off ensurepip).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import ensurepip, ssl, sys; \
	sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && command -v $$p && break; done)
MODEL ?= smollm2-135m-instruct
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# One thread per torch process: two processes with two threads each on two cores slow each other down many times over.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PYTHONUNBUFFERED = 1

# Tests of the emulated wide-area link need root and a TUN device; elsewhere they are left out.
MARKS := not slow$(shell [ "$$(id -u)" = 0 ] && [ -c /dev/net/tun ] || echo ' and not wan')
ALL_MARKS := $(shell [ "$$(id -u)" = 0 ] && [ -c /dev/net/tun ] || echo 'not wan')
PYTEST := $(BIN)/python -m pytest
# These only compute, and do so in two processes; the others measure times, or start daemons on cores of their own.
TWO_AT_A_TIME := tests/api tests/engine tests/policy tests/sched tests/sim tests/wire

.DEFAULT_GOAL := help
.PHONY: help setup model models tiny-hybrid demo test test-all check bench bench-engine bench-lag bench-overload bench-transport bench-serving bench-codecs clean bench-paper

help: ## show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## create .venv with the product and its development tools (a few minutes, once)

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 to 3.13 with venv and ssl is needed; set PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --upgrade 'pip>=25'

$(VENV)/.ready: $(VENV)/bin/python pyproject.toml conf/constraints.txt
	@echo "installing torch and the other packages of conf/constraints.txt into $(VENV) (a few minutes, once)"
	@$(PIP) install --constraint conf/constraints.txt torch
	@$(PIP) install --constraint conf/constraints.txt --editable '.[gguf,dev]'
	@touch $@

model: setup ## fetch and import a model once (MODEL=smollm2-135m-instruct | gemma3-270m) into PRFAAS_HOME
	@$(BIN)/python -m common.engine.fetch $(MODEL)

models: setup
	@$(BIN)/python -m common.engine.fetch smollm2-135m-instruct gemma3-270m

tiny-hybrid: setup ## train the tiny KDA + MLA model of the tests into PRFAAS_HOME, once (15 minutes)
	@$(BIN)/python -m benchmarks.tiny_hybrid.train $(ARGS)

demo: model ## start both daemons on this machine and send them a short and a long prompt (a minute)
	@$(BIN)/python -m benchmarks.demo $(ARGS)

test: models ## the default test suite (up to 25 minutes; fetches Gemma 3 too: Google's Gemma terms)
	@status=0; set -x; \
	$(PYTEST) -n 2 --dist loadfile -m '$(MARKS)' $(ARGS) $(TWO_AT_A_TIME) || status=1; \
	$(PYTEST) -m '$(MARKS)' $(ARGS) $(addprefix --ignore=,$(TWO_AT_A_TIME)) || status=1; \
	exit $$status

test-all: models ## every test, the long lists too
	$(PYTEST) -m '$(ALL_MARKS)' $(ARGS)

check: setup ## format, lint, types, import rules (a minute or two)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_layers.py tests/test_no_unsafe.py

bench: model ## measure throughput and latency of a pair on this machine
	@$(BIN)/python -m benchmarks.bench $(ARGS)

bench-engine: models ## our engine against transformers, vLLM and llama.cpp (ARGS=--help; builds them once: 4 GB, an hour)
	@$(BIN)/python -m benchmarks.engine $(ARGS)

bench-overload: setup ## what becomes of requests when five times as many come as can be served (ARGS=--help)
	@$(BIN)/python -m benchmarks.overload $(ARGS)

bench-lag: models ## event-loop lag and ITL of running streams while a long prompt is prefilled locally
	@$(BIN)/python -m benchmarks.engine.lag $(ARGS)

bench-transport: setup ## the transport alone against iperf3, plain sockets and other engines (needs iperf3; root)
	@$(BIN)/python -m benchmarks.transport $(ARGS)

bench-serving: models ## routing policies on real daemons over an emulated link (root; an hour; ARGS=--quick: seconds, pretended)
	@$(BIN)/python -m benchmarks.serving $(ARGS)

bench-codecs: models tiny-hybrid ## codecs on real state: bytes, speed, and how much of what models say stays the same
	@$(BIN)/python -m benchmarks.codecs $(ARGS)

bench-paper: setup ## the paper's tables from its equations and simulated (seconds; ARGS="--html FILE" draws charts)
	@$(BIN)/python -m benchmarks.paper $(ARGS)

clean: ## remove .venv, build outputs and caches of the checkout (models in PRFAAS_HOME stay)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
