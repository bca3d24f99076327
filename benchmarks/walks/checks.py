"""Check one of the patches here, in a tree that it was applied to: `python benchmarks/walks/checks.py link`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import typer

from moereplay.command import application
from moereplay.results.parts import part_of
from moereplay.results.read import runs
from moereplay.results.result import Result
from moereplay.results.stored import load
from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.config import configure
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.simulator.source import Pass
from moereplay.sweeps.store import Folder
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.synthetic import Synthetic, synthesise

BEFORE = Path("tests/results/before/replays")  #: a folder of results that was written before any patch
EXPERT = 1_000  #: bytes


def made(requests: int, prompt: int, decode: int, size: int = EXPERT, experts: int = 6) -> Trace:
    """Return a small synthetic trace."""
    geometry = Geometry(layers=3, experts=experts, k=2, expert_bytes=(size,) * 3)
    settings: dict[str, Any] = {"requests": requests, "prompt_tokens": prompt, "decode_tokens": decode}
    return synthesise(Synthetic(kind="zipf", geometry=geometry, **settings))


def by_both(trace: Trace, **settings: Any) -> Result:
    """Return the result on which both engines agree."""
    results = [replay(trace, configure(**settings), engine=engine) for engine in ("reference", "compiled")]
    assert results[0].to_json() == results[1].to_json()
    return results[0]


def link() -> None:
    """Replays use the second link, engines agree, and each link has its own bandwidth."""
    name, first, second = "mac-nvme", 1_000_000 + 80_000, 2_000_000 + 80_000  # ns of an expert, with latency
    trace = made(1, 0, 40, size=7_000_000, experts=8)
    assert len(platform(name).links) == 2
    both = by_both(trace, capacity="100%", platform=name).totals  # no evictions: every expert crosses its link once
    on_second = both["link_busy_ns"] - both["misses"] * first
    assert on_second % (second - first) == 0 and 0 < on_second // (second - first) < both["misses"]
    slower = by_both(trace, capacity="100%", platform=f"{name}:links.1.bytes_per_s=1e9")
    assert slower.totals["time_ns"] > both["time_ns"]


def batch() -> None:
    """Engines replay the schedule alike, and a pass holds the next two requests."""
    trace, passes = made(3, 2, 3), "pair"
    plan = schedule(trace, passes)
    together = [{row.request for row in Pass.planned(index, plan).rows} for index in range(len(plan))]
    assert together == [{0, 1}] * 4 + [{2}] * 4  # a pass for the prompts, three for what follows
    for settings in ({}, {"eviction": "belady"}, {"eviction": "lfu", "prefetch": "previous_token", "miss": "drop"}):
        result = by_both(trace, capacity="60%", passes=passes, **settings)
        assert [row["decode_passes"] for row in result.per_request] == [3, 3, 3]
    bound = bound_of(trace, configure(capacity="60%", passes=passes))
    assert bound and count(trace, bound)["accesses"] == by_both(trace, capacity="60%", passes=passes).totals["accesses"]


def downward() -> None:
    """Victims are written back over a separate link without stalls, and both engines agree."""
    trace, up = made(2, 2, 12), 'name = "up"\n[[links]]\nbytes_per_s = 5e9\n'
    down = '[[links]]\nbytes_per_s = 1e9\nlatency_ns = 7\ndirection = "down"\n'
    compute = '[compute]\nkind = "measured"\nexpert_ns = 90\n[cpu]\nkind = "measured"\n'
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "up.toml", Path(folder) / "both.toml"
        files[0].write_text(up + compute)
        files[1].write_text(up + down + compute)
        for eviction, miss, contract in product(("lru", "lfu"), ("fetch", "split"), ("atomic", "sequential")):
            chosen = {"capacity": "40%", "eviction": eviction, "miss": miss, "contract": contract}
            without, both = (by_both(trace, platform=str(file), **chosen).totals for file in files)
            assert both["bytes_written"] == EXPERT * both["evictions"] > without["bytes_written"] == 0
            assert both["link_busy_ns"] - without["link_busy_ns"] >= EXPERT * both["evictions"]
            assert {name for name in without if without[name] != both[name]} == {"bytes_written", "link_busy_ns"}


def counter() -> None:
    """Both engines count, new results store the counter, and an older folder still opens."""
    result, name = by_both(made(2, 2, 6), capacity="40%"), "bytes_evicted"
    assert result.totals[name] == EXPERT * result.totals["evictions"] > 0
    with tempfile.TemporaryDirectory() as scratch:
        counted = runs(load(with_older(Path(scratch), result)))[name].to_list()
    assert sorted(counted, key=bool) == [None, result.totals[name]]


def setting() -> None:
    """The setting is an option, has an effect, is stored, and keeps identities at its default."""
    name, default, other = "contention", "platform", "none"
    verbs = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    assert all(name in {each.name for each in verbs[verb].params} for verb in ("replay", "live", "validate"))
    trace = made(2, 2, 6, size=1_000_000)
    configs = [configure(capacity="40%", **{name: value}) for value in (default, other)]
    assert configs[0].identity(trace) == configure(capacity="40%").identity(trace) != configs[1].identity(trace)
    results = [replay(trace, config, engine="reference") for config in configs]
    with tempfile.TemporaryDirectory() as scratch:
        stored = load(with_older(Path(scratch), *results))["config"].struct.field(name).to_list()
    assert sorted(stored) == [other, default, default]


def with_older(scratch: Path, *results: Result) -> Path:
    """Return a folder of results that were written before the patch, and of these."""
    folder = Path(shutil.copytree(BEFORE, scratch / "replays"))
    for result in results:
        Folder(folder).store(part_of(result, None, None), {"sweep_version": 1})
    return folder


if __name__ == "__main__":
    {each.__name__: each for each in (link, batch, downward, counter, setting)}[sys.argv[1]]()
