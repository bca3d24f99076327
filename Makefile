# Every target does its own set-up in .venv, from a Debian machine with python3 (with venv) and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
MINI := tracegen/miniature
SAMPLE := traces/samples/miniature.zarr
DEMO := runs/demo

.PHONY: help demo demo-replay test check coverage study-collisions study-quality bench-recording miniature sample format clean

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

demo: .venv/record.stamp     ## the whole circle: record the miniature, replay a grid, draw, run live beside the replays
	rm -rf $(DEMO)
	$(BIN)/moereplay record miniature --prompts $(MINI)/prompts.jsonl --field prompt --limit 16 --max-new-tokens 65 \
	    --temperature 1 --look-ahead 2 --dtype float32 --out $(DEMO)/prompts.zarr
	$(BIN)/moereplay record miniature --text $(MINI)/heldout.txt --window 256 --limit 8 --dtype float32 --out $(DEMO)/text.zarr
	$(BIN)/moereplay inspect $(DEMO)/prompts.zarr
	$(BIN)/moereplay replay $(DEMO)/prompts.zarr --capacity 10%,25%,50% --eviction lru,least_stale --prefetch none,top_k \
	    --out $(DEMO)/replays
	$(BIN)/moereplay plot $(DEMO)/replays
	$(BIN)/moereplay validate $(DEMO)/prompts.zarr --requests 2 --out $(DEMO)/validation

demo-replay: .venv/base.stamp  ## without torch: replay the recorded trace that comes with the repository
	$(BIN)/moereplay replay $(SAMPLE) --capacity 5%,25% --eviction lru,least_stale,farthest_layer --prefetch none,top_k \
	    --out runs/demo-replay
	$(BIN)/moereplay plot runs/demo-replay

test: .venv/dev.stamp        ## the test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

check: .venv/dev.stamp       ## ruff and pyright
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

coverage: .venv/dev.stamp    ## the test suite with coverage, without the long replays of real streams
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term --ignore tests/test_real_streams.py

study-collisions: .venv/base.stamp  ## SpecMD Fig. 4 replayed: collisions per miss of every eviction policy
	$(BIN)/python benchmarks/specmd_collisions.py

study-quality: .venv/record.stamp  ## Cache-Prior, ranks and precisions against perplexity, live on the miniature (12 minutes)
	$(BIN)/python benchmarks/miniature_quality.py

bench-recording: .venv/record.stamp  ## what recording costs over plain generate(), and bytes per token
	$(BIN)/python benchmarks/recording_overhead.py

miniature: .venv/record.stamp  ## train the bundled miniature anew (half an hour on one core) and write its card
	$(BIN)/python -m tracegen.miniature.train --out $(MINI)
	$(BIN)/python -m tracegen.miniature.excerpts
	$(BIN)/python -m tracegen.miniature.card

sample: .venv/record.stamp   ## record the bundled trace anew
	rm -rf $(SAMPLE) $(SAMPLE).derived
	$(BIN)/moereplay record miniature --prompts $(MINI)/prompts.jsonl --field prompt --limit 6 --max-new-tokens 33 \
	    --temperature 1 --dtype bfloat16 --out $(SAMPLE)

format: .venv/dev.stamp      ## ruff's own formatting and import order
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:           ## remove what make made
	rm -rf .venv runs build *.egg-info
