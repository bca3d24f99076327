"""Parquet of `moereplay export`: a file, or the folder of a data set with its shards below data/.

The metadata of each file has the sizes of the model, columns are those of `traces/exporters/parquet.py`, and rows are
ordered by request, token and layer. They are read in pieces: memory is that of the longest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.documents import refuse_irregular
from moereplay.traces.importers.archive import EXPANSION, allowance
from moereplay.traces.importers.by_request import prompt_of
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT, LAYER
from moereplay.traces.schema import Geometry, Request, TraceError, check_values, first_refused, shown
from moereplay.traces.stated import KEY, sizes_in

SUFFIX = ".parquet"
KEYS = {"request": COUNT, "token": COUNT, "layer": LAYER, "phase": COUNT._replace(most=1)}
LISTS = {"experts": "chosen", "weights": "weights", "logits": "logits"}  #: and the arrays of a trace that they are
ROWS = 1 << 16  #: read at a time, a row group of the exporter's
CELL = 8  #: bytes of a number

Columns = Mapping[str, np.ndarray]


def sniff(path: Path) -> bool:
    """Return True for Parquet files, alone or in the folder of a data set, that all have our key in their metadata."""
    files = _files(path)
    return bool(files) and all(_metadata(file) is not None for file in files)


def read(path: Path, options: Options) -> Foreign:
    """Return requests in the order of the rows. Raises TraceError naming the file and row that is not as documented."""
    files = _files(path)
    if not files:
        raise TraceError(
            f"{path}: missing {SUFFIX} file: expected one that `moereplay export` wrote, or a folder of them"
        )
    stated, model, made = sizes_in(_metadata(files[0]) or "", f"{files[0]}: metadata {KEY}")
    highest = stated.experts - 1  # ids are held to it as they are read
    shape = Shape(stated.layers, stated.k, highest, stated.experts, stated.expert_bytes, stated)
    header = header_for(shape, options, Origin(EXPORTED.name, path, files, model=model, synthetic=made), [])
    return Foreign(header, _requests(files, header.geometry, options))


def _files(path: Path) -> list[Path]:
    """Return the file; or of a folder those directly in it, else those in its data/."""
    return files_of(path, SUFFIX) or (files_of(path / "data", SUFFIX) if path.is_dir() else [])


def _metadata(file: Path) -> str | None:
    """Return the metadata under our key; None for a file that lacks it or is not Parquet."""
    import polars as pl

    try:
        refuse_irregular(file)
        return pl.read_parquet_metadata(file).get(KEY)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, UnicodeDecodeError):
        return None


def _requests(files: list[Path], geometry: Geometry, options: Options) -> Iterator[Request]:
    """Yield the rows of a file between two changes of the request's number; a file holds whole requests."""
    for file in files:
        waiting: list[Columns] = []
        for columns in _batches(file, geometry):
            edges = np.flatnonzero(np.diff(columns["request"])) + 1
            for first, last in pairwise([0, *edges, len(columns["request"])]):
                piece = {name: rows[first:last] for name, rows in columns.items()}
                if waiting and waiting[0]["request"][0] != piece["request"][0]:
                    yield _request(waiting, geometry, options, file)
                    waiting = []
                waiting.append(piece)
        yield _request(waiting, geometry, options, file)


def _request(pieces: list[Columns], geometry: Geometry, options: Options, file: Path) -> Request:
    """Return rows as (T, L, ...). Raises TraceError unless they are ordered by token, with every layer of each."""
    rows = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    number, layers = int(rows["request"][0]), geometry.layers
    tokens = len(rows["layer"]) // layers
    place = (np.repeat(np.arange(tokens) + rows["token"][0], layers), np.tile(np.arange(layers), tokens))
    for name, expected in zip(("token", "layer"), place, strict=True):
        if not np.array_equal(rows[name], expected):
            fix = f"expected its tokens in order, each with layers 0 to {layers - 1}; export the trace again"
            raise TraceError(f"{file}: request {number} has rows that are missing, repeated or out of order: {fix}")
    prompt = prompt_of(rows["phase"][::layers], number, str(file))
    dense = {array: rows[name].reshape(tokens, layers, -1) for name, array in LISTS.items() if name in rows}
    chosen, weights, logits = dense["chosen"], dense.get("weights"), dense.get("logits")
    return Request(chosen, prompt_tokens(options, tokens, prompt), weights, logits)


def _batches(file: Path, geometry: Geometry) -> Iterator[Columns]:
    """Yield some rows at a time as arrays by column, (N,) or (N, width). Raises TraceError naming the file."""
    import polars as pl

    try:
        refuse_irregular(file)
        lazy = pl.scan_parquet(file)
        names = [name for name in (*KEYS, *LISTS) if name in lazy.collect_schema().names()]
        if missing := {*KEYS, "experts"} - {*names}:
            raise TraceError(f"{file}: missing column {min(missing)}: expected {', '.join((*KEYS, *LISTS))}")
        rows = int(lazy.select(pl.len()).collect().item())
        _refuse_bloat(file, rows * (len(KEYS) + geometry.k))
        for first in range(0, rows, ROWS):
            frame = lazy.select(names).slice(first, ROWS).collect()
            yield {name: _column(frame[name], geometry, f"{file}, rows from {first + 1}") for name in names}
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as broken:
        raise TraceError(f"{file}: unreadable Parquet ({shown(broken)}); export it again") from None


def _refuse_bloat(file: Path, numbers: int) -> None:
    if not numbers:
        raise TraceError(f"{file}: no rows: expected a row per token and layer")
    if numbers * CELL > allowance(file.stat().st_size):
        raise TraceError(f"{file}: expands more than {EXPANSION}-fold; if that is correct, export it as CSV")


def _column(series: Any, geometry: Geometry, place: str) -> np.ndarray:
    """Return a column's numbers. Raises TraceError naming the column if one is out of range."""
    width = {"experts": geometry.k, "weights": geometry.k, "logits": geometry.experts}.get(series.name)
    numbers = series if width is None else _flat(series, width, place)
    if numbers.null_count() or not numbers.dtype.is_numeric():
        raise TraceError(f"{place}: {series.name} has missing values: expected a number in every row")
    values = numbers.to_numpy()
    if width is not None:
        values = values.reshape(-1, width)
        check_values(values, LISTS[series.name], f"{place}: {series.name}")
        return values
    at = first_refused(values, KEYS[series.name]) if values.dtype.kind in "iu" else (0,)
    if at is not None:
        raise TraceError(f"{place}: invalid {series.name} {values[at]}: expected {KEYS[series.name].expected}")
    return values.astype(np.int64)


def _flat(series: Any, width: int, place: str) -> Any:
    """Return the concatenated numbers of lists of equal length."""
    import polars as pl

    if not isinstance(series.dtype, pl.List):
        raise TraceError(f"{place}: invalid {series.name} {shown(series.dtype)}: expected lists of {width} numbers")
    if series.null_count() or not (series.list.len() == width).all():
        raise TraceError(f"{place}: invalid list length in {series.name}: expected {width} numbers")
    return series.explode()


EXPORTED = Importer(
    name="exported",
    summary="Parquet of `moereplay export`, with the sizes in its metadata",
    formats="FILE.parquet of `--format parquet`, or the folder of `--format hf`",
    sniff=sniff,
    read=read,
)
