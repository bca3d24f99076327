"""The file of `validate --out`: a row per policy set, with the results of a live run and its replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.files import check_columns, check_digests, read_rows
from moereplay.results.read import ABOUT_FIELDS
from moereplay.results.result import Row
from moereplay.results.schema import FACTS, with_digests
from moereplay.traces.texts import typed

FILE = "validation.parquet"
#: Counters of a layer that a comparison keeps of either run.
LAYER_COUNTERS = ("accesses", "hits", "late", "misses", "collisions", "bytes_demand", "bytes_prefetch")
#: What the model's output was worth under the policies; sums and means over the scored tokens.
QUALITY = ("tokens", "perplexity_base", "perplexity", "mean_kl", "top1")
_LAYERS = {"layer": pl.Int64} | {f"{side}_{name}": pl.Int64 for side in ("live", "replayed") for name in LAYER_COUNTERS}
_MEASURE = {"name": pl.String} | dict.fromkeys(("live", "replayed", "error", "allowed"), pl.Float64)
_PLACE = dict.fromkeys(("layer", "step_pass", "request"), pl.Int64) | {"tokens": pl.List(pl.Int64)}
_DIVERGENCE = pl.Struct(dict.fromkeys(("what", "live", "replayed"), pl.String) | _PLACE)
#: Beside `config`, whose fields are those of the replays.
SCHEMA: dict[str, Any] = {
    "rows_version": pl.Int64,
    "name": pl.String,
    "verdict": pl.String,
    "passed": pl.Boolean,
    "exact": pl.Boolean,
    "lam": pl.Float64,
    "about": pl.Struct({name: FACTS.get(name, pl.String) for name in ABOUT_FIELDS}),
    "measures": pl.List(pl.Struct(_MEASURE | {"relative": pl.Boolean})),
    "layers": pl.List(pl.Struct(_LAYERS)),
    "events": pl.Int64,
    "open_loop": _DIVERGENCE,
    "closed_ran": pl.Boolean,
    "closed_loop": _DIVERGENCE,
    "quality": pl.Struct(dict.fromkeys(QUALITY, pl.Float64)),
}
NEEDED = {name: [field.name for field in kind.fields] for name, kind in SCHEMA.items() if isinstance(kind, pl.Struct)}


def to_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Return rows as a frame with the columns of `SCHEMA`, a `config` of whole numbers and texts, and a digest."""
    fields = {name: pl.Int64 if isinstance(value, int) else pl.String for name, value in rows[0]["config"].items()}
    return with_digests(pl.DataFrame(rows, schema=SCHEMA | {"config": pl.Struct(fields)}))


def load(folder: Path) -> pl.DataFrame:
    """Return the rows of a folder. Raises ResultError if there are none, or if the file is damaged or foreign."""
    path = folder / FILE
    if not path.exists():
        raise ResultError(f"no validation in {folder}; make one with: moereplay validate TRACE --out {typed(folder)}")
    frame = read_rows(path, "validate")
    check_columns(path, frame.schema, NEEDED)
    check_digests(path, frame, "validate")
    return frame
