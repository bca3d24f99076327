"""Rows of a CSV file with a header, as text by column; every fault names the file and the line."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from simulator.errors import ConfigError
from traces.documents import content
from traces.spelling import hint

MOST_COLUMNS = 1024
SHOWN = 60  #: characters of a cell that an error quotes


@dataclass(frozen=True)
class Line:
    """One row: its cells by column, without blanks around them."""

    file: Path
    number: int  #: of its line, from 1
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell, empty where the file has no such column."""
        return self.cells.get(column, "")

    def amount(self, column: str) -> float | None:
        """A number of at least 0, None where the cell is empty. Raises ConfigError naming the line."""
        written = self.text(column)
        if not written:
            return None
        try:
            value = float(written)
        except ValueError:
            value = -1.0
        if value < 0 or not isfinite(value):
            said = f"{self.file} line {self.number}: {column} is {written[:SHOWN]!r}"
            raise ConfigError(f"{said}; expected a number of at least 0, or nothing")
        return value


def read_lines(file: Path, needed: tuple[str, ...]) -> list[Line]:
    """Every row; lines that begin with # are remarks. Raises ConfigError naming the line or the column."""
    written = _text(file).splitlines()
    kept = [(number, line) for number, line in enumerate(written, 1) if line.strip() and not line.startswith("#")]
    if not kept:
        raise ConfigError(f"{file}: no rows; expected a line of column names and a line per row")
    columns = _columns(file, *kept[0], needed)
    return [_line(file, number, line, columns) for number, line in kept[1:]]


def _text(file: Path) -> str:
    try:
        return content(file).decode("utf-8-sig")
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8 text; expected CSV") from None


def _columns(file: Path, number: int, line: str, needed: tuple[str, ...]) -> list[str]:
    columns = _cells(file, number, line)
    if len(columns) > MOST_COLUMNS:
        raise ConfigError(f"{file} line {number}: {len(columns):,} columns; expected at most {MOST_COLUMNS:,}")
    for name in needed:
        if name not in columns:
            raise ConfigError(f"{file} line {number}: no column {name!r}: {hint(name, columns)}")
    return columns


def _line(file: Path, number: int, line: str, columns: list[str]) -> Line:
    cells = _cells(file, number, line)
    if len(cells) != len(columns):
        raise ConfigError(f"{file} line {number}: {len(cells)} cells; expected {len(columns)}, as in the first line")
    return Line(file, number, dict(zip(columns, cells, strict=True)))


def _cells(file: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as broken:
        raise ConfigError(f"{file} line {number}: {broken}; expected cells between commas") from None
