"""Files with named columns, a row each, read some rows at a time: CSV, TSV, JSON and Parquet.

Every importer of rows reads through `tables`, which gives the columns that it chooses. A column is an array where all
cells of a piece are numbers, else a list of cells. Rows of JSON are objects, a line each or the entries of a document;
keys of objects in them are named with dots. Errors name the file and the row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.documents import refuse_irregular
from moereplay.traces.importers.archive import EXPANSION, allowance
from moereplay.traces.importers.text import blocks, number, parse_json, read_json, suffix_of
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, VALUES, TraceError, Values, shown

EXACT = 2**53  #: whole numbers below it survive the float64 they are parsed into
COUNT = Values("iu", 0, EXACT - 1)  #: numbers of requests and tokens
LAYER = Values("iu", 0, MOST_LAYERS - 1)
MOST_COLUMNS = 2 * MOST_EXPERTS + 16
NUMBER = re.compile(r"\s*[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|inf)\s*", re.ASCII | re.IGNORECASE)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
SUFFIXES = (*DELIMITERS, ".jsonl", ".json", PARQUET)
DEEPEST = 4  #: objects within each other whose keys are named with dots
CELL = 8  #: bytes of a number
ROWS = 1 << 14  #: read at a time
ROWS_OF_NUMBERS = 1 << 18  #: read at a time where every chosen column is an array of numbers
NO_ROWS = "no rows: expected a row per token and layer, or per token, layer and expert"

MISSING = object()  #: in place of a value that a row lacks

#: Fields of rows that a table may have, and the names that a file has for the columns of each.
FIELDS = ("request", "token", "layer", "experts", "weights", "phase")
Names = dict[str, tuple[str, ...]]
Choose = Callable[[tuple[str, ...]], Sequence[str]]
Where = tuple[str, str]  #: a column, and the text that rows have in it which are read
Row = tuple[int, list[Any]]  #: its number in the file, and its cells
Cells = list[Any] | np.ndarray  #: (N,) cells, or an array of numbers (N,), or (N, width) of lists of equal length


@dataclass(frozen=True)
class Table:
    """N rows that follow each other, of the columns that were chosen."""

    file: Path
    unit: str  #: name of a row: a line of a text, a row of a table
    numbers: Sequence[int]  #: (N,) numbers of the rows in the file
    columns: Mapping[str, Cells]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    @property
    def lines(self) -> np.ndarray:
        """(N,) number of every row."""
        return np.asarray(self.numbers)

    def place(self, row: int) -> str:
        """Return the place of row i in the file, for messages."""
        return f"{self.file} {self.unit} {self.numbers[row]}"

    def misfit(self, row: int, column: str, cell: Any, expected: str) -> TraceError:
        """Return the error for an invalid cell."""
        return TraceError(f"{self.place(row)}: invalid {column} {_spelled(cell)}: expected {expected}")

    def numeric(self, column: str, expected: str = "a number") -> np.ndarray:
        """Return a column (N,) as numbers, nan and infinities among them. Raises TraceError for any other cell."""
        cells = self.columns[column]
        if isinstance(cells, np.ndarray):
            return cells
        found = [_float(cell) for cell in cells]
        if None in found:
            row = found.index(None)
            raise self.misfit(row, column, cells[row], expected)
        return np.array(found, np.float64)

    def checked(self, allowed: Values, *names: str, among: np.ndarray | None = None) -> np.ndarray:
        """Return columns, (N,) for one and (N, n) for several, whole numbers as int64.

        `among` (N,) masks the rows that count. Raises TraceError naming the row of a number that is not allowed.
        """
        found = np.stack([self.numeric(name, allowed.expected) for name in names], 1)
        fine = is_allowed(found, allowed)
        if among is not None:
            fine |= ~among[:, None]
        if not fine.all():
            row, at = np.argwhere(~fine)[0].tolist()
            raise self.misfit(row, names[at], self.columns[names[at]][row], allowed.expected)
        found = found[:, 0] if len(names) == 1 else found
        return found if "f" in allowed.kinds else found.astype(np.int64)


def is_allowed(found: np.ndarray, allowed: Values) -> np.ndarray:
    """Return for each number whether it is in range, and whole if it has to be."""
    fine = (found >= allowed.least) & (found <= allowed.most)
    return fine if found.dtype.kind in "iu" or "f" in allowed.kinds else fine & (np.rint(found) == found)


def _float(cell: Any) -> float | None:
    found = number(cell)
    if found is None and (isinstance(cell, float) or (isinstance(cell, str) and NUMBER.fullmatch(cell))):
        return float(cell)
    return found


def _spelled(cell: Any) -> str:
    if isinstance(cell, np.floating):
        return f"{cell:.0f}" if cell.is_integer() and abs(cell) < EXACT else f"{cell:g}"
    return shown(repr(cell) if isinstance(cell, str) else cell)


def ids_below(experts: int | None) -> Values:
    """Return the range of valid ids in a layer of `experts`, which may be unknown (None)."""
    allowed = VALUES["chosen"]
    return allowed if experts is None else allowed._replace(most=min(experts, MOST_EXPERTS) - 1)


def tables(
    file: Path,
    choose: Choose,
    skip: int = 0,
    where: Where | None = None,
    *,
    names: Callable[[int], tuple[str, ...]] | None = None,
    alike: bool = False,
) -> Iterator[Table]:
    """Yield rows in pieces of at least one, with the columns that `choose` selects.

    The first `skip` lines of a text and rows whose column `where[0]` is not `where[1]` are skipped. `names` names the
    columns of a text that has no header; `alike` rejects objects whose keys differ from the first. Raises TraceError
    naming the line that cannot be read.
    """
    suffix = suffix_of(file)
    if suffix == PARQUET:
        if where:
            raise TraceError(f"{file}: --where cannot be combined with Parquet; filter it with polars")
        yield from parquet_tables(file, choose)
    elif suffix in (".jsonl", ".json"):
        if suffix == ".jsonl":
            records = json_lines(file, skip)
        else:
            entries = objects_in(read_json(file))
            records = ((at, f"{file} entry {at}", record) for at, record in enumerate(entries))
        rows = _json_rows(file, choose, records, where, alike)
        places = {name: at for at, name in enumerate(next(rows)[1])}
        yield from _of_rows(file, "entry" if suffix == ".json" else "line", places, rows)
    else:
        yield from _of_text(file, DELIMITERS.get(suffix, ","), choose, skip, where, names)


def read_table(file: Path, needed: Sequence[str] = ()) -> Table:
    """Return the whole of a text whose cells are numbers. Raises TraceError for missing columns."""
    parts = list(tables(file, lambda found: [*found, *(name for name in needed if name not in found)]))
    columns = {name: np.concatenate([part.numeric(name) for part in parts]) for name in parts[0].columns}
    return Table(file, "line", np.concatenate([part.lines for part in parts]), columns)  # type: ignore[arg-type]


def _of_rows(file: Path, unit: str, places: Mapping[str, int], rows: Iterator[Row]) -> Iterator[Table]:
    """Put the cells of columns together row by row; `places` are those of the cells in a row."""
    while some := list(islice(rows, ROWS)):
        columns = {name: [row[at] for _, row in some] for name, at in places.items()}
        yield Table(file, unit, [number for number, _ in some], columns)


def header_lines(file: Path, choose: Choose) -> int:
    """Count the lines before the rows: comments of a CSV, or a JSON object that describes the others."""
    suffix = suffix_of(file)
    if suffix in DELIMITERS:
        found = (line for _, lines in blocks(file) for line in lines)
        return sum(1 for _ in takewhile(lambda line: line.startswith("#"), found))
    if suffix != ".jsonl":
        return 0

    def has(record: dict[str, Any]) -> bool:
        try:
            return bool(choose(tuple(flat(record))))
        except TraceError:
            return False

    return int([has(record) for _, _, record in islice(json_lines(file, 0), 2)] == [False, True])


def flat(record: dict[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """Return the values of an object by key; keys of nested objects are joined with dots."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and depth > 1:
            found |= {f"{key}.{inner}": cell for inner, cell in flat(value, depth - 1).items()}
        else:
            found[key] = value
    return found


def objects_in(document: Any) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, or of the first list of objects in an object; else the object itself."""
    entries = document
    if isinstance(document, dict):
        lists = (value for value in document.values() if isinstance(value, list) and value)
        entries = next((entries for entries in lists if isinstance(entries[0], dict)), [document])
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _of_text(
    file: Path,
    delimiter: str,
    choose: Choose,
    skip: int,
    where: Where | None,
    naming: Callable[[int], tuple[str, ...]] | None,
) -> Iterator[Table]:
    """Read blocks of lines, by polars where it reads them as `csv` does, else cell by cell."""
    names: list[str] = []
    chosen: list[str] = []
    empty = True
    for first, lines in blocks(file, skip, ended=True):
        if not names:
            place = f"{file} line {first}"
            names = [cell.strip() for cell in _cells(lines[0], delimiter, place)]
            if naming:
                names = list(naming(len(names)))
            else:
                first, lines = first + 1, lines[1:]  # noqa: PLW2901
            chosen = _chosen(names, choose, place)
            if where and where[0] not in names:
                there = shown(", ".join(names), 200)
                raise TraceError(f"{place}: missing column {shown(where[0])} for --where; found {there}")
        if not lines:
            continue
        columns = None if where else _at_once(lines, delimiter, names, chosen)
        if columns is None:
            rows = _text_rows(file, delimiter, names, first, lines)
            kept = (row for row in rows if not where or row[1][names.index(where[0])].strip() == where[1])
            for table in _of_rows(file, "line", {name: names.index(name) for name in chosen}, kept):
                yield table
                empty = False
        else:
            yield Table(file, "line", range(first, first + len(lines)), columns)
            empty = False
    if empty:
        raise TraceError(f"{file} line {skip + 1}: no rows follow: expected a row per token and layer, or per expert")


def _at_once(lines: list[str], delimiter: str, names: list[str], chosen: list[str]) -> dict[str, Cells] | None:
    """Return the chosen columns as polars reads them, None where `csv` may read a cell otherwise.

    Polars passes over blank lines, an empty last cell and a byte order mark, and reads quotes inside a cell otherwise.
    """
    import polars as pl

    if not all(map(str.strip, lines)) or lines[0].startswith("\ufeff"):
        return None
    text = "\n".join(lines)
    bare = re.sub(rf'(?m)(?:^|(?<={delimiter}))"[^"\n]*"(?={delimiter}|$)', "", text) if '"' in text else text
    if '"' in bare or any(line.count(delimiter) != len(names) - 1 for line in bare.split("\n")):
        return None
    try:
        frame = pl.read_csv(text.encode(), has_header=False, separator=delimiter, infer_schema=False)
    except (pl.exceptions.PolarsError, UnicodeEncodeError):
        return None
    if frame.shape != (len(lines), len(names)):
        return None
    columns = {name: _cells_of(frame.to_series(names.index(name))) for name in chosen}
    whole = {name: cells for name, cells in columns.items() if cells is not None}
    return whole if len(whole) == len(columns) else None


def _cells_of(column: Any) -> Cells | None:
    """Return a column of text as float64 or as text; None where a cell is missing or float64 would round it."""
    import polars as pl

    if column.null_count():
        return None
    found = column.cast(pl.Float64, strict=False)
    if found.null_count():
        return None if column.str.starts_with(" ").any() else column.to_list()
    values = found.to_numpy()
    return None if (np.abs(values) >= EXACT).any() else values


def _text_rows(file: Path, delimiter: str, names: list[str], first: int, lines: list[str]) -> Iterator[Row]:
    for at, line in enumerate(lines, first):
        cells = _cells(line, delimiter, f"{file} line {at}")
        if len(cells) != len(names):
            quoted = "; put a list of ids with commas in quotes" if delimiter == "," else ""
            raise TraceError(f"{file} line {at}: {len(cells)} columns: expected {len(names)}{quoted}")
        yield at, cells


def _chosen(names: list[str], choose: Choose, place: str) -> list[str]:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{place}: column {shown(twice)} is repeated: expected each name once")
    if len(names) > MOST_COLUMNS:
        raise TraceError(f"{place}: {len(names):,} columns: expected at most {MOST_COLUMNS:,}")
    chosen = list(choose(tuple(names)))
    if missing := [name for name in chosen if name not in names]:
        raise TraceError(f"{place}: missing column {shown(missing[0])}; found {shown(', '.join(names), 200)}")
    return chosen


def _cells(line: str, delimiter: str, place: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=True), None) or [""]
    except csv.Error as broken:
        raise TraceError(f"{place}: unreadable cells ({broken}); close every quote") from broken


def json_lines(file: Path, skip: int, ended: bool = False) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number, place and object of each line after the first `skip`. Raises TraceError for other lines."""
    for first, lines in blocks(file, skip, ended):
        for at, line in enumerate(lines, first):
            place = f"{file} line {at}"
            record = parse_json(line, place)
            if not isinstance(record, dict):
                raise TraceError(f"{place}: not a JSON object: expected an object on every line")
            yield at, place, record


def _json_rows(
    file: Path, choose: Choose, records: Iterable[tuple[int, str, dict[str, Any]]], where: Where | None, alike: bool
) -> Iterator[Row]:
    """Yield the chosen keys, then their values row by row."""
    chosen: list[str] = []
    keys: Iterable[str] = ()
    for at, place, record in records:
        if where and str(_value(record, where[0])) != where[1]:
            continue
        if not chosen:
            chosen = list(choose(tuple(flat(record))))
            keys = record.keys()
            yield at, chosen
        if alike and record.keys() != keys:
            raise TraceError(f"{place}: keys {shown(', '.join(record), 200)}: expected {', '.join(keys)}, as before")
        values = [_value(record, name) for name in chosen]
        if MISSING in values:
            name = chosen[values.index(MISSING)]
            fix = "expected the keys of the first on every line" + ("" if where else ", or --where KEY=VALUE")
            raise TraceError(f"{place}: missing {shown(name)!r}: {fix}")
        yield at, values
    if not chosen:
        raise TraceError(f"{file}: " + (f"no row has {where[0]} = {where[1]}; correct --where" if where else NO_ROWS))


def _value(record: dict[str, Any], name: str) -> Any:
    """Return the value of a key, or of a key with dots in objects within each other; `MISSING` if there is none."""
    if name in record or "." not in name:
        return record.get(name, MISSING)
    found: Any = record
    for key in name.split("."):
        found = found.get(key, MISSING) if isinstance(found, dict) else MISSING
    return found


def parquet_tables(file: Path, choose: Choose, width: int = 1) -> Iterator[Table]:
    """Yield rows in pieces as `tables` does; `width` is the fewest numbers that a row holds. Raises TraceError."""
    import polars as pl

    try:
        refuse_irregular(file)
        lazy = pl.scan_parquet(file)
        chosen = list(choose(tuple(lazy.collect_schema().names())))
        rows, size = lazy.select(pl.len()).collect().item(), file.stat().st_size
        if rows * max(len(chosen), width) * CELL > allowance(size):
            raise TraceError(f"{file}: expands more than {EXPANSION}-fold; if that is correct, write it as CSV")
        plain = all(_is_plain(dtype) for name, dtype in lazy.collect_schema().items() if name in chosen)
        step = max((ROWS_OF_NUMBERS if plain else ROWS) // width, 1)
        for first in range(0, rows, step):
            frame = lazy.select(chosen).slice(first, step).collect()
            numbers = range(first + 1, first + 1 + len(frame))
            yield Table(file, "row", numbers, {name: _numbers(frame[name]) for name in chosen})
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as broken:
        raise TraceError(f"{file}: unreadable Parquet ({shown(broken)}); write it again") from None
    if not rows:
        raise TraceError(f"{file}: {NO_ROWS}")


def _is_plain(dtype: Any) -> bool:
    """Return whether a column of Parquet holds numbers, or lists of numbers, that fit int64 or float64."""
    import polars as pl

    inner = dtype.inner if isinstance(dtype, pl.List | pl.Array) else dtype
    return inner.is_numeric() and inner not in (pl.UInt64, pl.Int128) and not inner.is_decimal()


def _numbers(series: Any) -> Cells:
    """Return a column of Parquet as an array, (N, width) for lists of one length; cells if a value is missing."""
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
