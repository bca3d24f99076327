#!/usr/bin/env bash
# Write what a refactoring must not change into FOLDER: documents of 20 commands, help, exit codes of errors.
#     benchmarks/goldens.sh before; ...; benchmarks/goldens.sh after; diff -r before after
set -uo pipefail
out=$(realpath -m "${1:?a folder to write into}")
recordings=$(realpath -m "${2:-${MOEREPLAY_RECORDINGS:-../shared/data/traces}}")
rm -rf "$out" && mkdir -p "$out" && cd "$(dirname "$0")/.."
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
tree=$(realpath .)
export PATH="$tree/.venv/bin:$PATH" PYTHONPATH="$tree" COLUMNS=100
it() {  # it NAME ARGUMENTS: what is printed and the exit code, without places and times of this run
  local name=$1 && shift
  python -m moereplay "$@" > "$work/said" 2> "$work/told"
  echo "exit $?" >> "$work/said"
  cat "$work/said" "$work/told" | sed -E -e "s#$work#WORK#g" -e "s#$recordings#RECORDINGS#g" -e "s#$tree#TREE#g" \
    -e 's/[0-9:.]+ ?(s|seconds|ms)\b/T \1/g' -e 's/"seconds": [0-9.e-]+/"seconds": T/' > "$out/$name"
}
mini="miniature --passes token"
it replay replay $mini --capacity 25% --json
it replay-policies replay $mini --capacity 25% --eviction least_stale --prefetch top_k:depth=2 --miss cascade --routing cache_prior --json
it replay-reference replay $mini --capacity 25% --eviction lfu --engine reference --json
it replay-mixed replay miniature --platform phone-ufs4 --capacity 10% --eviction mrs --miss lowest_bit --json
it curve curve $mini --eviction lru --json
it bounds bounds $mini --capacity 25% --platform rtx4090-pcie4 --json
it recommend recommend glm-4.5-air --quant Q4_K_M --gpu "RTX 3090" --ram 64GB --json
it recommend-trace recommend $mini --platform phone-ufs4 --memory 512MB --json
it inspect inspect miniature --json
it models models --json
it platforms platforms rtx4090-pcie4 --json
it policies policies
it presets presets
it synthesise synthesise --model olmoe-1b-7b --requests 4 --decode-tokens 12 --seed 3 --recall .87 --out "$work/olmoe.zarr"
it inspect-synthetic inspect "$work/olmoe.zarr" --json
it sweep replay "$work/olmoe.zarr" --capacity 5%,25% --eviction lru,least_stale --prefetch none,top_k --out "$work/sweep"
it sweep-show sweep show "$work/sweep" --json
it sweep-layers sweep show "$work/sweep" --table layers --json
it sweep-compare sweep compare "$work/sweep" eviction=least_stale --where capacity=25% --where prefetch=none --by tpot_ms --json
it export export "$work/olmoe.zarr" --format parquet --out "$work/olmoe.parquet"
it import import "$work/olmoe.parquet" --out "$work/again.zarr"
it inspect-imported inspect "$work/again.zarr" --json
printf 'traces = ["olmoe.zarr"]\n[grid]\ncapacity = ["5%%", "25%%"]\neviction = ["lru", "fifo", "least_stale"]\n' > "$work/grid.toml"
it tune tune "$work/grid.toml" --objectives tpot_ms,gb_moved --trials 5 --sampler random --seed 0 --out "$work/tune" --json
it routing routing list
for error in "replay miniature --capacity 0%" "replay miniature --eviction lruu" "replay no.zarr" "import pyproject.toml" \
  "recommend no-such-model" "replay miniature --platform no-card" "sweep run no.toml"; do
  it "error-$(tr -c 'a-z0-9\n' '-' <<< "$error")" $error
done
if [ -d "$recordings" ]; then
  for format in gpt-oss-20b/gptoss20b_decode.npz gpt-oss-20b/raw/mmlu_test__computer_security__True_False_examples.json \
    gemma-4-26b-a4b/gemma.route.csv qwen3-30b-a3b/code.npz; do
    model=${format%%/*} name=${format%%/*}-${format##*/}
    it "import-$name" import "$recordings/$format" --limit 2 --model "$model" --expert-bits 4 --out "$work/$name.zarr"
    it "import-$name-inspect" inspect "$work/$name.zarr" --json
  done
fi
it help --help
for verb in $(python -c 'from moereplay.commands import NAMES; print(*(name.rstrip("_") for name in NAMES))'); do
  case $verb in traces_*|routing_*|sweep_*|calibrate_*) it "help-$verb" ${verb%%_*} "${verb#*_}" --help;; *) it "help-$verb" "$verb" --help;; esac
done
