# Every target does its own set-up in .venv, from a Debian machine with python3 (with venv) and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
SAMPLE := traces/samples/olmoe-synthetic.zarr

.PHONY: help demo test check coverage study-collisions sample format clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/  /'

# uv first (fast), pip as the fallback. uv reads no pip.conf, so a local wheel folder is handed on by hand; without one,
# uv looks for the build of torch that fits this machine's GPU, or the small one for none.
define install
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}"; \
	if [ -z "$$links" ]; then export UV_TORCH_BACKEND="$${UV_TORCH_BACKEND:-auto}"; fi; \
	if [ -z "$${NO_UV:-}" ] && $(BIN)/pip install --quiet --disable-pip-version-check uv 2>/dev/null \
	   && UV_FIND_LINKS="$${links// /,}" VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet -c constraints.txt $(1) $(2); \
	then echo "installed with uv"; \
	else $(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" \
	   && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(1) $(2) && echo "installed with pip"; fi
endef

$(BIN)/python:
	@$(PYTHON) -m venv .venv

.venv/base.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,-e .,)
	@touch $@

.venv/record.stamp: .venv/base.stamp
	$(call install,-e '.[record]',)
	@touch $@

.venv/dev.stamp: .venv/record.stamp
	$(call install,-e '.[record]',--group dev)
	@touch $@

demo: .venv/base.stamp       ## replay the bundled trace over a grid, print the ranking, draw the figures
	$(BIN)/moereplay replay $(SAMPLE) --capacity 1%,5%,25% --eviction lru,lfu,least_stale,farthest_layer \
	    --prefetch none,top_k,score --out runs/demo
	$(BIN)/moereplay plot runs/demo

test: .venv/dev.stamp        ## the test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

check: .venv/dev.stamp       ## ruff and pyright
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

coverage: .venv/dev.stamp    ## the test suite with coverage, without the long replays of real streams
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term --ignore tests/test_real_streams.py

study-collisions: .venv/base.stamp  ## SpecMD Fig. 4 replayed: collisions per miss of every eviction policy
	$(BIN)/python benchmarks/specmd_collisions.py

sample: .venv/base.stamp     ## make the bundled trace anew
	rm -rf $(SAMPLE) $(SAMPLE).derived
	$(BIN)/moereplay synthesise --out $(SAMPLE) --requests 8 --prompt-tokens 16 --decode-tokens 40 --recall .87/.80

format: .venv/dev.stamp      ## ruff's own formatting and import order
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:           ## remove what make made
	rm -rf .venv runs build *.egg-info
