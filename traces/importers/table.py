"""Comma-separated numbers with a header line, read at the speed of numpy; errors name the file and the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces.schema import TraceError

EXACT = 2**53  #: whole numbers up to here survive the float64 they are parsed into


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

    def whole(self, *columns: str, least: int = 0) -> np.ndarray:
        """The same as int64. Raises TraceError naming the line of a number that is not whole or below `least`."""
        numbers = self.numbers(*columns)
        fine = (np.rint(numbers) == numbers) & (numbers >= least) & (numbers < EXACT)
        if not fine.all():
            row, *column = at = tuple(np.argwhere(~fine)[0])
            wrong = f"{columns[column[0] if column else 0]} is {numbers[at]:g}"
            raise TraceError(f"{self.file} line {self.first_line + row}: {wrong}; expected a whole number from {least}")
        return numbers.astype(np.int64)


def read_table(file: Path, lines: list[str], header: int) -> Table:
    """The table whose column names stand at index `header` of `lines`. Raises TraceError naming the wrong line."""
    columns = tuple(name.strip() for name in lines[header].split(","))
    body = lines[header + 1 :]
    if not body:
        raise TraceError(f"{file} line {header + 1}: no rows follow; expected at least one")
    try:
        values = np.loadtxt(body, delimiter=",", comments=None, ndmin=2)
    except ValueError as wrong:
        raise _wrong_line(file, body, header + 2, len(columns), str(wrong)) from wrong
    if values.shape != (len(body), len(columns)):
        raise _wrong_line(file, body, header + 2, len(columns), "blank line or column")
    return Table(file, header + 2, values, columns)


def require(table: Table, *columns: str) -> None:
    """Raises TraceError naming the columns a table lacks."""
    missing = [column for column in columns if column not in table]
    if missing:
        place = f"{table.file} line {table.first_line - 1}"
        raise TraceError(f"{place}: no column {', '.join(missing)}; found {','.join(table.columns)}")


def _wrong_line(file: Path, body: list[str], first: int, columns: int, reason: str) -> TraceError:
    """The error for the first line that is not `columns` numbers."""
    for number, line in enumerate(body, first):
        cells = line.split(",")
        if len(cells) != columns:
            return TraceError(f"{file} line {number}: {len(cells)} columns; expected {columns}")
        for cell in cells:
            if not _is_number(cell):
                return TraceError(f"{file} line {number}: {cell.strip()!r} is not a number; expected {columns} numbers")
    return TraceError(f"{file}: {reason}; expected {columns} numbers on every line")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
