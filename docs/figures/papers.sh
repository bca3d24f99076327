#!/usr/bin/env bash
# The pictures of studies/pages/papers.md, from the bundled recording and, if a folder of other people's is named, from its public
# routing of OLMoE (olmoe-1b-7b.jsonl) and of gpt-oss-20b (Apache-2.0), as far as it has them; with the documents of live
# runs if a folder of them is named.
# usage: docs/figures/papers.sh [FOLDER of recordings] [FOLDER of live/*.json]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
recordings="${1:-/nowhere}"
traces=(miniature) live=()
for document in "${2:-/nowhere}"/*.json; do [ -e "$document" ] && live+=(--live "$document"); done
if [ -e "$recordings/olmoe-1b-7b.jsonl" ]; then
    moereplay import "$recordings/olmoe-1b-7b.jsonl" --model olmoe-1b-7b --out "$scratch/olmoe.zarr"
    traces+=("$scratch/olmoe.zarr")
fi
if [ -e "$recordings/gpt-oss-20b" ]; then
    moereplay import "$recordings/gpt-oss-20b" --model gpt-oss-20b --expert-bits 4 --limit 6 --out "$scratch/gptoss.zarr"
    traces+=("$scratch/gptoss.zarr")
fi
moereplay paper specmd "${traces[@]}" --published --figure collisions --out "$scratch/specmd"
moereplay paper specmd miniature --published --figure table_2 --out "$scratch/specmd-miniature"
moereplay paper cache-conditional miniature --published --figure cache_size,miss_rate_quality "${live[@]}" \
    --out "$scratch/prior"
for picture in specmd/collisions specmd-miniature/table_2 prior/cache_size prior/miss_rate_quality; do
    python - "$scratch/$picture.png" "$here/papers_$(basename "$picture").png" <<'END'
import sys
from PIL import Image
Image.open(sys.argv[1]).convert("RGB").quantize(256).save(sys.argv[2], optimize=True)
END
done
