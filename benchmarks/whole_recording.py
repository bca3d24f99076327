"""Every eviction policy over a whole recording by the compiled engine; a part of it by both, which must be equal.

Prints hit rate, collisions per miss and seconds of each replay, and checks that the engines give the same on the first
requests (a twentieth of them unless --part says otherwise). An example of a recording is in README: gpt-oss-20b's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rounds import machine

from moereplay import policies
from moereplay.analysis.tables import console, table
from moereplay.policies.contract import PolicyError
from moereplay.results.metrics import METRICS
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan, replay
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Request, Trace, memory_trace
from moereplay.traces.store import open_trace

Row = dict[str, Any]


def evictions(trace: Trace, capacity: str) -> list[ReplayConfig]:
    """Every eviction policy that the trace can feed, at its defaults."""
    configs = [configure(eviction=name, capacity=capacity, passes="token") for name in policies.NAMES["eviction"]]
    return [config for config in configs if _feeds(trace, config)]


def _feeds(trace: Trace, config: ReplayConfig) -> bool:
    try:
        plan(trace, config)
    except (PolicyError, ConfigError) as refusal:
        console().print(f"left out: {refusal}")
        return False
    return True


def first_part(trace: Trace, part: float) -> Trace:
    """The first requests, in memory, without scores."""
    count = max(1, round(trace.requests * part))
    offsets = trace.request_offsets
    requests = [
        _request(trace, int(offsets[i]), int(offsets[i + 1]), int(trace.prompt_lengths[i])) for i in range(count)
    ]
    return memory_trace(trace.header, requests)


def _request(trace: Trace, first: int, last: int, prompt: int) -> Request:
    weights = trace.read("weights", first, last) if "weights" in trace.arrays else None
    return Request(trace.read("chosen", first, last), prompt, weights)


def replayed(trace: Trace, config: ReplayConfig) -> Row:
    """One replay in a line."""
    began = time.perf_counter()
    totals = replay(trace, config).totals
    return {
        "eviction": config.eviction,
        "capacity": config.capacity,
        "hit rate": METRICS["hit_rate"].value(totals),
        "collisions per miss": METRICS["collisions_per_miss"].value(totals),
        "accesses": totals["accesses"],
        "seconds": time.perf_counter() - began,
    }


def differing(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Configurations in which the engines differ in anything that they report."""
    found = []
    for config in configs:
        ours, theirs = (replay(trace, config, engine=engine).to_json() for engine in ("compiled", "reference"))
        if ours != theirs:
            found.append(f"{config.eviction} at {config.capacity}")
    return found


def main(
    recording: Annotated[Path, typer.Argument(help="A trace folder, NAME.zarr.")],
    capacity: Annotated[str, typer.Option(help="Comma list.")] = "5%,25%,50%",
    part: Annotated[float, typer.Option(help="Share of the requests that both engines replay; 0 for none.")] = 0.05,
    out: Annotated[Path | None, typer.Option(help="Write the lines as JSON.")] = None,
) -> None:
    """Print the table; exit 1 if the engines differ."""
    trace = open_trace(recording)
    configs = [config for each in capacity.split(",") for config in evictions(trace, each)]
    rows = []
    for config in configs:
        rows.append(replayed(trace, config))
        console().print(f"{config.eviction} at {config.capacity}: {rows[-1]['seconds']:.1f} s")
    console().print(table(rows))
    console().print(f"{len(rows)} replays in {sum(row['seconds'] for row in rows):.1f} s; {machine()}")
    if out:
        out.write_text(json_text(rows, indent=1))
    if part:
        sample = first_part(trace, part)
        both = [config for config in configs if _feeds(sample, config)]
        wrong = differing(sample, both)
        console().print(
            f"{len(both)} configurations over {sample.requests} requests by both engines: {wrong or 'equal'}"
        )
        raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
