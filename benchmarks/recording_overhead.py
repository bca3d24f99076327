"""Measure the cost of recording over plain generate(): the same greedy tokens, in turns on one machine.

Each round runs every variant over the same prompts, in an order drawn anew; ratios are of times within a round, so that
a machine that is slow for a while slows all of them. Recording writes a real trace and ends with its last commit.
Process time (of all threads) is shown beside wall time: on a shared machine it is the steadier of the two.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import typer

from moereplay.analysis.tables import console, table
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import Decoding, continued
from moereplay.tracegen.folder import MINIATURE
from moereplay.tracegen.prompts import read_prompts
from moereplay.tracegen.record import Plan, Progress, record, room_of
from moereplay.tracegen.tokens import Work, encode

PLAIN = "plain generate()"
RECORDED = {"recorded, no look-ahead": 0, "recorded, look-ahead 2": 2}


class Timing(NamedTuple):
    wall: float
    cpu: float
    tokens: int
    bytes: int = 0


def plainly(loaded: Loaded, work: Work, decoding: Decoding) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    new = [continued(loaded.model, ids.tolist(), decoding, 0) for ids in work.sequences]
    spent = time.perf_counter() - wall, time.process_time() - cpu
    return Timing(*spent, sum(len(ids) + len(added) - 1 for ids, added in zip(work.sequences, new, strict=True)))


def recorded(loaded: Loaded, work: Work, decoding: Decoding, depth: int) -> Timing:
    began: list[float] = []

    def note(at: Progress) -> None:
        if not at.done:  # the probe passes before the first request are not per token
            began.extend((time.perf_counter(), time.process_time()))

    with TemporaryDirectory() as folder:
        trace = record(loaded, work, Path(folder) / "a.zarr", Plan(decoding=decoding, look_ahead=depth), progress=note)
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return Timing(*spent, trace.tokens, size)


def measure(loaded: Loaded, work: Work, decoding: Decoding, rounds: int) -> dict[str, list[Timing]]:
    variants: dict[str, Callable[[], Timing]] = {PLAIN: lambda: plainly(loaded, work, decoding)}
    for name, depth in RECORDED.items():
        variants[name] = lambda depth=depth: recorded(loaded, work, decoding, depth)
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    draw = random.Random(0)
    for turn in range(rounds + 1):
        for name in draw.sample(list(variants), len(variants)):
            timing = variants[name]()
            if turn:  # the first round warms caches and allocators
                timings[name].append(timing)
    return timings


def rows(timings: dict[str, list[Timing]]) -> list[dict[str, object]]:
    plain = timings[PLAIN]
    found = []
    for name, runs in timings.items():
        assert {run.tokens for run in runs} == {plain[0].tokens}, "recording changed what the model said"
        wall = [run.wall / one.wall for run, one in zip(runs, plain, strict=True)]
        cpu = [run.cpu / one.cpu for run, one in zip(runs, plain, strict=True)]
        found.append(
            {
                "variant": name,
                "tokens/s": median(run.tokens / run.wall for run in runs),
                "wall / plain": f"{median(wall):.3f} ({min(wall):.3f} to {max(wall):.3f})",
                "cpu / plain": f"{median(cpu):.3f} ({min(cpu):.3f} to {max(cpu):.3f})",
                "trace bytes/token": round(runs[0].bytes / runs[0].tokens) or None,
            }
        )
    return found


def main(
    model: str = "miniature",
    prompts: Path = MINIATURE / "prompts.jsonl",
    field: str | None = None,
    limit: int = 8,
    new_tokens: int = 64,
    rounds: int = 7,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    loaded = load(model, device=device, dtype=dtype)
    work = encode(read_prompts([prompts], field).chosen(limit=limit), loaded.tokenizer, room_of(loaded), new_tokens)
    timings = measure(loaded, work, Decoding(max_new_tokens=new_tokens), rounds)
    tokens = timings[PLAIN][0].tokens
    out = console()
    out.print(f"{loaded.name}, {loaded.dtype}, {loaded.model.device}; {limit} prompts, {tokens} tokens a round")
    out.print(f"{rounds} rounds; ratios: median (min to max)")
    out.print(table(rows(timings)))


if __name__ == "__main__":
    typer.run(main)
