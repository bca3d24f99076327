#!/usr/bin/env bash
# The pictures of README.md and docs/report.md, each with its text beside it (`make figures`): tests/project/test_pages.py
# compares the text with what the program says today. The one of README.md is from the public recording
# GPT-OSS-MoE-ExpertFingerprinting (Apache-2.0), in FOLDER/gpt-oss-20b.
# usage: CHROMIUM=chromium docs/figures/make.sh [FOLDER of recordings]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

moereplay replay miniature --passes token --capacity 15%,50% --eviction lru,least_stale,belady --out "$scratch/mini"
moereplay report "$scratch/mini" --out "$scratch/mini.html"
(cd "$here/../.." && python -m tests.kit.pages "$scratch/mini.html" > "$here/report.txt")
"$CHROMIUM" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1000 \
    --screenshot="$scratch/report.png" "file://$scratch/mini.html" 2> "$scratch/log" || { cat "$scratch/log"; exit 1; }
python - "$scratch/report.png" "$here/report.png" <<'END'
import sys
from PIL import Image
Image.open(sys.argv[1]).convert("RGB").quantize(64).save(sys.argv[2], optimize=True)
END

recording="${1:-/nowhere}/gpt-oss-20b"
[ -e "$recording" ] || { echo "collisions_by_layer is left as it is: no $recording"; exit 0; }
moereplay import "$recording" --model gpt-oss-20b --expert-bits 4 --limit 6 --out "$scratch/gptoss.zarr"
moereplay replay "$scratch/gptoss.zarr" --capacity 6.25%,12.5%,25% --platform rtx4090-pcie4 \
    --eviction lru,lfu,random,least_stale,farthest_layer,arc --out "$scratch/runs"
moereplay plot "$scratch/runs" --figure collisions_by_layer --out "$here"
rm "$here/collisions_by_layer.csv"
