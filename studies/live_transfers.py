"""Compare live runs of the miniature with real transfers to emulated ones: `make study-live-transfers`.

Last changed in commit bb8bebef. Do live runs with real transfers classify as emulated ones?
Answer: yes, all 8,692 accesses: docs/evidence.md.

Without prefetch timing cannot matter: every access must be classified alike, the same copies evicted in the same order,
the same bytes moved, and every logit of the unmodified model's. A row per run; exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.analysis.tables import console, table
from moereplay.results.result import METRICS, request_times
from moereplay.tracegen.offload.study import VERDICTS

CONTRACTS, EVICTIONS, CAPACITIES = ("atomic", "sequential"), ("lru", "least_stale", "lfu"), ("10%", "25%", "50%")
ON_DISK = "25%"  #: the capacity that is run from a disk as well
COUNTERS = ("accesses", "hits", "late", "misses", "compulsory", "collisions", "evictions", "bytes_demand", "declined")
LIVE = ("live", "miniature", "--limit", "3", "--max-new-tokens", "17", "--device", "cpu", "--json")


def main() -> None:
    """Run, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/live-transfers"))
    out = options.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for cell in product(CONTRACTS, EVICTIONS, CAPACITIES) for row in compared(out, *cell)]
    console().print(table(rows))
    sys.exit(0 if all(row["equal"] == "yes" for row in rows) else 1)


def compared(out: Path, contract: str, eviction: str, capacity: str) -> list[dict[str, object]]:
    """Yield a row for each slow tier."""
    settings = ("--contract", contract, "--eviction", eviction, "--capacity", capacity)
    emulated = live(out / "emulated.parquet", *settings, "--eager", "--no-quality")
    tiers = ("pinned", f"disk:{out}") if capacity == ON_DISK else ("pinned",)
    return [row(out, settings, tier, emulated) for tier in tiers]


def row(out: Path, settings: tuple[str, ...], tier: str, emulated: dict[str, Any]) -> dict[str, object]:
    """Compare a real run with the emulated one."""
    real = live(out / "real.parquet", *settings, "--slow-tier", tier, "--threads", "1")
    ours, theirs = (lines(out / f"{name}.parquet", VERDICTS) for name in ("real", "emulated"))
    same = sum(mine == other for mine, other in zip(sorted(ours), sorted(theirs), strict=True))
    evicted = [lines(out / f"{name}.parquet", ("evict",)) for name in ("real", "emulated")]
    counted = all(real["totals"][name] == emulated["totals"][name] for name in COUNTERS)
    total, requests = real["quality"]["total"], real["per_request"]
    equal = same == len(ours) and evicted[0] == evicted[1] and counted and total["identical"]
    tpot = METRICS["tpot_ms"].value(request_times(requests))
    return {
        **dict(zip(("contract", "eviction", "capacity"), settings[1::2], strict=True)),
        "slow tier": tier.partition(":")[0],
        "accesses alike": f"{same:,} of {len(ours):,}",
        "evictions": len(evicted[0]),
        "hits": real["totals"]["hits"],
        "other logits": total["differing"],
        "MEASURED TPOT ms": f"{tpot:.1f}",
        "equal": "yes" if equal else "NO",
    }


def live(events: Path, *words: str) -> dict[str, Any]:
    """Run the model, and return the document."""
    command = [sys.executable, "-m", "moereplay", *LIVE, *words, "--events", str(events)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def lines(events: Path, kinds: tuple[str, ...]) -> list[tuple[object, ...]]:
    """Read the events of these kinds, without times."""
    frame = pl.read_parquet(events).filter(pl.col("kind").is_in(kinds))
    return frame.select("kind", "pass", "layer", "expert", "cause").rows()


if __name__ == "__main__":
    main()
