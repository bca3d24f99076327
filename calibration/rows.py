"""Rows of a CSV file with a header, as text by column; every fault names the file and the line."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import nan
from pathlib import Path

from moereplay.calibration.columns import FILES, File, amounts, needed
from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import content
from moereplay.traces.texts import hint

MOST_COLUMNS = 1024
#: A decimal number; Python takes more for one: nan, infinity, 1_000, digits of other scripts.
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
QUOTED = 60  #: characters of a cell that an error quotes


@dataclass(frozen=True)
class Line:
    """One row: its cells by column, without blanks around them."""

    file: Path
    number: int  #: of its line, from 1
    cells: Mapping[str, str]
    kind: File = "cells"

    def text(self, column: str) -> str:
        """The cell, empty where the file has no such column. Raises KeyError for a column that is not declared."""
        assert FILES[self.kind][column]  # or docs/logs.md does not have it
        return self.cells.get(column, "")

    def amount(self, column: str) -> float | None:
        """A number in the column's range, None where the cell is empty. Raises ConfigError naming the line."""
        written, allowed = self.text(column), FILES[self.kind][column].range
        assert allowed is not None  # or it is a column of text
        if not written:
            return None
        value = float(written) if NUMBER.fullmatch(written) else nan
        if not allowed.least <= value <= allowed.most or (allowed.whole and value != int(value)):
            raise ConfigError(f"{self.where}: {column} is {written[:QUOTED]!r}; expected {allowed}, or nothing")
        return abs(value)  # no negative zero

    @property
    def where(self) -> str:
        """File and line, for errors."""
        return f"{self.file} line {self.number}" if self.number else str(self.file)


def read_lines(file: Path, kind: File) -> list[Line]:
    """Every row of a file of that kind; lines that begin with # are remarks. Raises ConfigError naming the line."""
    written = _text(file).splitlines()
    kept = [(number, line) for number, line in enumerate(written, 1) if line.strip() and not line.startswith("#")]
    if not kept:
        raise ConfigError(f"{file}: no rows; expected a line of column names and a line per row")
    columns = _columns(file, *kept[0], needed(kind))
    lines = [_line(file, number, line, columns, kind) for number, line in kept[1:]]
    for line, column in product(lines, amounts(kind)):
        line.amount(column)
    return lines


def _text(file: Path) -> str:
    try:
        return content(file).decode("utf-8-sig")
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8 text; expected CSV") from None


def _columns(file: Path, number: int, line: str, wanted: tuple[str, ...]) -> list[str]:
    columns = _cells(file, number, line)
    if len(columns) > MOST_COLUMNS:
        raise ConfigError(f"{file} line {number}: {len(columns):,} columns; expected at most {MOST_COLUMNS:,}")
    for name in wanted:
        if name not in columns:
            raise ConfigError(f"{file} line {number}: no column {name!r}: {hint(name, columns)}")
    return columns


def _line(file: Path, number: int, line: str, columns: list[str], kind: File) -> Line:
    cells = _cells(file, number, line)
    if len(cells) != len(columns):
        raise ConfigError(f"{file} line {number}: {len(cells)} cells; expected {len(columns)}, as in the first line")
    return Line(file, number, dict(zip(columns, cells, strict=True)), kind)


def _cells(file: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as broken:
        raise ConfigError(f"{file} line {number}: {broken}; expected cells between commas") from None
