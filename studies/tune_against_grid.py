"""Measure how much of the true Pareto set a search of 200 trials finds, by sampler: `make study-tune`.

Last changed in commit bb8bebef. How much of the true Pareto set does `tune` find?
Answer: docs/sweeps.md.

A grid of 2,000 configurations is enumerated first, so that the answer is known; searches then look results up. Measured
is the volume that a set dominates, of the volume that the true one does, every objective scaled to the grid's range.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from statistics import mean

from moereplay.results.result import METRICS
from moereplay.sweeps.experiment.expand import configurations
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.jobs import Batch, Headline, compute, job_of, open_traces
from moereplay.sweeps.run import Stored
from moereplay.sweeps.tune import Found, Search, tune
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

GRID = """
traces = ["trace.zarr"]
[base]
passes = "token"
[grid]
eviction = ["lru", "fifo", "lfu", "least_stale", "farthest_layer"]
routing = ["standard", "cache_prior:lam=.1", "cache_prior:lam=.25", "cache_prior:lam=.5"]
miss = ["fetch", "drop:keep=1", "substitute", "substitute:tolerance=.25", "substitute:tolerance=.5"]
prefetch = ["none", "top_k"]
capacity = ["15%", "20%", "25%", "30%", "35%", "40%", "50%", "60%", "70%", "80%"]
"""
OBJECTIVES = ("tpot_ms", "mass_share_kept", "capacity_gb")
TRIALS, SEEDS, POINTS = 200, 3, 20_000


class Known:
    """Executor that looks results up."""

    slots = room = 2

    def __init__(self, figures: dict[tuple[str, str], dict[str, float]]) -> None:
        self._figures, self._waiting = figures, []

    def submit(self, batch: Batch, alone: bool = False) -> None:
        self._waiting.append(batch)

    def collect(self, seconds: float) -> list[Stored]:
        waiting, self._waiting = self._waiting, []
        return [Stored(b, [Headline(job.key, 0.01, None, self._figures[job.key]) for job in b.jobs]) for b in waiting]

    def close(self) -> None:
        pass


def volume(points: list[list[float]], dots: list[list[float]]) -> float:
    """Return the share of dots that some point dominates or equals; 1 is best."""
    return mean(any(all(p >= d for p, d in zip(point, dot, strict=True)) for point in points) for dot in dots)


def undominated(points: list[list[float]]) -> list[list[float]]:
    """Return the points that no other dominates."""

    def beats(one: list[float], other: list[float]) -> bool:
        return one != other and all(a >= b for a, b in zip(one, other, strict=True))

    return [point for point in points if not any(beats(other, point) for other in points)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grid.toml"
        file.write_text(GRID)
        shape = Geometry(layers=3, experts=8, k=2, expert_bytes=(10_000_000,) * 3)
        made = Synthetic(geometry=shape, kind="markov", reuse=0.5, prompt_tokens=2, decode_tokens=12, recall=(0.8,))
        trace = synthesise(made)
        write_trace(file.with_name("trace.zarr"), trace.header, [trace.request(0)])
        compare(file)


def compare(file: Path) -> None:
    experiment = read(file)
    traces = open_traces(experiment.traces, file.parent, file)
    jobs = [job_of(traces[0], config) for config in configurations(experiment, file)]
    headlines = compute(Batch(0, tuple(jobs), "reference", False)).headlines
    figures = {headline.key: headline.figures for headline in headlines}
    ranges = {name: [each[name] for each in figures.values()] for name in OBJECTIVES}
    dice = random.Random(0)
    dots = [[dice.random() for _ in OBJECTIVES] for _ in range(POINTS)]

    def scaled(values: dict[str, float]) -> list[float]:
        shares = [(values[name] - min(ranges[name])) / (max(ranges[name]) - min(ranges[name])) for name in OBJECTIVES]
        return [
            share if METRICS[name].larger_is_better else 1 - share
            for name, share in zip(OBJECTIVES, shares, strict=True)
        ]

    front = undominated([list(point) for point in {tuple(scaled(each)) for each in figures.values()}])
    whole = volume(front, dots)
    print(f"{len(jobs):,} configurations, a Pareto set of {len(front)} points; {TRIALS} trials, {SEEDS} seeds")
    for sampler in ("tpe", "nsgaii", "random"):
        shares = []
        for seed in range(SEEDS):
            search = Search(experiment, file, traces, OBJECTIVES, TRIALS, sampler, seed, "reference")
            with tempfile.TemporaryDirectory() as out:
                found: list[Found] = tune(search, Path(out), Known(figures))
            shares.append(volume([scaled(each.values) for each in found], dots) / whole)
        print(f"{sampler:8} {mean(shares):.3f} of the volume ({min(shares):.3f} to {max(shares):.3f})")


if __name__ == "__main__":
    main()
