"""SpecMD Fig. 4 under several readings of what the paper leaves open: collisions per miss of eviction policies at 5 %.

A row per reading: the link that the paper names or one that is never waited for; the contract; experts as stored or
at 4 bits; prefetches named at a step's gate, at its end, or not at all. Published (arXiv 2602.03921, 5 %): Least-Stale
1.6 to 1.9 %, LRU 4.5 to 12.6 %, score-based 42.6 to 60.9 %. Nothing is tuned, and no reading is chosen per policy; the
figure of `moereplay paper specmd` is the first row. Without --trace: synthetic routing with OLMoE's geometry and the
statistics of a trained MoE (reuse .31, look-ahead recall .87). `make study-collisions TRACE=a.zarr` runs it on a trace.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from moereplay.analysis.tables import console, table
from moereplay.simulator.config import configure
from moereplay.simulator.presets import preset
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.papers.figures import predictor
from moereplay.sweeps.recommend.space import can_replay
from moereplay.traces.documents import json_text
from moereplay.traces.geometry import known
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

#: The same machine with a link that is never the bottleneck: what the policies do when prefetches always arrive.
FAST_LINK = """name = "a100-no-wait"
[link]
bytes_per_s = 1e18
[compute]
kind = "measured"
dense_ns = 1000
expert_ns = 1000
"""
SHORT = {"least_stale": "LS", "least_stale:order=b": "LS b", "least_stale:order=a": "LS a", "lru": "LRU"}
SHORT |= {"lfu:count=history": "LFU", "score": "score", "farthest_layer": "FLD"}
Row = dict[str, str | float | None]


def main() -> None:
    """Open or make the trace, replay every reading, print one table; keep it in --out."""
    options = _options()
    with TemporaryDirectory() as folder:
        trace = open_trace(options.trace) if options.trace else _synthetic(Path(folder), options.tokens)
        (Path(folder) / "fast.toml").write_text(FAST_LINK)
        rows = list(_rows(trace, Path(folder) / "fast.toml"))
    called = options.trace.stem if options.trace else "SYNTHETIC, OLMoE's geometry"
    console().print(table(rows, title=f"collisions per miss, %: {called}, {trace.tokens:,} tokens; SIMULATED"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json_text({"trace": trace.digest, "rows": rows}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="instead of synthetic routing")
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens of each of 8 synthetic requests")
    parser.add_argument("--out", type=Path, default=Path("runs/specmd_collisions.json"))
    return parser.parse_args()


def _synthetic(folder: Path, tokens: int) -> Trace:
    made = synthesise(
        Synthetic(
            kind="markov",
            geometry=known("olmoe-1b-7b").geometry,
            requests=8,
            prompt_tokens=32,
            decode_tokens=tokens,
            reuse=0.31,
            recall=(0.87,),
        )
    )
    return write_trace(folder / "olmoe.zarr", made.header, map(made.request, range(made.requests)))


def _rows(trace: Trace, fast: Path) -> Iterator[Row]:
    base = preset("specmd-1").values() | {"miss": "fetch", "capacity": "5%", "prefetch": predictor(trace)}
    links = {"5 GB/s": base["platform"], "no wait": str(fast)}
    ahead = {"at gate": {}, "at end": {"prefetch_at": "after_demand"}, "none": {"prefetch": "none"}}
    bits = {"stored": {}, "4": {"miss": "fetch:bits=4"}}
    contracts = ("sequential", "atomic")
    for (link, platform), contract, (stored, miss), (when, prefetch) in product(
        links.items(), contracts, bits.items(), ahead.items()
    ):
        own = base | {"platform": platform, "contract": contract} | miss | prefetch
        configs = {name: configure(**own | {"eviction": name}) for name in SHORT}
        able = {name: config for name, config in configs.items() if can_replay(trace, config)}
        found = run_grid(trace, list(able.values()), os.cpu_count() or 1, bounded=False)
        rates = {SHORT[name]: _rate(result.totals) for name, (result, _) in zip(able, found, strict=True)}
        yield {"link": link, "contract": contract, "bits": stored, "prefetch": when} | rates


def _rate(totals: dict) -> float | None:
    return round(100 * totals["collisions"] / totals["misses"], 1) if totals["misses"] else None


if __name__ == "__main__":
    main()
