"""How fast the compiled engine is, beside the reference, beside libCacheSim, and beside itself.

    (a) reference over compiled, ns per access: the reference on the first request of the trace, compiled on all of it
    (b) compiled over libCacheSim's C++ LRU on the same stream of experts; theirs has neither time nor link. And what
        has neither here: the curve, which counts the misses at every capacity at once
    (c) a cache of 25 % over one of 1 %: what a larger cache costs
    (d) two replays one after the other over the same two in two threads; and the same of two processes, which share
        nothing: what the machine itself leaves of two cores
    (e) Cache-Prior over the router's own choice
    (g) a user's policy file over the built-in policy that it is a copy of
    (h) with the event log over without; and without over an engine whose sources have neither log nor request rows
        (the log is an `if` at every event, the rows are sums at a request's end: this is what they cost when off)

(f) is `curve_speed.py`. A figure is the median of rounds, ratios are taken within a round. Traces are synthetic, with
the geometry of a known model, one token per pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import typer
from rounds import compared, in_turns, machine

import policies
import policies.eviction
from analysis.tables import console, table
from simulator.config import ReplayConfig, configure
from simulator.curves.curve import curve
from simulator.replay import replay
from traces.geometry import known
from traces.schema import Trace
from traces.store import open_trace
from traces.synthetic import Synthetic, synthesise
from traces.writer import write_trace

try:
    import libcachesim
except ImportError:
    libcachesim = None

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("policies", "simulator", "traces")
CAPACITIES = ("1%", "5%", "25%")
PREFETCHES = ("none", "top_k")
#: Recall of look-ahead and reuse of experts, as measured on OLMoE-like models.
RECALL, REUSE = (0.87,), 0.31
#: log2 of the first size of libCacheSim's hash table: it grows; the default of 128 MiB is slower, as no cache holds it.
SMALL_TABLE = 12
#: libCacheSim's binary format of requests that know their next use.
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])

Row = dict[str, Any]


class Size(NamedTuple):
    """A model's shape, and how much of it: tokens in all, and in the request that the reference replays."""

    model: str
    tokens: int
    first: int


class Made(NamedTuple):
    """A trace on disk, its first request alone, and its stream of experts for libCacheSim."""

    name: str
    whole: Trace
    first: Trace
    stream: Path


FULL = (Size("olmoe-1b-7b", 30_000, 500), Size("deepseek-v3", 3_000, 100))
QUICK = (Size("olmoe-1b-7b", 60, 20), Size("deepseek-v3", 20, 10))


# traces


def make(size: Size, folder: Path) -> Made:
    requests = size.tokens // size.first
    drawn = Synthetic(
        kind="markov",
        geometry=known(size.model).geometry,
        requests=requests,
        prompt_tokens=0,
        decode_tokens=size.first,
        reuse=REUSE,
        recall=RECALL,
    )
    whole = written(folder / f"{size.model}-{size.tokens}.zarr", drawn, requests)
    first = written(folder / f"{size.model}-{size.first}.zarr", drawn, 1)
    return Made(size.model, whole, first, write_stream(whole, folder / f"{size.model}.bin"))


def written(path: Path, drawn: Synthetic, requests: int) -> Trace:
    """The first requests of a synthetic trace, unless they are there."""
    if path.exists():
        return open_trace(path)
    made = synthesise(drawn)
    return write_trace(path, made.header, map(made.request, range(requests)), made.router_bias)


def write_stream(trace: Trace, path: Path) -> Path:
    """Every demanded expert of every token and layer, all of size 1; ids start at 1."""
    first_of_layer = np.arange(trace.geometry.layers) * trace.geometry.experts
    experts = (trace.read("chosen").astype(np.int64) + first_of_layer[None, :, None]).ravel()
    requests = np.zeros(len(experts), ORACLE_GENERAL)
    requests["object"], requests["size"], requests["next"] = experts + 1, 1, -1
    requests.tofile(path)
    return path


# variants: each says how many ns per access it took


def timed(trace: Trace, config: ReplayConfig, engine: str = "compiled", log: bool = False) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        result = replay(trace, config, log, engine)
        return 1e9 * (time.perf_counter() - began) / result.totals["accesses"]

    return run


def untimed(trace: Trace) -> Callable[[], float]:
    """LRU at every capacity, neither time nor link."""

    def run() -> float:
        began = time.perf_counter()
        counted = curve(trace)
        return 1e9 * (time.perf_counter() - began) / counted.accesses

    return run


def theirs(made: Made, capacity: str) -> Callable[[], float]:
    """libCacheSim's loop over the file, without opening it."""
    geometry = made.whole.geometry
    slots = int(float(capacity.rstrip("%")) / 100 * geometry.layers * geometry.experts)
    accesses = made.stream.stat().st_size // ORACLE_GENERAL.itemsize

    def run() -> float:
        reader = libcachesim.TraceReader(str(made.stream), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.LRU(slots, hashpower=SMALL_TABLE)
        began = time.perf_counter()
        cache.process_trace(reader)
        return 1e9 * (time.perf_counter() - began) / accesses

    return run


def two(trace: Trace, config: ReplayConfig, threads: int) -> Callable[[], float]:
    """Two replays, in nanoseconds of wall time per access of both."""

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
            spent = in_turns(variants, max(1, rounds // 3))
            yield {"case": f"{capacity}, prefetch {prefetch}"} | compared(spent, "reference", "compiled")


def over_libcachesim(made: Made, rounds: int) -> Iterator[Row]:
    if libcachesim is None:
        print("(b) is left out: libcachesim is not installed", file=sys.stderr)
        return
    for capacity in CAPACITIES:
        configs = {prefetch: configure(capacity=capacity, prefetch=prefetch) for prefetch in PREFETCHES}
        variants = {f"prefetch {name}": timed(made.whole, config) for name, config in configs.items()}
        variants["curve"] = untimed(made.whole)
        spent = in_turns(variants | {"libCacheSim": theirs(made, capacity)}, rounds)
        for name in variants:
            yield {"case": capacity} | compared(spent, name, "libCacheSim")


def larger_cache(made: Made, rounds: int) -> Iterator[Row]:
    for prefetch in PREFETCHES:
        variants = {
            capacity: timed(made.whole, configure(capacity=capacity, prefetch=prefetch)) for capacity in CAPACITIES
        }
        yield {"case": f"prefetch {prefetch}"} | compared(in_turns(variants, rounds), "25%", "1%")


def two_threads(made: Made, rounds: int) -> Iterator[Row]:
    for prefetch in PREFETCHES:
        config = configure(capacity="5%", prefetch=prefetch)
        spent = in_turns({"in turn": two(made.whole, config, 1), "at once": two(made.whole, config, 2)}, rounds)
        yield {"case": f"5%, prefetch {prefetch}"} | compared(spent, "in turn", "at once")


def cache_prior(made: Made, rounds: int) -> Iterator[Row]:
    for capacity in CAPACITIES:
        routings = ("standard", "cache_prior")
        variants = {name: timed(made.whole, configure(capacity=capacity, routing=name)) for name in routings}
        yield {"case": capacity} | compared(in_turns(variants, rounds), "cache_prior", "standard")


def users_policy(made: Made, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory() as folder, copied_policies(Path(folder), ("lru", "least_stale")) as copies:
        for own, copy in copies.items():
            variants = {name: timed(made.whole, configure(capacity="5%", eviction=name)) for name in (own, copy)}
            yield {"case": f"5%, {own}"} | compared(in_turns(variants, rounds), copy, own)


@contextmanager
def copied_policies(folder: Path, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Copies of eviction policies in files of a user's own, by the names of the originals."""
    copies, known_names = {name: f"user_{name}" for name in names}, policies.NAMES["eviction"]
    for name, copy in copies.items():
        source = (ROOT / "policies" / "eviction" / f"{name}.py").read_text()
        (folder / f"{copy}.py").write_text(source.replace(f'name="{name}"', f'name="{copy}"'))
    policies.NAMES["eviction"] += tuple(copies.values())
    policies.eviction.__path__.append(str(folder))
    yield copies
    policies.NAMES["eviction"] = known_names
    policies.eviction.__path__.remove(str(folder))


def log_on(made: Made, rounds: int) -> Iterator[Row]:
    """Of the first request: a line becomes a Python object in the end."""
    config = configure(capacity="5%", prefetch="top_k")
    spent = in_turns({"log": timed(made.first, config, log=True), "no log": timed(made.first, config)}, rounds)
    yield {"case": "5%, prefetch top_k, first request"} | compared(spent, "log", "no log")


# an engine without log and rows

#: What takes them out of the sources: a file, the line after which a function ends.
TAKEN_OUT = {
    "log.py": ['"""Something that starts `after` ns from now and takes `spent`."""'],
    "counters.py": [
        '"""Charge to the request of this pass from here on."""',
        '"""The pass\'s part in TTFT or TPOT; it began then, ns."""',
        '"""What the counters gained since the last call is what the request in progress cost."""',
    ],
}
SERVER = """
import sys, time
from pathlib import Path
from simulator.config import configure
from simulator.replay import replay
from traces.store import open_trace
trace, config = open_trace(Path(sys.argv[1])), configure(capacity="5%", prefetch=sys.argv[2])
for _ in sys.stdin:
    began = time.perf_counter()
    totals = replay(trace, config, engine="compiled").totals
    print(1e9 * (time.perf_counter() - began) / totals["accesses"], totals["misses"], flush=True)
"""


def log_off(made: Made, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        bare = {"XDG_CACHE_HOME": str(folder / "cache")}
        trees = {"as it is": (ROOT, {}), "without log and rows": (bare_tree(folder / "tree"), bare)}
        for prefetch in PREFETCHES:
            servers = {
                key: stack.enter_context(server(tree, made.whole.path, prefetch, more))
                for key, (tree, more) in trees.items()
            }
            spent = in_turns({key: asked(each) for key, each in servers.items()}, rounds)
            yield {"case": f"5%, prefetch {prefetch}"} | compared(spent, "as it is", "without log and rows")


def bare_tree(folder: Path) -> Path:
    """The sources without the event log and without rows per request."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("samples", "__pycache__"))
    for name, places in TAKEN_OUT.items():
        path = folder / "simulator" / "compiled" / name
        text = path.read_text()
        for place in places:
            assert place in text, f"{name} no longer says {place}"
            text = text.replace(place, f"{place}\n    return")
        path.write_text(text)
    return folder


@contextmanager
def server(tree: Path, trace: Path | None, prefetch: str, more: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that replays once for every line it is sent."""
    command = [sys.executable, "-c", SERVER, str(trace), prefetch]
    environment = os.environ | {"PYTHONPATH": str(tree)} | more
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree) as process:
        yield process


def asked(process: subprocess.Popen[str]) -> Callable[[], float]:
    def run() -> float:
        ask(process)
        return answer(process)

    return run


def ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline().split()[0])


def in_groups(groups: Sequence[Sequence[subprocess.Popen[str]]], accesses: int) -> Callable[[], float]:
    """One group after the other, the processes of a group at once."""

    def run() -> float:
        began = time.perf_counter()
        for group in groups:
            for process in group:
                ask(process)
            for process in group:
                answer(process)
        return 1e9 * (time.perf_counter() - began) / accesses

    return run


def two_processes(made: Made, rounds: int) -> Iterator[Row]:
    accesses = 2 * made.stream.stat().st_size // ORACLE_GENERAL.itemsize
    for prefetch in PREFETCHES:
        with ExitStack() as stack:
            one, other = (stack.enter_context(server(ROOT, made.whole.path, prefetch, {})) for _ in range(2))
            groups = {"in turn": [[one], [other]], "at once": [[one, other]]}
            spent = in_turns({name: in_groups(group, accesses) for name, group in groups.items()}, rounds)
        yield {"case": f"5%, prefetch {prefetch}, processes"} | compared(spent, "in turn", "at once")


# all of it

OLMOE, DEEPSEEK = 0, 1
PARTS: dict[str, list[tuple[Callable[[Made, int], Iterator[Row]], int]]] = {
    "a": [(over_reference, OLMOE), (over_reference, DEEPSEEK)],
    "b": [(over_libcachesim, OLMOE), (over_libcachesim, DEEPSEEK)],
    "c": [(larger_cache, DEEPSEEK)],
    "d": [(two_threads, OLMOE), (two_processes, OLMOE)],
    "e": [(cache_prior, OLMOE)],
    "g": [(users_policy, OLMOE)],
    "h": [(log_on, OLMOE), (log_off, OLMOE)],
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
    """Text of a table: variants with their ns per access, the ratio with its spread."""
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
        out.write_text(json.dumps(document, indent=1))
    shown = console()
    shown.print(", ".join(f"{key} {value}" for key, value in where.items()))
    shown.print("; ".join(f"{size.model}: {size.tokens:,} tokens" for size in sizes), f"; {rounds} rounds")
    shown.print(table([readable(row) for row in rows]))


if __name__ == "__main__":
    typer.run(main)
