"""Check downward.patch: victims are written back over a separate link without stalls, and both engines agree."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from moereplay.results.result import Row
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.synthetic import Synthetic, synthesise

EXPERT = 1_000
UP = 'name = "up"\n[[links]]\nbytes_per_s = 5e9\n'
COMPUTE = '[compute]\nkind = "measured"\nexpert_ns = 90\n[cpu]\nkind = "measured"\n'
DOWN = '[[links]]\nbytes_per_s = 1e9\nlatency_ns = 7\ndirection = "down"\n'
ITS_OWN = {"bytes_written", "link_busy_ns"}


def totals(trace: Trace, platform: str, **settings: str) -> Row:
    """Return the totals of both engines, which must agree."""
    config = configure(capacity="40%", platform=platform, **settings)
    by_engine = [replay(trace, config, engine=engine) for engine in ("reference", "compiled")]
    assert by_engine[0].to_json() == by_engine[1].to_json()
    return by_engine[0].totals


def main() -> None:
    """Raise AssertionError if a victim is not written, stalls compute, or is written by one engine only."""
    geometry = Geometry(layers=3, experts=6, k=2, expert_bytes=(EXPERT,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=2, prompt_tokens=2, decode_tokens=12))
    with tempfile.TemporaryDirectory() as folder:
        without, both = Path(folder) / "up.toml", Path(folder) / "both.toml"
        without.write_text(UP + COMPUTE)
        both.write_text(UP + DOWN + COMPUTE)
        for eviction, miss, contract in product(("lru", "lfu"), ("fetch", "split"), ("atomic", "sequential")):
            chosen = {"eviction": eviction, "miss": miss, "contract": contract}
            up, down = (totals(trace, str(path), **chosen) for path in (without, both))
            assert down["bytes_written"] == EXPERT * down["evictions"] > up["bytes_written"] == 0
            assert down["link_busy_ns"] - up["link_busy_ns"] >= EXPERT * down["evictions"]
            assert {name for name in up if up[name] != down[name]} == ITS_OWN


if __name__ == "__main__":
    main()
