"""Replay SpecMD's Table 2: the change of TTFT when Least-Stale replaces a configuration's eviction.

Last changed in commit bb8bebef. Does SpecMD's Table 2 appear in a replay?
Answer: under no reading tried: docs/papers.md.

Presets specmd-1 to specmd-4 (4-bit experts), each with and without +ls, at both readings of "5 %": of 4-bit and of
16-bit expert bytes. Published (arXiv 2602.03921) are TTFTs; positive percentages mean that Least-Stale is faster. After
the cells, a line per reading says how many signs agree, and the rank correlation (Spearman) over the cells. Beside it,
"always better": one positive number for every cell has nearly all signs right, and a constant has no rank correlation.

Not tuned to agree. SYNTHETIC: the four models' traces have their geometry and router, but draws from a Zipf law for
routing, with one lift of reuse over chance and one look-ahead recall for all, measured on the bundled miniature; prompt
lengths are unpublished, and taken as 64. Models differ in geometry only, not in what they learned. Only
the miniature's sample is recorded; it has OLMoE's topology, so it stands beside OLMoE's row, outside of the 16 cells,
and so does the trace of `--trace`. Where that has no look-ahead an oracle stands for top_k (recall and precision .87),
where it has no prompts the change is that of the time per token, and presets that need more than it has are left out.
SIMULATED: its machine's 5 GB/s, without the 1 to 2.5 ms per expert that its software adds to small experts' loads, so
percentages can be compared and milliseconds cannot; `--load-us 1750` adds them. `make study-specmd` runs it.

With --readings (`make study-readings`) the synthetic models are replayed under every reading of what the paper leaves
open, one for all 16 cells, none tuned per cell. A reading says: which order Least-Stale has inside a class (c, a, b),
the contract, of which bytes "5 %" is, what software spends on a load of an expert, whether the cache is kept between
requests, how much top-k prefetch fetches beyond k, and whether a prefetch may evict. Whether an expert in flight counts
as a hit changes hit rates, but no time, so that it is not among them. Scored are signs that agree, Spearman's rank
correlation, and the mean difference of the changes in points; a constant, always the mean of the published changes,
beside them.
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

from moereplay.analysis.metrics import measured
from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import console, table
from moereplay.results.files import to_frame
from moereplay.results.result import values_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.presets import LEAST_STALE, preset
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.papers import figures_of, predictor
from moereplay.sweeps.recommend.space import can_replay
from moereplay.traces.documents import json_text
from moereplay.traces.geometry import known
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

PRESETS = ("specmd-1", "specmd-2", "specmd-3", "specmd-4")
#: TTFT in ms of each preset as it is, and with Least-Stale, by model.
PUBLISHED = {
    numbers.model: [(before, after) for _, before, after in numbers.quotients]
    for numbers in figures_of("specmd", "table_2")[0].entry.published
}
SAMPLE = Path(__file__).parents[1] / "traces" / "samples" / "miniature.zarr"
MINIATURE, BESIDE = "miniature", "olmoe-1b-7b"
CAPACITIES = ("5%@4", "5%@16")  #: "5 %" of the bytes that experts have, and of those that they would have at 16 bits
#: Of the miniature's sample, by `moereplay inspect`: reuse .314 where chance is .125, and look-ahead recall at depth 1.
LIFT = (0.314 - 0.125) / (1 - 0.125)
RECALL = 0.87
LS = " +ls"  #: ends the name of a column that is of the run with Least-Stale
SHOWN = {
    "TTFT ms": "ttft_mean_ms",
    "TPOT ms": "tpot_ms",
    "hit rate": "hit_rate",
    "collisions/miss": "collisions_per_miss",
}
Row = dict[str, str | float | None]


class Cell(NamedTuple):
    """One model under one preset at one capacity."""

    model: str
    preset: str
    capacity: str
    predictor: str = "top_k"  #: stand-in for top_k

    def config(self, suffix: str, load_us: int) -> ReplayConfig:
        """Return the preset at this capacity, with `load_us` microseconds of software per load of an expert."""
        settings = preset(self.preset + suffix).values() | {"capacity": self.capacity}
        if settings["prefetch"] == "top_k":
            settings["prefetch"] = self.predictor
        if load_us:
            settings["platform"] += f":loading.ns_per_expert={1000 * load_us}"
        return configure(**settings)

    def published(self) -> tuple[float, float]:
        """Return the published TTFT in ms without and with Least-Stale; OLMoE's for a trace."""
        return PUBLISHED.get(self.model, PUBLISHED[BESIDE])[PRESETS.index(self.preset)]


def main() -> None:
    """Make the traces, replay, print a table per model and one of agreement; keep both in --out."""
    options = _options()
    if options.readings:
        readings(options)
        return
    rows: list[Row] = []
    for model in [str(options.trace)] if options.trace else options.models:
        with TemporaryDirectory() as folder:
            found = list(_cells(model, _trace(model, options, Path(folder)), options.load_us))
        kind = "SYNTHETIC routing" if model in PUBLISHED else "recorded"
        title = f"{model} ({kind}): SIMULATED, cells are without -> with Least-Stale; open loop where output changes"
        console().print(table([_arrows(row) for row in found], title=title))
        rows += found
    agreed = [line for capacity in CAPACITIES for line in _agreement(rows, capacity)]
    console().print(table(agreed, title="agreement with the published changes of TTFT"))
    _keep(options.out or Path("runs/specmd_table2.json"), {"cells": rows, "agreement": agreed})


def _keep(path: Path, document: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(document, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=[MINIATURE, *PUBLISHED])
    parser.add_argument("--trace", type=Path, help="this one alone, beside OLMoE's row")
    parser.add_argument("--requests", type=int, default=8, help="4 is enough for --readings")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a synthetic prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens after it")
    parser.add_argument("--load-us", type=int, default=0, help="microseconds of software per load of an expert")
    parser.add_argument("--readings", action="store_true", help="all models under every reading, ranked")
    parser.add_argument("--out", type=Path, help="default: runs/specmd_table2.json, or runs/specmd_readings.json")
    return parser.parse_args()


def _trace(model: str, options: argparse.Namespace, folder: Path) -> Trace:
    """Return the miniature's sample, or synthetic routing with the model's geometry."""
    if model not in PUBLISHED:
        return open_trace(SAMPLE if model == MINIATURE else Path(model))
    return synthetic(model, options, folder)


def synthetic(model: str, options: argparse.Namespace, folder: Path) -> Trace:
    """Write synthetic routing with a model's geometry, sized by the options."""
    geometry = known(model).geometry
    made = synthesise(
        Synthetic(
            kind="markov",
            geometry=geometry,
            requests=options.requests,
            prompt_tokens=options.prompt,
            decode_tokens=options.decode,
            reuse=_reuse(geometry),
            recall=(RECALL,),
        )
    )
    return write_trace(folder / "synthetic.zarr", made.header, map(made.request, range(made.requests)))


def _reuse(geometry: Geometry) -> float:
    """Return the miniature's lift over chance, applied to this model's chance."""
    chance = geometry.k / geometry.experts
    return chance + LIFT * (1 - chance)


def _cells(model: str, trace: Trace, load_us: int) -> Iterator[Row]:
    every = [Cell(model, name, capacity, predictor(trace)) for capacity in CAPACITIES for name in PRESETS]
    cells = [cell for cell in every if can_replay(trace, cell.config("", load_us))]
    configs = [cell.config(suffix, load_us) for cell in cells for suffix in ("", LEAST_STALE)]
    results = [result for result, _ in run_grid(trace, configs, os.cpu_count() or 1, bounded=False)]
    seen = measured(to_frame(results, [None] * len(results))).to_dicts()
    for cell, before, after in zip(cells, seen[::2], seen[1::2], strict=True):
        yield _row(cell, before, after)


def _row(cell: Cell, before: dict, after: dict) -> Row:
    pairs = {f"{name}{side}": row[key] for name, key in SHOWN.items() for side, row in (("", before), (LS, after))}
    first, last = cell.published()
    time = "tpot_ms" if before["ttft_mean_ms"] is None else "ttft_mean_ms"
    ours = _faster(before[time], after[time])
    change = {
        "faster by %": ours,
        "published %": _faster(first, last),
        "published ms": first,
        f"published ms{LS}": last,
    }
    return cell._asdict() | pairs | change


def _faster(before: float, after: float) -> float:
    """Return the improvement in percent of the time before."""
    return 100 * (before - after) / before


def _arrows(row: Row) -> Row:
    """Format a row: both numbers of a pair in one cell."""
    pairs = {name.removesuffix(LS) for name in row if name.endswith(LS)}
    drawn: Row = {}
    for name, value in row.items():
        if name in pairs:
            drawn[name] = f"{_short(value)} -> {_short(row[name + LS])}"
        elif name != "model" and not name.endswith(LS):
            drawn[name] = f"{value:+.1f}" if isinstance(value, float) else value
    return drawn


def _short(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(float(value)) < 1000 else f"{float(value):.0f}"


def _agreement(rows: list[Row], capacity: str) -> Iterator[Row]:
    """Yield the agreement of the four models, of the miniature, and of a constant beside each."""
    for name, synthetic in (("synthetic", True), ("recorded", False)):
        cells = [row for row in rows if row["capacity"] == capacity and (row["model"] in PUBLISHED) == synthetic]
        ours, theirs = ([float(row[column] or 0) for row in cells] for column in ("faster by %", "published %"))
        if cells:
            means = {"mean faster by %": sum(ours) / len(ours), "published": sum(theirs) / len(theirs)}
            yield {"capacity": capacity, "who": f"{name}, replayed"} | _scored(ours, theirs) | means
            yield {"capacity": capacity, "who": f"{name}, always better"} | _scored([1.0] * len(theirs), theirs)


def _scored(ours: list[float], theirs: list[float]) -> Row:
    """Score signs and ranks; a change of zero agrees with neither sign."""
    found = _scores(ours, theirs)
    return {"signs that agree": f"{found['signs']} of {len(ours)}", "rank correlation": found["rank"]}


# -- every reading

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


def readings(options: argparse.Namespace) -> None:
    """Replay every reading of every model, score, print the whole ranking, and keep it with its cells."""
    changes: dict[str, Mapping[tuple[Reading, str, str], float]] = {}
    for model in (each for each in options.models if each in PUBLISHED):
        with TemporaryDirectory() as folder:
            changes[model] = _changes(synthetic(model, options, Path(folder)))
        console(stderr=True).print(f"replayed {model}")
    rows = list(_ranked(changes))
    title = f"Table 2 under {len(rows) - 1} readings: SIMULATED, SYNTHETIC routing"
    console().print(table([_in_short(row) for row in rows], title=title))
    _keep(options.out or Path("runs/specmd_readings.json"), {"ranking": rows, "cells": list(_every_cell(changes))})


def _in_short(row: Row) -> Row:
    """Shorten names and values for a terminal."""
    heads = {"capacity": "5% of", "load_us": "us/load", "overfetch": "x k", "admission": "ahead"}
    words = {"5%@16": "16 bit", "5%@4": "4 bit", "free_only": "free", "constant": "-"}
    return {heads.get(name, name): words.get(str(value), value) for name, value in row.items()}


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
        rows.append({"LS": order} | reading._asdict() | _scores(ours, theirs))
    yield from sorted(rows, key=lambda row: (-(row["rank"] if row["rank"] is not None else -2), row["off by"]))
    yield {"LS": "constant"} | dict.fromkeys(Reading._fields, "") | _scores([mean(theirs)] * len(theirs), theirs)


def _scores(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    return {
        "signs": sum(mine * other > 0 for mine, other in zip(ours, theirs, strict=True)),
        "rank": spearman(ours, theirs),
        "off by": mean(abs(mine - other) for mine, other in zip(ours, theirs, strict=True)),
    }


def _every_cell(changes: Mapping[str, Mapping[tuple[Reading, str, str], float]]) -> Iterator[Row]:
    """Yield every change of every reading beside the published one."""
    for model, found in changes.items():
        published: dict[str, float] = dict(zip(PRESETS, _published(model), strict=True))
        for (reading, order, name), change in found.items():
            place = {"model": model, "preset": name, "LS": order}
            yield place | reading._asdict() | {"faster by %": change, "published %": published[name]}


if __name__ == "__main__":
    main()
