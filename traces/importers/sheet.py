"""Files with named columns, a row each: CSV, TSV, JSON and Parquet, of which some columns are read.

Rows of JSON are objects, a line each or the entries of a document; keys of objects in them are named with dots.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.documents import refuse_irregular
from moereplay.traces.importers.packed import EXPANSION, allowance
from moereplay.traces.importers.text import blocks, parse_json, read_json, suffix_of
from moereplay.traces.schema import TraceError, shown

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
SUFFIXES = (*DELIMITERS, ".jsonl", ".json", PARQUET)
DEEPEST = 4  #: objects within each other whose keys are named with dots
CELL = 8  #: bytes of a number
ROWS = 1 << 14  #: read at a time
ROWS_OF_NUMBERS = 1 << 18  #: read at a time where every chosen column is an array of numbers
NO_ROWS = "no rows; expected a row per token and layer, or per token, layer and expert"

MISSING = object()  #: in place of a value that a row lacks

Choose = Callable[[tuple[str, ...]], Sequence[str]]
Where = tuple[str, str]  #: a column, and the text that rows have in it which are read
Row = tuple[int, list[Any]]  #: its number in the file, and its cells
Cells = list[Any] | np.ndarray  #: (N,) cells, or an array of numbers (N,), or (N, width) of lists of equal length


@dataclass(frozen=True)
class Sheet:
    """N rows that follow each other, of the columns that were chosen."""

    file: Path
    unit: str  #: what a row is called: a line of a text, a row of a table
    numbers: Sequence[int]  #: (N,) numbers of the rows in the file
    columns: Mapping[str, Cells]  #: by the column's name

    @property
    def first(self) -> int:
        """Number of the first row."""
        return self.numbers[0]

    def place(self, row: int) -> str:
        """Where row i stands."""
        return f"{self.file} {self.unit} {self.numbers[row]}"


def sheets(file: Path, choose: Choose, skip: int = 0, where: Where | None = None) -> Iterator[Sheet]:
    """Some rows at a time, at least one, of the columns that `choose` takes of those there are.

    The first `skip` lines of a text are not read, nor rows whose column `where[0]` is not `where[1]`. Raises TraceError
    naming the line that cannot be read.
    """
    suffix = suffix_of(file)
    if suffix == PARQUET:
        if where:
            raise TraceError(f"{file}: --where cannot be combined with Parquet; filter it with polars")
        yield from _of_parquet(file, choose)
        return
    if suffix in (".jsonl", ".json"):
        found = _json_rows(file, choose, _json_lines(file, skip) if suffix == ".jsonl" else _entries(file), where)
    else:
        found = _text_rows(file, DELIMITERS.get(suffix, ","), choose, skip, where)
    names, unit, empty = next(found)[1], "entry" if suffix == ".json" else "line", True
    while rows := list(islice(found, ROWS)):
        columns = {name: [row[at] for _, row in rows] for at, name in enumerate(names)}
        yield Sheet(file, unit, [number for number, _ in rows], columns)
        empty = False
    if empty:
        raise TraceError(f"{file}: {NO_ROWS}")


def header_lines(file: Path, choose: Choose) -> int:
    """How many lines stand before the rows: comments of a CSV, or an object of JSON lines that describes the others."""
    suffix = suffix_of(file)
    if suffix in DELIMITERS:
        found = (line for _, lines in blocks(file) for line in lines)
        return sum(1 for _ in takewhile(lambda line: line.startswith("#"), found))
    if suffix != ".jsonl":
        return 0
    first = [record for _, _, record in islice(_json_lines(file, 0), 2)]
    return int(len(first) > 1 and not _has(first[0], choose) and _has(first[1], choose))


def _has(record: dict[str, Any], choose: Choose) -> bool:
    try:
        return bool(choose(tuple(flat(record))))
    except TraceError:
        return False


def flat(record: dict[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """The values of an object by their keys, those of objects in it by keys with dots."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and depth > 1:
            found |= {f"{key}.{inner}": each for inner, each in flat(value, depth - 1).items()}
        else:
            found[key] = value
    return found


def objects_in(document: Any) -> list[dict[str, Any]]:
    """The objects of a JSON list, or of the first list of objects in an object; else the object itself."""
    if isinstance(document, list):
        return [each for each in document if isinstance(each, dict)]
    if not isinstance(document, dict):
        return []
    lists = [each for each in document.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
    return [each for each in lists[0] if isinstance(each, dict)] if lists else [document]


def _text_rows(file: Path, delimiter: str, choose: Choose, skip: int, where: Where | None) -> Iterator[Row]:
    """The names of the chosen columns, then their cells line by line."""
    names: list[str] = []
    picked: list[int] = []
    for number, lines in blocks(file, skip, ended=True):
        for at, line in enumerate(lines, number):
            cells = _cells(line, delimiter, f"{file} line {at}")
            if not names:
                names = [cell.strip() for cell in cells]
                chosen = _chosen(names, choose, f"{file} line {at}")
                if where and where[0] not in names:
                    there = shown(", ".join(names), 200)
                    raise TraceError(f"{file} line {at}: no column {shown(where[0])} for --where; found {there}")
                picked = [names.index(name) for name in chosen]
                yield at, chosen
            elif len(cells) != len(names):
                quoted = "; a list of ids with commas stands in quotes" if delimiter == "," else ""
                raise TraceError(f"{file} line {at}: {len(cells)} columns; expected {len(names)}{quoted}")
            elif not where or cells[names.index(where[0])].strip() == where[1]:
                yield at, [cells[each] for each in picked]
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


def _json_lines(file: Path, skip: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The number, place and object of each line after the first `skip`."""
    for number, lines in blocks(file, skip):
        for at, line in enumerate(lines, number):
            place = f"{file} line {at}"
            record = parse_json(line, place)
            if not isinstance(record, dict):
                raise TraceError(f"{place}: not an object; expected one with the same keys on every line")
            yield at, place, record


def _entries(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The number, place and object of each entry of a document."""
    for at, record in enumerate(objects_in(read_json(file))):
        yield at, f"{file} entry {at}", record


def _json_rows(
    file: Path, choose: Choose, records: Iterable[tuple[int, str, dict[str, Any]]], where: Where | None
) -> Iterator[Row]:
    """The chosen keys, then their values row by row."""
    chosen: list[str] = []
    for at, place, record in records:
        if where and str(_value(record, where[0])) != where[1]:
            continue
        if not chosen:
            chosen = list(choose(tuple(flat(record))))
            yield at, chosen
        values = [_value(record, name) for name in chosen]
        if MISSING in values:
            name = chosen[values.index(MISSING)]
            fix = "expected the keys of the first on every line" + ("" if where else ", or --where KEY=VALUE")
            raise TraceError(f"{place}: no {shown(name)!r}; {fix}")
        yield at, values
    if not chosen:
        raise TraceError(f"{file}: " + (f"no row has {where[0]} = {where[1]}; correct --where" if where else NO_ROWS))


def _value(record: dict[str, Any], name: str) -> Any:
    """The value of a key, or of a key with dots in objects within each other; `MISSING` if there is none."""
    if name in record or "." not in name:
        return record.get(name, MISSING)
    found: Any = record
    for key in name.split("."):
        found = found.get(key, MISSING) if isinstance(found, dict) else MISSING
    return found


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
            yield Sheet(
                file, "row", range(first + 1, first + 1 + len(frame)), {name: _numbers(frame[name]) for name in chosen}
            )
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
