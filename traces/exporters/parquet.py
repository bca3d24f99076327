"""Parquet with a row per request, token and layer: lists of ids, gate weights and logits; geometry in the metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.lines import Block, blocks
from moereplay.traces.importers.exported import KEY, state
from moereplay.traces.schema import Trace

LISTS = {"experts": pl.Int16, "weights": pl.Float32, "logits": pl.Float32}
KEYS = {"request": pl.Int64, "token": pl.Int64, "layer": pl.Int16, "phase": pl.Int8}
GROUP = 1 << 16  #: rows that a reader decodes together


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Return ids, weights and logits if recorded, and the phase."""
    with target.open() as file:
        write_rows(file, trace, 0, trace.tokens)
    return Answer("moereplay import {path} --out NAME.zarr")


def write_rows(file: BinaryIO, trace: Trace, first: int, last: int) -> None:
    """Write tokens [first, last) as one Parquet file, a block in memory at a time. Raises TraceError and OSError."""
    schema = schema_of(trace)
    failed: list[BaseException] = []

    def frames(*_: Any) -> Iterator[pl.DataFrame]:
        try:
            for block in blocks(trace, first, last):
                yield pl.DataFrame(_columns(block), schema=schema)
        except BaseException as error:  # polars would give it another name
            failed.append(error)
            raise

    try:
        lazy = register_io_source(frames, schema=schema, is_pure=True)
        lazy.sink_parquet(file, row_group_size=GROUP, metadata={KEY: state(trace.header)}, engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise failed[0] if failed else OSError(str(error)) from error


def schema_of(trace: Trace) -> dict[str, Any]:
    """Return columns and their types, of a trace with or without weights and logits."""
    lists = {name: pl.List(kind) for name, kind in LISTS.items() if name == "experts" or name in trace.arrays}
    return {**KEYS, **lists}


def _columns(block: Block) -> dict[str, pl.Series]:
    tokens, layers, _ = block.chosen.shape
    keys = {name: np.repeat(getattr(block, name), layers) for name in ("request", "token", "phase")}
    lists = {"experts": block.chosen, "weights": block.weights, "logits": block.logits}
    columns = {name: pl.Series(name, keys[name]).cast(KEYS[name]) for name in keys}
    columns["layer"] = pl.Series("layer", np.tile(np.arange(layers, dtype=np.int16), tokens))
    return columns | {name: _listed(name, rows) for name, rows in lists.items() if rows is not None}


def _listed(name: str, rows: np.ndarray) -> pl.Series:
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    return pl.Series(name, flat).cast(pl.List(LISTS[name]))


PARQUET = Exporter(
    name="parquet",
    summary="a row per request, token and layer: lists of ids, gate weights, logits; sizes in the metadata",
    writes="NAME.parquet",
    write=write,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
)
