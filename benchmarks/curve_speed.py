"""What a curve of all capacities costs in single replays: LRU and Belady, OLMoE's shape, in turns on one machine.

Each round times the curve and one replay per capacity, in an order drawn anew; ratios are of times within a round, so
that a machine that is slow for a while slows all of them. Both read the same derived arrays, memory-mapped; compiling
and deriving happen before the first round. At the replayed capacities both must count the same misses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import typer

from moereplay.analysis.tables import console, table
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.replay import replay
from moereplay.traces.geometry import known
from moereplay.traces.schema import Trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

CURVE = "curve"
REQUESTS = 8


def made_trace(model: str, tokens: int, path: Path) -> Trace:
    drawn = Synthetic(
        kind="markov",
        geometry=known(model).geometry,
        requests=REQUESTS,
        prompt_tokens=0,
        decode_tokens=tokens // REQUESTS,
        reuse=0.31,
        logits=False,
    )
    made = synthesise(drawn)
    return write_trace(path, made.header, map(made.request, range(made.requests)))


def misses(trace: Trace, policy: str, capacity: str, engine: str) -> tuple[int, int]:
    """Bytes of the capacity, and what a replay misses with them."""
    result = replay(trace, configure(eviction=policy, capacity=capacity), engine=engine)
    return result.about["capacity_bytes"], result.totals["misses"]


def check(trace: Trace, policy: str, capacities: list[str], engine: str) -> None:
    """Compile, derive, and compare."""
    counted = curve(trace, policy)
    for capacity in capacities:
        size, missed = misses(trace, policy, capacity, engine)
        assert counted.misses_at(size) == missed, f"{policy} at {capacity}: the curve and a replay differ"


def measure(trace: Trace, policy: str, capacities: list[str], engine: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant, round by round."""
    variants: dict[str, Callable[[], object]] = {CURVE: lambda: curve(trace, policy)}
    for capacity in capacities:
        variants[capacity] = lambda capacity=capacity: misses(trace, policy, capacity, engine)
    spent: dict[str, list[float]] = {name: [] for name in variants}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(variants), len(variants)):
            began = time.perf_counter()
            variants[name]()
            spent[name].append(time.perf_counter() - began)
    return spent


def rows(policy: str, spent: dict[str, list[float]], accesses: int) -> list[dict[str, object]]:
    found = []
    for capacity, single in spent.items():
        if capacity == CURVE:
            continue
        ratios = [whole / one for whole, one in zip(spent[CURVE], single, strict=True)]
        found.append(
            {
                "policy": policy,
                "one replay at": capacity,
                "replay ns/access": 1e9 * median(single) / accesses,
                "curve ns/access": 1e9 * median(spent[CURVE]) / accesses,
                "curve / replay": f"{median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})",
            }
        )
    return found


def main(
    model: str = "olmoe-1b-7b",
    tokens: int = 30_000,
    capacities: str = "1%,5%,25%",
    rounds: int = 9,
    engine: str = "compiled",
) -> None:
    listed, out = capacities.split(","), console()
    with TemporaryDirectory() as folder:
        trace, found = made_trace(model, tokens, Path(folder) / "made.zarr"), []
        for policy in ("lru", "belady"):
            check(trace, policy, listed, engine)
            accesses = curve(trace, policy).accesses
            found += rows(policy, measure(trace, policy, listed, engine, rounds), accesses)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    out.print(f"{model}: {layers} layers of {experts} experts, {trace.tokens:,} tokens, {accesses:,} accesses")
    out.print(f"a curve of {layers * experts:,} capacities over one replay by the {engine} engine")
    out.print(f"{rounds} rounds; medians, ratios with (min to max)")
    out.print(table(found))


if __name__ == "__main__":
    typer.run(main)
