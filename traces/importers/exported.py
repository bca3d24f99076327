"""Parquet of `moereplay export`: a file, or the folder of a data set with its shards below data/.

The metadata of each file has the sizes of the model, as one JSON object under the key `moereplay`, which the plain
formats have too: {"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [1000, 1000]}}.
Columns are those of `traces/exporters/rows.py`, and rows are ordered by request, token and layer. They are read in
pieces: memory is that of the longest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from moereplay.traces.documents import first_fault, json_text, refuse_irregular
from moereplay.traces.importers.by_request import prompt_of
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT, LAYER, Table, parquet_tables
from moereplay.traces.importers.text import parse_json
from moereplay.traces.schema import Geometry, Header, Request, TraceError, check_values, shown
from moereplay.traces.summary import named_synthetic, synthetic

KEY = "moereplay"


class Stated(NamedTuple):
    """Values of the object."""

    geometry: Geometry
    model: str | None
    synthetic: str  #: how a generator made the routing; empty for recorded routing


def state(header: Header) -> str:
    """Return the object, on one line."""
    made = synthetic(header.provenance)
    said = {"model": header.provenance.model} | ({"synthetic": made} if made else {})
    return json_text({KEY: said | header.geometry.model_dump(mode="json")})


def sizes_in(text: str, place: str) -> Stated:
    """Read such an object, found at `place`. Raises TraceError if it has no sizes."""
    document = parse_json(text, place)
    fields: Any = document.get(KEY) if isinstance(document, dict) else None
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: {KEY} is not a JSON object: expected the sizes of the model")
    model, made = fields.pop("model", None), fields.pop("synthetic", "")
    model = model if isinstance(model, str | None) else shown(model)
    made = (made if isinstance(made, str) else shown(made)) or named_synthetic(model or "")
    try:
        return Stated(Geometry.model_validate(fields), model, made)
    except ValidationError as wrong:
        raise TraceError(f"{place}: {first_fault(wrong)}") from wrong


# -- Parquet of our own

SUFFIX = ".parquet"
KEYS = {"request": COUNT, "token": COUNT, "layer": LAYER, "phase": COUNT._replace(most=1)}
LISTS = {"experts": "chosen", "weights": "weights", "logits": "logits"}  #: and the arrays of a trace that they are

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
    return Request(chosen, options.prompt_of(tokens, prompt), weights, logits)


def _batches(file: Path, geometry: Geometry) -> Iterator[Columns]:
    """Yield some rows at a time as arrays by column, (N,) or (N, width). Raises TraceError naming the file."""

    def choose(found: tuple[str, ...]) -> list[str]:
        if missing := {*KEYS, "experts"} - {*found}:
            raise TraceError(f"{file}: missing column {min(missing)}: expected {', '.join((*KEYS, *LISTS))}")
        return [name for name in (*KEYS, *LISTS) if name in found]

    widths = {"experts": geometry.k, "weights": geometry.k, "logits": geometry.experts}
    for table in parquet_tables(file, choose, len(KEYS) + geometry.k):
        lists = {name: _lists(table, name, width) for name, width in widths.items() if name in table}
        yield {name: table.checked(allowed, name) for name, allowed in KEYS.items()} | lists


def _lists(table: Table, name: str, width: int) -> np.ndarray:
    """Return a column of lists of equal length, (N, width). Raises TraceError naming the column."""
    found, place = table.columns[name], f"{table.place(0)} and those after it: {name}"
    if not isinstance(found, np.ndarray) or found.shape[1:] != (width,):
        raise TraceError(f"{place}: expected lists of {width} numbers")
    check_values(found, LISTS[name], place)
    return found


EXPORTED = Importer(
    name="exported",
    summary="Parquet of `moereplay export`, with the sizes in its metadata",
    formats="FILE.parquet of `--format parquet`, or the folder of `--format hf`",
    sniff=sniff,
    read=read,
)
