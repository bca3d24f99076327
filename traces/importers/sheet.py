"""Files with named columns, a row each: CSV, TSV, JSON lines and Parquet, of which some columns are read."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from traces.documents import refuse_irregular
from traces.importers.packed import EXPANSION, allowance
from traces.importers.text import blocks, parse_json, suffix_of
from traces.schema import TraceError, shown

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
SUFFIXES = (*DELIMITERS, ".jsonl", PARQUET)
CELL = 8  #: bytes of a number
ROWS = 1 << 14  #: read at a time
ROWS_OF_NUMBERS = 1 << 18  #: read at a time where every chosen column is an array of numbers
NO_ROWS = "no rows; expected a row per token and layer, or per token, layer and expert"

Choose = Callable[[tuple[str, ...]], Sequence[str]]
Cells = list[Any] | np.ndarray  #: (N,) cells, or an array of numbers (N,), or (N, width) of lists of equal length


@dataclass(frozen=True)
class Sheet:
    """N rows that follow each other, of the columns that were chosen."""

    file: Path
    unit: str  #: what a row is called: a line of a text, a row of a table
    first: int  #: number of the first row
    columns: dict[str, Cells]  #: by the column's name

    def place(self, row: int) -> str:
        """Where row i stands."""
        return f"{self.file} {self.unit} {self.first + row}"


def sheets(file: Path, choose: Choose, skip: int = 0) -> Iterator[Sheet]:
    """Some rows at a time, at least one, of the columns that `choose` takes of those there are.

    The first `skip` lines of a text are not read. Raises TraceError naming the line that cannot be read.
    """
    suffix = suffix_of(file)
    if suffix == PARQUET:
        yield from _of_parquet(file, choose)
        return
    is_json = suffix == ".jsonl"
    rows = _json_rows(file, choose, skip) if is_json else _text_rows(file, DELIMITERS.get(suffix, ","), choose, skip)
    names, first = next(rows), skip + (1 if is_json else 2)
    while cells := list(islice(rows, ROWS)):
        yield Sheet(file, "line", first, {name: [row[at] for row in cells] for at, name in enumerate(names)})
        first += len(cells)
    if first == skip + (1 if is_json else 2):
        raise TraceError(f"{file}: {NO_ROWS}")


def _text_rows(file: Path, delimiter: str, choose: Choose, skip: int) -> Iterator[list[Any]]:
    """The names of the chosen columns, then their cells line by line."""
    names: list[str] = []
    picked: list[int] = []
    for number, lines in blocks(file, skip, ended=True):
        for at, line in enumerate(lines, number):
            cells = _cells(line, delimiter, f"{file} line {at}")
            if not names:
                names = [cell.strip() for cell in cells]
                chosen = _chosen(names, choose, f"{file} line {at}")
                picked = [names.index(name) for name in chosen]
                yield chosen
            elif len(cells) != len(names):
                quoted = "; a list of ids with commas stands in quotes" if delimiter == "," else ""
                raise TraceError(f"{file} line {at}: {len(cells)} columns; expected {len(names)}{quoted}")
            else:
                yield [cells[each] for each in picked]
    if not names:
        raise TraceError(f"{file}: no rows; expected the names of the columns on the first line")


def _chosen(names: list[str], choose: Choose, place: str) -> list[str]:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{place}: column {shown(twice)} stands twice; expected each name once")
    chosen = list(choose(tuple(names)))
    if missing := [name for name in chosen if name not in names]:
        raise TraceError(f"{place}: no column {shown(missing[0])}; found {shown(', '.join(names), 200)}")
    return chosen


def _cells(line: str, delimiter: str, place: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=True), None) or [""]
    except csv.Error as broken:
        raise TraceError(f"{place}: cells that cannot be read ({broken}); close every quote") from broken


def _json_rows(file: Path, choose: Choose, skip: int) -> Iterator[list[Any]]:
    chosen: list[str] = []
    for number, lines in blocks(file, skip):
        for at, line in enumerate(lines, number):
            place = f"{file} line {at}"
            record = parse_json(line, place)
            if not isinstance(record, dict):
                raise TraceError(f"{place}: not an object; expected one with the same keys on every line")
            if not chosen:
                chosen = list(choose(tuple(record)))
                yield chosen
            if missing := [name for name in chosen if name not in record]:
                raise TraceError(f"{place}: no {shown(missing[0])!r}; expected the keys of the first on every line")
            yield [record[name] for name in chosen]


def _of_parquet(file: Path, choose: Choose) -> Iterator[Sheet]:
    import polars as pl

    try:
        refuse_irregular(file)
        lazy = pl.scan_parquet(file)
        chosen = list(choose(tuple(lazy.collect_schema().names())))
        rows, size = lazy.select(pl.len()).collect().item(), file.stat().st_size
        if rows * max(len(chosen), 1) * CELL > allowance(size):
            raise TraceError(f"{file}: expands more than {EXPANSION}-fold; write it as CSV if that is right")
        plain = all(_is_plain(dtype) for name, dtype in lazy.collect_schema().items() if name in chosen)
        step = ROWS_OF_NUMBERS if plain else ROWS
        for first in range(0, rows, step):
            frame = lazy.select(chosen).slice(first, step).collect()
            yield Sheet(file, "row", first + 1, {name: _numbers(frame[name]) for name in chosen})
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as broken:
        raise TraceError(f"{file}: no readable Parquet ({shown(broken)}); write it again") from None
    if not rows:
        raise TraceError(f"{file}: {NO_ROWS}")


def _is_plain(dtype: Any) -> bool:
    """Whether a column of Parquet holds numbers, or lists of numbers, that fit int64 or float64."""
    import polars as pl

    inner = dtype.inner if isinstance(dtype, pl.List | pl.Array) else dtype
    return inner.is_numeric() and inner not in (pl.UInt64, pl.Int128) and not inner.is_decimal()


def _numbers(series: Any) -> Cells:
    """A column of Parquet as an array, of (N, width) where lists have one length; cells where anything is missing."""
    import polars as pl

    if not _is_plain(series.dtype) or series.null_count() or not len(series):
        return series.to_list()
    if not isinstance(series.dtype, pl.List | pl.Array):
        return series.to_numpy()
    nested = series.arr.to_list() if isinstance(series.dtype, pl.Array) else series
    lengths, flat = nested.list.len(), nested.explode()
    width = int(lengths[0])
    if not width or flat.null_count() or not (lengths == width).all():
        return series.to_list()
    return flat.to_numpy().reshape(-1, width)
