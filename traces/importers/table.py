"""Comma-separated numbers with a header line, read at the speed of numpy; errors name the file and the line."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.traces.importers.text import blocks
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, VALUES, TraceError, Values, shown

EXACT = 2**53  #: whole numbers up to here survive the float64 they are parsed into
COUNT = Values("iu", 0, EXACT - 1)  #: what numbers a request or a token
LAYER = Values("iu", 0, MOST_LAYERS - 1)
MOST_COLUMNS = 2 * MOST_EXPERTS + 16
NUMBER = re.compile(r"\s*[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|inf)\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """Columns by name; row i stood on line `first_line` + i of the file."""

    file: Path
    first_line: int
    values: np.ndarray  #: (N, columns) float64
    columns: tuple[str, ...]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    @property
    def lines(self) -> np.ndarray:
        """Line number of every row."""
        return self.first_line + np.arange(len(self.values))

    def numbers(self, *columns: str) -> np.ndarray:
        """The named columns, (N,) for one and (N, n) for several, as float64."""
        picked = [self.columns.index(column) for column in columns]
        return self.values[:, picked[0] if len(picked) == 1 else picked]

    def checked(self, allowed: Values, *columns: str, among: np.ndarray | None = None) -> np.ndarray:
        """The same, whole numbers as int64; `among` (N,) masks the rows that count.

        Raises TraceError naming the line of a number that is not allowed.
        """
        numbers, whole = self.numbers(*columns), "f" not in allowed.kinds
        fine = (numbers >= allowed.least) & (numbers <= allowed.most)
        if whole:
            fine &= np.rint(numbers) == numbers
        if among is not None:
            fine |= ~among
        if not fine.all():
            row, *column = at = tuple(np.argwhere(~fine)[0])
            wrong = f"{columns[column[0] if column else 0]} is {_spelled(float(numbers[at]))}"
            raise TraceError(f"{self.file} line {self.first_line + row}: {wrong}; expected {allowed.expected}")
        return numbers.astype(np.int64) if whole else numbers


def _spelled(number: float) -> str:
    return f"{number:.0f}" if number.is_integer() and abs(number) < EXACT else f"{number:g}"


def ids_below(experts: int | None) -> Values:
    """What the ids of a layer with that many experts may be; None if their number is not known."""
    allowed = VALUES["chosen"]
    return allowed if experts is None else allowed._replace(most=min(experts, MOST_EXPERTS) - 1)


def read_table(file: Path, header: int, needed: Sequence[str] = (), fix: str = "") -> Table:
    """The whole table, as `tables` reads it."""
    first, *others = tables(file, header, needed, fix)
    return Table(
        file, first.first_line, np.concatenate([first.values, *(part.values for part in others)]), first.columns
    )


def tables(file: Path, header: int, needed: Sequence[str] = (), fix: str = "") -> Iterator[Table]:
    """Some rows at a time of the table whose column names stand on the line after the first `header`, at least one.

    Raises TraceError naming the line, of columns that are `needed` and missing before any number is read.
    """
    columns: tuple[str, ...] = ()
    rows = 0
    for number, lines in blocks(file, skip=header, ended=True):
        if not columns:
            columns, number, lines = _names(lines[0], f"{file} line {number}"), number + 1, lines[1:]  # noqa: PLW2901
            require(Table(file, header + 2, np.empty((0, len(columns))), columns), *needed, fix=fix)
        if lines:
            yield Table(file, number, _numbers(lines, len(columns), number, file), columns)
            rows += len(lines)
    if not rows:
        raise TraceError(f"{file} line {header + 1}: no rows follow; expected at least one")


def headerless(file: Path, names: Callable[[int], tuple[str, ...]]) -> Iterator[Table]:
    """Some rows at a time, at least one, of a file that begins with numbers; `names` of so many columns.

    Raises TraceError naming the line.
    """
    columns: tuple[str, ...] = ()
    for number, lines in blocks(file, ended=True):
        columns = columns or names(len(_cells(lines[0], f"{file} line {number}")))
        yield Table(file, number, _numbers(lines, len(columns), number, file), columns)
    if not columns:
        raise TraceError(f"{file}: no rows; expected numbers between commas")


def require(table: Table, *columns: str, fix: str = "") -> None:
    """Raises TraceError naming the columns a table lacks."""
    missing = [column for column in columns if column not in table]
    if missing:
        place = f"{table.file} line {table.first_line - 1}"
        raise TraceError(f"{place}: no column {', '.join(missing)}; found {shown(','.join(table.columns))}{fix}")


def _names(line: str, place: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in _cells(line, place))
    if len(names) > MOST_COLUMNS:
        raise TraceError(f"{place}: {len(names):,} columns; expected at most {MOST_COLUMNS:,}")
    return names


def _numbers(lines: list[str], columns: int, first: int, file: Path) -> np.ndarray:
    """(lines, columns) float64; numpy reads nearly every file, what it refuses is read cell by cell."""
    values = _at_once(lines)
    if values is None or values.shape != (len(lines), columns):
        return np.array([_row(line, columns, f"{file} line {at}") for at, line in enumerate(lines, first)])
    return values


def _at_once(lines: list[str]) -> np.ndarray | None:
    if not all(map(str.strip, lines)):  # numpy would pass over a blank line
        return None
    try:
        return np.loadtxt(lines, delimiter=",", comments=None, quotechar='"', ndmin=2)
    except ValueError:
        return None


def _row(line: str, columns: int, place: str) -> list[float]:
    cells = _cells(line, place)
    if len(cells) != columns:
        raise TraceError(f"{place}: {len(cells)} columns; expected {columns}")
    for cell in cells:
        if not NUMBER.fullmatch(cell):
            raise TraceError(f"{place}: {cell.strip()[:60]!r} is not a number; expected {columns} numbers")
    return [float(cell) for cell in cells]


def _cells(line: str, place: str) -> Sequence[str]:
    """The cells of a line, without the quotes that some programs put around them."""
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True), None) or [""]
    except csv.Error as broken:
        raise TraceError(f"{place}: cells that cannot be read ({broken}); expected numbers between commas") from broken
