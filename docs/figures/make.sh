#!/usr/bin/env bash
# The figure of the README, from the public recording GPT-OSS-MoE-ExpertFingerprinting (Apache-2.0) as one npz.
# usage: docs/figures/make.sh PATH/gptoss20b_decode.npz
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
moereplay import "$1" --model gpt-oss-20b --expert-bits 4 --limit 6 --out "$scratch/gptoss.zarr"
moereplay replay "$scratch/gptoss.zarr" --capacity 6.25%,12.5%,25% --platform rtx4090-pcie4 \
    --eviction lru,lfu,random,least_stale,farthest_layer,arc --out "$scratch/runs"
moereplay plot "$scratch/runs" --figure collisions_by_layer --out "$(dirname "$0")"
