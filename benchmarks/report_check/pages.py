"""Pages for check.mjs, of every form that results have: a grid, one run, several traces and machines, curves, hundreds.

python benchmarks/report_check/pages.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EVICTIONS = "lru,lfu,fifo,least_stale,random,arc,clock,sieve,slru,belady"
CAPACITIES = "2%,5%,10%,15%,20%,25%,30%,40%,50%,75%"
#: Of each page, the commands that make its results; {here} is their folder.
RESULTS = {
    "grid": [
        "replay miniature --passes token --eviction lru,lfu,least_stale,belady --capacity 15%,25%,50% "
        "--prefetch none,top_k --out {here}"
    ],
    "one": ["replay miniature --passes token --capacity 25% --out {here}"],
    "several": [
        "replay miniature --capacity 5%,25% --eviction lru,random --platform a100-5gbps,phone-ufs4 --out {here}",
        "synthesise --model olmoe-1b-7b --requests 24 --prompt-tokens 8 --decode-tokens 24 --out {here}/olmoe.zarr",
        "replay {here}/olmoe.zarr --capacity 5%,25% --eviction lru,fifo,least_stale --out {here}",
    ],
    "curves": ["curve miniature --passes token --eviction lru --out {here}"],
    "hundreds": [
        f"replay miniature --passes token --capacity {CAPACITIES} --eviction {EVICTIONS} "
        "--prefetch none,top_k,top_k:depth=2 --prefetch-at gate,after_demand --out {here}"
    ],
}


def moereplay(words: str) -> None:
    subprocess.run([sys.executable, "-m", "moereplay", *words.split()], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    pages = Path(sys.argv[1])
    pages.mkdir(parents=True, exist_ok=True)
    for name, commands in RESULTS.items():
        here = pages / name
        for words in commands if not here.exists() else ():
            moereplay(words.format(here=here))
        moereplay(f"report {here} --out {pages / name}.html")


if __name__ == "__main__":
    main()
