"""Measure the speed of the compiled engine against the reference, libCacheSim, and itself.

    (a) reference over compiled, ns per access: the reference on the first request of the trace, compiled on all of it
    (b) compiled over libCacheSim's C++ LRU on the same stream of experts; it models neither time nor link, nor does our
        curve, which counts the misses at every capacity at once; also of a trace in memory, replayed again and for the
        first time, when the demand is made from its rows
    (c) a cache of 25 % over one of 1 %: what a larger cache costs
    (d) two replays one after the other over the same two in two threads; and the same of two processes, which share
        nothing: the machine's own scaling to two cores
    (e) Cache-Prior over the router's own choice
    (f) the curve of all capacities over one replay, LRU and Belady; at these capacities both count the same misses
    (g) a user's policy file over the built-in policy that it is a copy of
    (h) with the event log over without; and without over an engine whose sources have neither log nor request rows
        (the log is an `if` at every event, the rows are sums at a request's end: this is what they cost when off)
    (i) each option over the fast path at 5 %, and the median of all options
    (j) plain Python with the semantics of published tools over compiled: theirs on the first request, ours on all

A figure is the median of rounds in CPU time (d and h: wall time), ratios are taken within a round. Traces are
synthetic, with the geometry of a known model, one token per pass.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import typer
from plain_replays import TOOLS, Gates
from replay_servers import bare_tree, in_groups, round_trip, serve
from rounds import compared, in_turns, machine
from speed_traces import DEEPSEEK, FULL, OLMOE, ORACLE_GENERAL, QUICK, Made, Size, make

from moereplay import policies
from moereplay.analysis.tables import console, table
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.replay import replay
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Trace, memory_trace

try:
    libcachesim: Any = importlib.import_module("libcachesim")  # its stubs call its readers abstract
except ImportError:
    libcachesim = None

ROOT = Path(__file__).resolve().parents[1]
CAPACITIES = ("1%", "5%", "25%")
PREFETCHES = ("none", "top_k")
#: log2 of the first size of libCacheSim's hash table: it grows; the default of 128 MiB is slower, as no cache holds it.
SMALL_TABLE = 12

Row = dict[str, Any]


# variants: each returns ns per access


def spent(run: Callable[[], int]) -> Callable[[], float]:
    """Time a run that returns its accesses, in CPU time, which other work on the machine distorts less."""

    def timed_run() -> float:
        began = time.process_time()
        accesses = run()
        return 1e9 * (time.process_time() - began) / accesses

    return timed_run


def timed(trace: Trace, config: ReplayConfig, engine: str = "compiled", log: bool = False) -> Callable[[], float]:
    return spent(lambda: replay(trace, config, log, engine).totals["accesses"])


def anew(trace: Trace, config: ReplayConfig) -> Callable[[], float]:
    """Time the first replay of a trace in memory, before its demand is known."""

    def run() -> int:
        trace.shared.clear()
        return replay(trace, config).totals["accesses"]

    return spent(run)


def untimed(trace: Trace, policy: str = "lru") -> Callable[[], float]:
    """Count the misses at every capacity, with neither time nor link."""
    return spent(lambda: curve(trace, policy).accesses)


def theirs(made: Made, capacity: str) -> Callable[[], float]:
    """Time libCacheSim's loop over the file, without opening it."""
    accesses = made.stream.stat().st_size // ORACLE_GENERAL.itemsize

    def run() -> float:
        reader = libcachesim.TraceReader(str(made.stream), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.LRU(slots_at(made, capacity), hashpower=SMALL_TABLE)
        began = time.process_time()
        cache.process_trace(reader)
        return 1e9 * (time.process_time() - began) / accesses

    return run


def slots_at(made: Made, capacity: str) -> int:
    geometry = made.whole.geometry
    return int(float(capacity.rstrip("%")) / 100 * geometry.layers * geometry.experts)


def two(trace: Trace, config: ReplayConfig, threads: int) -> Callable[[], float]:
    """Time two replays, in ns of wall time per access."""

    def run() -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(lambda _: replay(trace, config), range(2)))
        return 1e9 * (time.perf_counter() - began) / sum(result.totals["accesses"] for result in results)

    return run


# parts


def over_reference(made: Made, rounds: int) -> Iterator[Row]:
    for capacity in CAPACITIES:
        for prefetch in PREFETCHES:
            config = configure(capacity=capacity, prefetch=prefetch)
            variants = {"reference": timed(made.first, config, "reference"), "compiled": timed(made.whole, config)}
            taken = in_turns(variants, max(1, rounds // 3))
            yield {"case": f"{capacity}, prefetch {prefetch}"} | compared(taken, "reference", "compiled")


def over_libcachesim(made: Made, rounds: int) -> Iterator[Row]:
    if libcachesim is None:
        print("(b) is left out: libcachesim is not installed", file=sys.stderr)
        return
    requests = list(map(made.whole.request, range(made.whole.requests)))
    # two traces, as `anew` makes the other's next replay slow
    held, fresh = (memory_trace(made.whole.header, requests) for _ in range(2))
    for capacity in CAPACITIES:
        configs = {prefetch: configure(capacity=capacity, prefetch=prefetch) for prefetch in PREFETCHES}
        variants = {f"prefetch {name}": timed(made.whole, config) for name, config in configs.items()}
        variants |= {f"in memory, {name}": timed(held, config) for name, config in configs.items()}
        variants |= {f"in memory, {name}, first": anew(fresh, config) for name, config in configs.items()}
        variants["curve"] = untimed(made.whole)
        taken = in_turns(variants | {"libCacheSim": theirs(made, capacity)}, rounds)
        for name in variants:
            yield {"case": capacity} | compared(taken, name, "libCacheSim")


def over_plain_python(made: Made, rounds: int) -> Iterator[Row]:
    ids = made.first.read("chosen").astype(np.int64)
    first_of_layer = np.arange(made.whole.geometry.layers) * made.whole.geometry.experts
    gates = (ids + first_of_layer[None, :, None]).reshape(-1, ids.shape[2]).tolist()
    for capacity in CAPACITIES:
        config, slots = configure(capacity=capacity), slots_at(made, capacity)
        assert TOOLS["BigMoeOnEdge"](gates, slots) == replay(made.first, config).totals["hits"], capacity
        variants = {name: spent(partial(replayed_by, tool, gates, slots)) for name, tool in TOOLS.items()}
        taken = in_turns(variants | {"compiled": timed(made.whole, config)}, max(1, rounds // 3))
        for name in variants:
            yield {"case": capacity} | compared(taken, name, "compiled")


def replayed_by(tool: Callable[[Gates, int], int], gates: Gates, slots: int) -> int:
    tool(gates, slots)
    return sum(map(len, gates))


def larger_cache(made: Made, rounds: int) -> Iterator[Row]:
    for prefetch in PREFETCHES:
        variants = {
            capacity: timed(made.whole, configure(capacity=capacity, prefetch=prefetch)) for capacity in CAPACITIES
        }
        yield {"case": f"prefetch {prefetch}"} | compared(in_turns(variants, rounds), "25%", "1%")


def two_threads(made: Made, rounds: int) -> Iterator[Row]:
    for prefetch in PREFETCHES:
        config = configure(capacity="5%", prefetch=prefetch)
        taken = in_turns({"in turn": two(made.whole, config, 1), "at once": two(made.whole, config, 2)}, rounds)
        yield {"case": f"5%, prefetch {prefetch}"} | compared(taken, "in turn", "at once")


def cache_prior(made: Made, rounds: int) -> Iterator[Row]:
    for capacity in CAPACITIES:
        routings = ("standard", "cache_prior")
        variants = {name: timed(made.whole, configure(capacity=capacity, routing=name)) for name in routings}
        yield {"case": capacity} | compared(in_turns(variants, rounds), "cache_prior", "standard")


def curve_over_replay(made: Made, rounds: int) -> Iterator[Row]:
    for policy in ("lru", "belady"):
        counted = curve(made.whole, policy)
        variants = {"curve": untimed(made.whole, policy)}
        for capacity in CAPACITIES:
            config = configure(eviction=policy, capacity=capacity)
            result = replay(made.whole, config)
            assert counted.misses_at(result.about["capacity_bytes"]) == result.totals["misses"], f"{policy}, {capacity}"
            variants[capacity] = timed(made.whole, config)
        taken = in_turns(variants, rounds)
        for capacity in CAPACITIES:
            yield {"case": policy} | compared(taken, "curve", capacity)


def users_policy(made: Made, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory() as folder, copied_policies(Path(folder), ("lru", "least_stale")) as copies:
        for own, copy in copies.items():
            variants = {name: timed(made.whole, configure(capacity="5%", eviction=name)) for name in (own, copy)}
            yield {"case": f"5%, {own}"} | compared(in_turns(variants, rounds), copy, own)


@contextmanager
def copied_policies(folder: Path, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Copy eviction policies to user policy files; yields names by the names of the originals."""
    copies, known_names = {name: f"user_{name}" for name in names}, policies.NAMES["eviction"]
    for name, copy in copies.items():
        source = (ROOT / "policies" / "eviction" / f"{name}.py").read_text()
        (folder / f"{copy}.py").write_text(source.replace(f'name="{name}"', f'name="{copy}"'))
    policies.NAMES["eviction"] += tuple(copies.values())
    kind = importlib.import_module("moereplay.policies.eviction")
    kind.__path__.append(str(folder))
    yield copies
    policies.NAMES["eviction"] = known_names
    kind.__path__.remove(str(folder))


def log_on(made: Made, rounds: int) -> Iterator[Row]:
    """Use the first request only: each log line becomes a Python object."""
    config = configure(capacity="5%", prefetch="top_k")
    taken = in_turns({"log": timed(made.first, config, log=True), "no log": timed(made.first, config)}, rounds)
    yield {"case": "5%, prefetch top_k, first request"} | compared(taken, "log", "no log")


def log_off(made: Made, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        bare = {"XDG_CACHE_HOME": str(folder / "cache")}
        trees = {"as it is": (ROOT, {}), "without log and rows": (bare_tree(folder / "tree"), bare)}
        for prefetch in PREFETCHES:
            servers = {
                key: stack.enter_context(serve(tree, made.whole.path, prefetch, more))
                for key, (tree, more) in trees.items()
            }
            taken = in_turns({key: round_trip(each) for key, each in servers.items()}, rounds)
            yield {"case": f"5%, prefetch {prefetch}"} | compared(taken, "as it is", "without log and rows")


TWO_LINKS = "two-gpus:links.0.layers=0-7:links.1.layers=8-15"
A_TIER = "desktop-24gb:tiers.0.capacity=4GB"
#: Prices of part (i): figures of the default platform, changed in place, or in a file of a few lines.
IN_PLACE = (
    "link.start_ns=200000",
    "link.first_piece=0.667",
    "link.by_matrix=true",
    "overlap=none",
    "loading.gate_ns=40000",
    "loading.ns_per_expert=20000",
    "decisions.ns_per_victim=2000",
    "decisions.by_policy.lru=12000",
    "power.compute_w=280",
)
IN_A_FILE = {
    "compute.by_tokens": "[compute]\nby_tokens = [[1, 1.0], [8, 1.9], [64, 9.5]]",
    "contention.compute": "[contention]\ncompute = 0.9",
    "draft.ns_per_token": "[draft]\nns_per_token = 300000",
}
#: Settings of each other option of part (i).
OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch top_k": {"prefetch": "top_k"},
    "prefetch side_buffer": {"prefetch": "side_buffer"},
    "eviction least_stale": {"eviction": "least_stale"},
    "eviction arc": {"eviction": "arc"},
    "routing cache_prior": {"routing": "cache_prior"},
    "miss cpu": {"miss": "cpu"},
    "miss cpu, prefetch missed": {"miss": "cpu", "prefetch": "missed"},
    "miss cpu:below=2, batch:8": {"miss": "cpu:below=2", "passes": "batch:8"},
    "miss drop": {"miss": "drop"},
    "miss substitute": {"miss": "substitute"},
    "miss hobbit, three precisions": {"miss": "hobbit"},
    "contract sequential": {"contract": "sequential"},
    "a lower tier": {"platform": A_TIER},
    "a lower tier, miss cpu": {"platform": A_TIER, "miss": "cpu"},
    "two links": {"platform": TWO_LINKS},
    "two links, scope per_link": {"platform": TWO_LINKS, "scope": "per_link"},
    "draft 3": {"draft": "3"},
    "batch:8": {"passes": "batch:8"},
    "batch:8, arrivals": {"passes": "batch:8", "arrivals": "every:0.001"},
    "resident": {"resident": ((0, 0), (0, 1))},
}


def options(made: Made, rounds: int) -> Iterator[Row]:
    """Compare each option with the fast path at 5 %, the event log on the first request only."""
    with TemporaryDirectory() as folder:
        cells = {name: (made.whole, settings, False) for name, settings in OPTIONS.items()}
        cells |= {price: (made.whole, {"platform": f"a100-5gbps:{price}"}, False) for price in IN_PLACE}
        for price, lines in IN_A_FILE.items():
            path = Path(folder) / f"{price}.toml"
            path.write_text(f'name = "{price}"\nbase = "a100-5gbps"\n{lines}\n')
            drafts = {"draft": "3"} if price.startswith("draft") else {}
            cells[price] = (made.whole, {"platform": str(path), **drafts}, False)
        cells["event log, first request"] = (made.first, {}, True)
        ratios = []
        for name, (trace, settings, log) in cells.items():
            plain = timed(trace, configure(capacity="5%"))
            option = timed(trace, configure(capacity="5%", **settings), log=log)
            variants = {"option": option, "fast path": plain}
            row = {"case": name} | compared(in_turns(variants, rounds), "option", "fast path")
            ratios.append(row["ratio"])
            yield row
    print(f"(i) median of {len(ratios)} options over the fast path: {median(ratios):.2f}")


def two_processes(made: Made, rounds: int) -> Iterator[Row]:
    accesses = 2 * made.stream.stat().st_size // ORACLE_GENERAL.itemsize
    for prefetch in PREFETCHES:
        with ExitStack() as stack:
            one, other = (stack.enter_context(serve(ROOT, made.whole.path, prefetch, {})) for _ in range(2))
            groups = {"in turn": [[one], [other]], "at once": [[one, other]]}
            taken = in_turns({name: in_groups(group, accesses) for name, group in groups.items()}, rounds)
        yield {"case": f"5%, prefetch {prefetch}, processes"} | compared(taken, "in turn", "at once")


# all of it

PARTS: dict[str, list[tuple[Callable[[Made, int], Iterator[Row]], int]]] = {
    "a": [(over_reference, OLMOE), (over_reference, DEEPSEEK)],
    "b": [(over_libcachesim, OLMOE), (over_libcachesim, DEEPSEEK)],
    "c": [(larger_cache, DEEPSEEK)],
    "d": [(two_threads, OLMOE), (two_processes, OLMOE)],
    "e": [(cache_prior, OLMOE)],
    "f": [(curve_over_replay, OLMOE)],
    "g": [(users_policy, OLMOE)],
    "h": [(log_on, OLMOE), (log_off, OLMOE)],
    "i": [(options, OLMOE)],
    "j": [(over_plain_python, OLMOE), (over_plain_python, DEEPSEEK)],
}


def measured(parts: str, sizes: tuple[Size, ...], rounds: int, folder: Path) -> Iterator[Row]:
    made: dict[int, Made] = {}
    for part in parts.split(","):
        for measure, which in PARTS[part]:
            if which not in made:
                made[which] = make(sizes[which], folder)
            for row in measure(made[which], rounds):
                yield {"part": part, "shape": made[which].name} | row


def readable(row: Row) -> Row:
    """Format a row: variants with ns per access, the ratio with its range."""
    shown = {key: row[key] for key in ("part", "shape", "case")}
    shown |= {key: f"{row[key]} {row[f'{key}_ns']:,.0f} ns" for key in ("over", "under")}
    return shown | {"ratio": f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"}


def main(
    parts: str = ",".join(PARTS),
    rounds: int = 9,
    quick: bool = False,
    out: Path | None = None,
    folder: Path | None = None,
) -> None:
    """Print the table; `--out` keeps it as JSON, `--folder` keeps the traces, `--quick` is for tests of this file."""
    where, sizes = machine(), QUICK if quick else FULL
    with TemporaryDirectory() as scratch:
        rows = list(measured(parts, sizes, rounds, folder or Path(scratch)))
    document = {"machine": where, "load_after": os.getloadavg(), "rounds": rounds, "sizes": sizes, "rows": rows}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json_text(document, indent=1))
    shown = console()
    shown.print(", ".join(f"{key} {value}" for key, value in where.items()))
    shown.print("; ".join(f"{size.model}: {size.tokens:,} tokens" for size in sizes), f"; {rounds} rounds")
    shown.print(table([readable(row) for row in rows]))


if __name__ == "__main__":
    typer.run(main)
