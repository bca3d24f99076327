"""Replay SpecMD's Table 2 under every reading of what the paper leaves open, one for all 16 cells, none tuned per cell.

A reading says: which order Least-Stale has inside a class (c, a, b), the contract, of which bytes "5 %" is, what
software spends on a load of an expert, whether the cache is kept between requests, how much top-k prefetch fetches
beyond k, and whether a prefetch may evict. Whether an expert in flight counts as a hit changes hit rates, but no time,
so that it is not among them. For each reading Least-Stale's change of TTFT in the cells of four models and four presets
stands beside the published one: signs that agree, Spearman's rank correlation, and the mean difference of the changes
in points. A constant, always the mean of the published changes, is scored beside them.

The four models' routing is SYNTHETIC (`specmd_table2.py` says how, and makes it). `make study-readings` runs it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from specmd_table2 import PRESETS, PUBLISHED, synthetic

from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import console, table
from moereplay.results.metrics import values_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.presets import preset
from moereplay.sweeps.grid import run_grid
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Trace

#: What is left open, and the values of each.
OPEN = {
    "contract": ("sequential", "atomic"),
    "capacity": ("5%@16", "5%@4"),
    "load_us": ("0", "1750"),
    "reset": ("never", "request"),
    "overfetch": ("1", "1.5"),
    "admission": ("evict", "free_only"),
}
ORDERS = ("c", "a", "b")
Row = dict[str, str | float | None]


class Reading(NamedTuple):
    """A value of every open question except the order of Least-Stale."""

    contract: str
    capacity: str
    load_us: str
    reset: str
    overfetch: str
    admission: str

    def config(self, name: str, eviction: str = "") -> ReplayConfig:
        """Return a preset under this reading, with another eviction if given."""
        chosen = preset(name).values()
        chosen |= {"contract": self.contract, "capacity": self.capacity, "reset": self.reset}
        chosen["prefetch_admission"] = self.admission
        chosen["platform"] += f":loading.ns_per_expert={1000 * int(self.load_us)}" if self.load_us != "0" else ""
        if chosen["prefetch"] == "top_k":
            chosen["prefetch"] = f"top_k:factor={self.overfetch}"
        return configure(**chosen | ({"eviction": eviction} if eviction else {}))


READINGS = [Reading(*values) for values in product(*OPEN.values())]


def main() -> None:
    """Replay every reading of every model, score, print the whole ranking, and keep it with its cells in --out."""
    options = _options()
    changes: dict[str, Mapping[tuple[Reading, str, str], float]] = {}
    for model in options.models:
        with TemporaryDirectory() as folder:
            changes[model] = _changes(synthetic(model, options, Path(folder)))
        console(stderr=True).print(f"replayed {model}")
    rows = list(_ranked(changes))
    title = f"Table 2 under {len(rows) - 1} readings: SIMULATED, SYNTHETIC routing"
    console().print(table([_short(row) for row in rows], title=title))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json_text({"ranking": rows, "cells": list(_cells(changes))}, indent=1))


def _short(row: Row) -> Row:
    """Shorten names and values for a terminal."""
    heads = {"capacity": "5% of", "load_us": "us/load", "overfetch": "x k", "admission": "ahead"}
    words = {"5%@16": "16 bit", "5%@4": "4 bit", "free_only": "free", "constant": "-"}
    return {heads.get(name, name): words.get(str(value), value) for name, value in row.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PUBLISHED))
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a synthetic prompt")
    parser.add_argument("--decode", type=int, default=16, help="tokens after it")
    parser.add_argument("--out", type=Path, default=Path("runs/specmd_readings.json"))
    return parser.parse_args()


def _changes(trace: Trace) -> dict[tuple[Reading, str, str], float]:
    """Return by how many percent of the TTFT Least-Stale is faster, by reading, order and preset."""
    evictions = {"": "", **{order: f"least_stale:order={order}" for order in ORDERS}}
    spots = list(product(READINGS, PRESETS, evictions))
    configs = {spot: spot[0].config(spot[1], evictions[spot[2]]) for spot in spots}
    unlike = list(dict.fromkeys(configs.values()))
    found = run_grid(trace, unlike, os.cpu_count() or 1, bounded=False)
    times = {
        config: values_of(result)["ttft_mean_ms"] or 0.0 for config, (result, _) in zip(unlike, found, strict=True)
    }
    return {
        (reading, order, name): 100 * (1 - times[configs[reading, name, order]] / times[configs[reading, name, ""]])
        for reading, name, order in spots
        if order
    }


def _published(model: str) -> list[float]:
    return [100 * (1 - after / before) for before, after in PUBLISHED[model]]


def _ranked(changes: Mapping[str, Mapping[tuple[Reading, str, str], float]]) -> Iterator[Row]:
    """Yield the readings by rank correlation, then by difference; the constant last."""
    theirs = [value for model in changes for value in _published(model)]
    rows = []
    for reading, order in product(READINGS, ORDERS):
        ours = [found[reading, order, name] for found in changes.values() for name in PRESETS]
        rows.append({"LS": order} | reading._asdict() | _scored(ours, theirs))
    yield from sorted(rows, key=lambda row: (-(row["rank"] if row["rank"] is not None else -2), row["off by"]))
    yield {"LS": "constant"} | dict.fromkeys(Reading._fields, "") | _scored([mean(theirs)] * len(theirs), theirs)


def _scored(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    return {
        "signs": sum(mine * other > 0 for mine, other in zip(ours, theirs, strict=True)),
        "rank": spearman(ours, theirs),
        "off by": mean(abs(mine - other) for mine, other in zip(ours, theirs, strict=True)),
    }


def _cells(changes: Mapping[str, Mapping[tuple[Reading, str, str], float]]) -> Iterator[Row]:
    """Yield every change of every reading beside the published one."""
    for model, found in changes.items():
        published: dict[str, float] = dict(zip(PRESETS, _published(model), strict=True))
        for (reading, order, name), change in found.items():
            place = {"model": model, "preset": name, "LS": order}
            yield place | reading._asdict() | {"faster by %": change, "published %": published[name]}


if __name__ == "__main__":
    main()
