"""Read a folder of evidence: CSV rows, per-token logs, models. Every error names the file and the line."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from math import nan
from pathlib import Path

import numpy as np

from moereplay.calibration.columns import FILES, File, amounts, needed
from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import content
from moereplay.traces.texts import hint

MOST_COLUMNS = 1024
#: A decimal number. `float` also accepts nan, infinity, 1_000 and digits of other scripts.
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
QUOTED = 60  #: characters of a cell that an error quotes


@dataclass(frozen=True)
class Line:
    """One row: stripped cells by column."""

    file: Path
    number: int  #: of its line, from 1
    cells: Mapping[str, str]
    kind: File = "cells"

    def text(self, column: str) -> str:
        """Return a cell, empty if the file lacks the column. Raises KeyError for an undeclared column."""
        assert FILES[self.kind][column]  # every column that is read is declared and documented
        return self.cells.get(column, "")

    def amount(self, column: str) -> float | None:
        """Return a number in the column's range, None for an empty cell. Raises ConfigError naming the line."""
        written, allowed = self.text(column), FILES[self.kind][column].range
        assert allowed is not None  # a text column is read by `text`
        if not written:
            return None
        value = float(written) if NUMBER.fullmatch(written) else nan
        if not allowed.least <= value <= allowed.most or (allowed.whole and value != int(value)):
            raise ConfigError(
                f"{self.where}: invalid {column} {written[:QUOTED]!r}: expected {allowed}, or an empty cell"
            )
        return abs(value)  # no negative zero

    @property
    def where(self) -> str:
        """File and line, for error messages."""
        return f"{self.file} line {self.number}" if self.number else str(self.file)


def read_lines(file: Path, kind: File) -> list[Line]:
    """Read every row of a file; lines that begin with # are comments. Raises ConfigError naming the line."""
    written = _text(file).splitlines()
    kept = [(number, line) for number, line in enumerate(written, 1) if line.strip() and not line.startswith("#")]
    if not kept:
        raise ConfigError(f"{file}: no rows: expected a line of column names and a line per row")
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
        raise ConfigError(f"{file}: not UTF-8 text: expected CSV") from None


def _columns(file: Path, number: int, line: str, wanted: tuple[str, ...]) -> list[str]:
    columns = _cells(file, number, line)
    if len(columns) > MOST_COLUMNS:
        raise ConfigError(f"{file} line {number}: {len(columns):,} columns: expected at most {MOST_COLUMNS:,}")
    for name in wanted:
        if name not in columns:
            raise ConfigError(f"{file} line {number}: missing column {name!r}: {hint(name, columns, 'found')}")
    return columns


def _line(file: Path, number: int, line: str, columns: list[str], kind: File) -> Line:
    cells = _cells(file, number, line)
    if len(cells) != len(columns):
        raise ConfigError(f"{file} line {number}: {len(cells)} cells: expected {len(columns)}, as in the first line")
    return Line(file, number, dict(zip(columns, cells, strict=True)), kind)


def _cells(file: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as broken:
        raise ConfigError(f"{file} line {number}: {broken}: expected cells separated by commas") from None


# -- per-token logs

NEEDED = needed("tokens")
PARTS = ("compute_ms", "io_ms", "stall_ms", "mgmt_ms", "majflt")


@dataclass(frozen=True)
class Series:
    """Per-token columns of a log, (T,) float64 each; a missing or empty column is None."""

    wall_ms: np.ndarray
    read_bytes: np.ndarray
    compute_ms: np.ndarray | None = None
    io_ms: np.ndarray | None = None
    stall_ms: np.ndarray | None = None
    mgmt_ms: np.ndarray | None = None
    majflt: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.wall_ms)

    def part(self, kept: slice) -> Series:
        """Return the series of some tokens."""
        parts = (rows if rows is None else rows[kept] for rows in (getattr(self, name) for name in PARTS))
        return Series(self.wall_ms[kept], self.read_bytes[kept], *parts)


def read_series(file: Path) -> Series:
    """Read a per-token log. Raises ConfigError naming the line."""
    lines = read_lines(file, "tokens")
    if not lines:
        raise ConfigError(f"{file}: no tokens: expected a row per token")
    needed = [_column(lines, name) for name in NEEDED]
    for name, rows in zip(NEEDED, needed, strict=True):
        if rows is None:
            raise ConfigError(f"{file}: empty {name}: expected a number for each token")
    wall, read = (np.zeros(0) if rows is None else rows for rows in needed)
    return Series(wall, read, *(_column(lines, name) for name in PARTS))


def _column(lines: list[Line], name: str) -> np.ndarray | None:
    """Return (T,) numbers, None if the column is empty. Raises ConfigError for a partly empty column."""
    values = [line.amount(name) for line in lines]
    missing = [line for line, value in zip(lines, values, strict=True) if value is None]
    if len(missing) == len(lines):
        return None
    if missing:
        raise ConfigError(
            f"{missing[0].file} line {missing[0].number}: empty {name}: expected a value in every line or in none"
        )
    return np.array(values, float)


def read_runs(file: Path) -> list[Mapping[str, str]]:
    """Read a table of measured runs in series; a missing column is empty. Raises ConfigError naming the line."""
    lines = read_lines(file, "series")
    known: dict[str, Line] = {}
    for line in lines:
        name = line.text("id")
        if name in known or not name:
            wrong = f"id {name[:QUOTED]!r} repeats line {known[name].number}" if name else "empty id"
            raise ConfigError(f"{line.where}: {wrong}: expected a name of its own for every run")
        known[name] = line
    if not lines:
        raise ConfigError(f"{file}: no runs: expected a row per run")
    return [defaultdict(str, line.cells) for line in lines]


# -- folders of evidence

CELLS, MODELS = "cells.csv", "models.csv"


@dataclass(frozen=True)
class Evidence:
    """Rows of a folder. Its paths are relative to the folder."""

    path: Path
    cells: tuple[Line, ...]
    models: tuple[Line, ...]

    def series(self, cell: Line) -> Series | None:
        """Read the per-token log of a cell, None if it is not named or missing. Raises ConfigError."""
        named = cell.text("per_token_file")
        if not named:
            return None
        if not within(self.path, named):
            raise ConfigError(
                f"{cell.where}: per_token_file {named[:QUOTED]!r} is outside the folder: expected a path inside it"
            )
        return read_series(self.path / named) if (self.path / named).exists() else None

    def model(self, cell: Line) -> Line | None:
        """Return the row of the cell's model in models.csv, preferring the same quantisation."""
        named = [line for line in self.models if line.text("model") == cell.text("model")]
        same = [line for line in named if line.text("quant") == cell.text("quant")]
        return (same or named or [None])[0]

    @cached_property
    def names(self) -> list[str]:
        """Names of the cells in file order."""
        return [cell.text("cell") for cell in self.cells]

    def chosen(self, globs: Sequence[str]) -> list[Line]:
        """Return the cells that match any pattern. Raises ConfigError for a pattern without a match."""
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in self.names):
                raise ConfigError(f"--fit {glob!r} matches no cell of {self.path / CELLS}: {hint(glob, self.names)}")
        return [cell for cell in self.cells if any(fnmatchcase(cell.text("cell"), glob) for glob in globs)]


def read_folder(path: Path) -> Evidence:
    """Read the rows of a folder. Raises ConfigError naming file and line."""
    if path.is_dir() and not (path / CELLS).exists():
        raise ConfigError(f"{path}: no {CELLS} in this folder: expected one with a row per run (docs/logs.md)")
    cells = read_lines(path / CELLS, "cells")
    known: dict[str, Line] = {}
    for cell in cells:
        name = cell.text("cell")
        if name in known:
            raise ConfigError(f"{cell.file} line {cell.number}: cell {name!r} repeats line {known[name].number}")
        known[name] = cell
    if not cells:
        raise ConfigError(f"{path / CELLS}: no cells: expected a row per run")
    models = read_lines(path / MODELS, "models") if (path / MODELS).exists() else []
    return Evidence(path, tuple(cells), tuple(models))


def within(folder: Path, named: str) -> bool:
    """Return True if a named file is inside the folder after resolving links."""
    try:
        return (folder / named).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a cycle of links, or a zero byte
        return False
