"""Check counter.patch: both engines count, new results store the counter, and an older folder still opens."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from moereplay.results.parts import part_of
from moereplay.results.read import runs
from moereplay.results.stored import load
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.sweeps.store import Folder
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise

COUNTER = "bytes_evicted"
BEFORE = Path("tests/results/before/replays")
EXPERT = 1_000


def main() -> None:
    """Raise AssertionError if the counter is not counted, stored or read."""
    geometry = Geometry(layers=3, experts=6, k=2, expert_bytes=(EXPERT,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=2, prompt_tokens=2, decode_tokens=6))
    by_engine = [replay(trace, configure(capacity="40%"), engine=engine) for engine in ("reference", "compiled")]
    assert by_engine[0].to_json() == by_engine[1].to_json()
    totals = by_engine[0].totals
    assert totals[COUNTER] == EXPERT * totals["evictions"] > 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(BEFORE, Path(scratch) / "replays"))
        Folder(folder).store(part_of(by_engine[0], None, None), {"sweep_version": 1})
        counted = runs(load(folder))[COUNTER].to_list()
    assert sorted(counted, key=bool) == [None, totals[COUNTER]]


if __name__ == "__main__":
    main()
