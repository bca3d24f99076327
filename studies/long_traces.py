"""Measure time and memory of writing, opening, merging and replaying long traces.

Last changed in commit 73bbeeb0. Does memory grow with the length of a trace?
Answer: hardly, to 1e9 rows: docs/long-traces.md.

Every stage runs in a process of its own. Its memory is sampled while it runs: what it holds itself (`own MB`, anonymous
pages), which must not grow with the trace, and the largest it was (`most MB`), which counts mapped files as well, whose
pages the system may take back at any time. The rows are made here: the experts of a token are neighbours on a ring, the
first of them is drawn by a Zipf law and kept from token to token with probability a third. No model routes like this.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from benchmarks.rounds import machine

from moereplay.analysis.tables import console, table
from moereplay.traces.derived import PLACE
from moereplay.traces.documents import json_text
from moereplay.traces.pieces import Piece
from moereplay.traces.schema import Geometry, Header, Provenance
from moereplay.traces.writer import TraceWriter

KEEP, EXPONENT = 1 / 3, 0.8
DRAWS = 1 << 12  #: places of the table that turns a number into an expert
VALUES = 1 << 21  #: choices made at a time
SECONDS_BETWEEN_LOOKS = 0.05

Row = dict[str, Any]

OPEN = """
import sys, time
from moereplay.traces.store import open_trace
start = time.perf_counter()
trace = open_trace(sys.argv[1])
print(time.perf_counter() - start)
"""
REPLAY = """
import sys, time
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
trace = open_trace(sys.argv[1])
start = time.perf_counter()
totals = replay(trace, configure(eviction=sys.argv[2], capacity="25%", passes="token")).totals
print(time.perf_counter() - start, totals["accesses"], totals["hits"], totals["evictions"])
"""
MERGE = """
import sys, time
from moereplay.traces.combine import merged
from moereplay.traces.store import open_trace
start = time.perf_counter()
merged(sys.argv[2], [open_trace(sys.argv[1])] * 2)
print(time.perf_counter() - start)
"""


def geometry(layers: int, experts: int, k: int) -> Geometry:
    """Return experts of 25 MB each."""
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(25_000_000,) * layers)


def made_pieces(sizes: Geometry, tokens: int, length: int, seed: int) -> Iterator[Piece]:
    """Yield the requests of `length` tokens, an eighth of each a prompt, in blocks of whole requests."""
    rng = np.random.Generator(np.random.PCG64(seed))
    experts = _popular(sizes, rng)
    at_once = max(1, VALUES // (sizes.layers * sizes.k * length))
    for first in range(0, tokens // length, at_once):
        requests = min(at_once, tokens // length - first)
        chosen = _chosen(sizes, experts, requests * length, rng)
        ones = np.ones(requests, np.int64)
        yield Piece({"chosen": chosen}, ones * length, ones * (length // 8))


def _popular(sizes: Geometry, rng: np.random.Generator) -> np.ndarray:
    """Return a Zipf table over the experts of each layer, (L, DRAWS) int16: an expert fills its share of places."""
    mass = np.cumsum(np.arange(1, sizes.experts + 1) ** -EXPONENT)
    ranks = np.searchsorted(mass / mass[-1], (np.arange(DRAWS) + 0.5) / DRAWS).astype(np.int16)
    orders = rng.permuted(np.tile(np.arange(sizes.experts, dtype=np.int16), (sizes.layers, 1)), axis=1)
    return orders[:, ranks]


def _chosen(sizes: Geometry, experts: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Draw experts, (T, L, k) int16."""
    drawn = rng.integers(0, DRAWS, (tokens, sizes.layers), np.int16)
    fresh = rng.integers(0, 256, (tokens, sizes.layers), np.uint8) >= round(256 * KEEP)
    fresh[0] = True
    since = np.maximum.accumulate(np.where(fresh, np.arange(tokens, dtype=np.int32)[:, None], 0), axis=0)
    first = experts[np.arange(sizes.layers), np.take_along_axis(drawn, since, 0)]
    return (first[..., None] + np.arange(sizes.k, dtype=np.int16)) % np.int16(sizes.experts)


def make(path: Path, sizes: Geometry, tokens: int, length: int) -> None:
    """Write the trace."""
    header = Header(geometry=sizes, provenance=Provenance(model="made", source="studies/long_traces.py", seed=0))
    with TraceWriter.create(path, header) as writer:
        for piece in made_pieces(sizes, tokens, length, seed=0):
            writer.append_piece(piece)
        writer.finish()


def measured(stage: str, arguments: list[str]) -> Row:
    """Run a process; return seconds, peak anonymous and resident memory, and its output."""
    start, before, own, most = time.perf_counter(), _processor_time(), 0, 0
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            now, peak = _memory(process.pid)
            own, most = max(own, now), max(most, peak)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        assert process.stdout is not None
        output = process.stdout.read().split()
    if process.returncode:
        raise SystemExit(f"{stage} failed")
    row: Row = {"stage": stage, "s": time.perf_counter() - start, "CPU s": _processor_time() - before}
    row |= {"own MB": own / 1e6, "most MB": most / 1e6}
    return row | {"inside s": float(output[0]) if output else None, "said": output[1:]}


def _processor_time() -> float:
    """Return the CPU seconds of all ended child processes."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _memory(pid: int) -> tuple[int, int]:
    """Return the anonymous memory now and the peak resident set, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "VmHWM"))}
    return 1024 * int(found.get("RssAnon", 0)), 1024 * int(found.get("VmHWM", 0))


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def main(
    rows: Annotated[float, typer.Option(help="(token, layer) rows of the trace.")] = 1e7,
    layers: int = 48,
    experts: int = 16,
    k: int = 1,
    request_tokens: Annotated[int, typer.Option(help="Tokens of each request.")] = 512,
    eviction: str = "lru,least_stale",
    folder: Annotated[Path, typer.Option(help="For the trace, which is removed afterwards.")] = Path("runs/long"),
    out: Annotated[Path | None, typer.Option(help="All figures as JSON.")] = None,
    only_make: Annotated[bool, typer.Option("--only-make", hidden=True)] = False,
) -> None:
    """Make a trace, open, merge and replay it, and print what each took."""
    sizes = geometry(layers, experts, k)
    requests = max(1, round(rows / layers / request_tokens))
    path = folder / "long.zarr"
    if only_make:
        make(path, sizes, requests * request_tokens, request_tokens)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[PLACE] = str(folder)
    shape = ["--layers", layers, "--experts", experts, "--k", k, "--request-tokens", request_tokens]
    same = [__file__, "--rows", rows, *shape, "--folder", folder, "--only-make"]
    figures = [measured("write", [str(each) for each in same])]
    for stage in ("open", "open again"):
        figures.append(measured(stage, ["-c", OPEN, str(path)]))
    figures.append(measured("merge with itself", ["-c", MERGE, str(path), str(folder / "twice.zarr")]))
    for policy in eviction.split(","):
        name = f"{policy}, derived first" if policy == eviction.split(",")[0] else policy
        figures.append(measured(name, ["-c", REPLAY, str(path), policy]))
    first = eviction.split(",")[0]
    figures.append(measured(f"{first} again", ["-c", REPLAY, str(path), first]))
    disk = {"trace GB": _bytes(path) / 1e9, "derived GB": _bytes(folder / "moereplay") / 1e9}
    document = {"rows": requests * request_tokens * layers, "requests": requests, **disk, "stages": figures}
    console().print(table([{n: v for n, v in row.items() if n != "said"} for row in figures]))
    console().print(json_text({name: value for name, value in document.items() if name != "stages"}))
    shutil.rmtree(folder)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json_text({"machine": machine(), **document}, indent=1))


if __name__ == "__main__":
    typer.run(main)
