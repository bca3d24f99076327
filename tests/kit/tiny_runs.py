"""Shared by analysis tests: small replays with their bounds, and results made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import polars as pl

from moereplay.results.counters import COUNTERS, REQUEST_TIMES
from moereplay.results.files import to_frame, write_frame
from moereplay.results.parts import SWEEP_VERSION, part_of
from moereplay.results.result import Result, Row
from moereplay.results.settings import setting_kinds
from moereplay.simulator.bounds import Counted
from moereplay.simulator.config import KINDS, configure
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.store import Folder
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.synthetic import Synthetic, synthesise

SMALL = Geometry(layers=4, experts=8, k=2, expert_bytes=(1_000_000,) * 4)
#: Of the results that figures are tested on.
EVICTIONS = ["lru", "least_stale", "least_stale:order=a", "belady"]
NO_COUNT: Row = dict.fromkeys(COUNTERS, 0)
NO_TIME: Row = dict.fromkeys(REQUEST_TIMES, 0) | {"ttft_ns": None}


def small_trace(geometry: Geometry = SMALL, tokens: int = 24, requests: int = 2, prompt: int = 4) -> Trace:
    recall = (0.8,) if geometry.layers > 1 else ()
    config = Synthetic(
        kind="markov",
        geometry=geometry,
        requests=requests,
        prompt_tokens=prompt,
        decode_tokens=tokens,
        reuse=0.5,
        recall=recall,
    )
    return synthesise(config)


def replayed(trace: Trace, **grid: Sequence[object]) -> tuple[list[Result], list[Counted | None]]:
    """Every combination of the given settings, and the bound of each."""
    configs = [configure(**dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    results, bounds = zip(*run_grid(trace, configs), strict=True)
    return list(results), list(bounds)


def frame_of(trace: Trace, **grid: Sequence[object]) -> pl.DataFrame:
    return to_frame(*replayed(trace, **grid))


def written_to(folder: Path, results: Sequence[Result], bounds: Sequence[Counted | None]) -> list[Path]:
    """A part for each; a bound goes by the identity of its result."""
    parts = [part_of(result, result.about["identity"], bound) for result, bound in zip(results, bounds, strict=True)]
    for part in parts:
        Folder(folder).store(part, {"sweep_version": SWEEP_VERSION})
    return [folder / part.name for part in parts]


def written_before(folder: Path, results: Sequence[Result], bounds: Sequence[Counted | None]) -> list[Path]:
    """The files that `replay --out` wrote until November 2026."""
    paths = [folder / f"part-{result.about['identity']}.parquet" for result in results]
    for path, result, bound in zip(paths, results, bounds, strict=True):
        write_frame(to_frame([result], [bound]), path)
    return paths


def by_hand(
    totals: Row, layers: Sequence[Row] = (), requests: Sequence[Row] = (), bound: Counted | None = None, **config: str
) -> pl.DataFrame:
    """One result of a replay that never was, of one step; what is not given is zero."""
    chosen = configure(**config)
    about = {
        "identity": repr(sorted(config.items())),
        "label": "SIMULATED",
        "model": "toy",
        "trace": "0123456789abcdef",
    }
    about |= {"semantics": 1, "capacity_bytes": 1, "capacity_forms": "5% = 1 experts"}
    policies = {kind: chosen.spelled_out()[kind] for kind in KINDS}
    result = Result(
        config=chosen.model_dump(mode="json"),
        kinds=setting_kinds(),
        totals=NO_COUNT | {"time_ns": 0, "lifetime": [], "steps": 1} | totals,
        per_layer=[{"phase": "decode", "lifetime": []} | NO_COUNT | row for row in layers],
        per_request=[{"request": number} | NO_TIME | NO_COUNT | row for number, row in enumerate(requests)],
        about=about | {"policies": policies},
    )
    return to_frame([result], [bound])
