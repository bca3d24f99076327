#!/usr/bin/env bash
# The figures of docs/papers.md, from public routing of OLMoE (a line of JSON per token) and of gpt-oss-20b (Apache-2.0),
# and, if a folder of them is named, with the documents of live runs.
# usage: docs/figures/papers.sh PATH/olmoe-1b-7b.jsonl PATH/gpt-oss-20b [FOLDER of live/*.json]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
live=()
for document in "${3:-/nowhere}"/*.json; do [ -e "$document" ] && live+=(--live "$document"); done
moereplay import "$1" --model olmoe-1b-7b --out "$scratch/olmoe.zarr"
moereplay import "$2" --model gpt-oss-20b --expert-bits 4 --limit 6 --out "$scratch/gptoss.zarr"
moereplay paper specmd "$scratch/olmoe.zarr" "$scratch/gptoss.zarr" --published --figure collisions --out "$scratch/specmd"
moereplay paper specmd miniature --published --figure table_2 --out "$scratch/specmd-miniature"
moereplay paper cache-conditional miniature --published --figure cache_size,rank_sensitivity,miss_rate_quality "${live[@]}" \
    --out "$scratch/prior"
for picture in specmd/collisions specmd-miniature/table_2 prior/cache_size prior/miss_rate_quality; do
    python - "$scratch/$picture.png" "$here/papers_$(basename "$picture").png" <<'END'
import sys
from PIL import Image
Image.open(sys.argv[1]).convert("RGB").quantize(128).save(sys.argv[2], optimize=True)
END
done
