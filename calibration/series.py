"""The per-token log of one run: what each decoded token took, and what it read.

Columns are found by name: `wall_ms`, `io_ms`, `compute_ms`, `stall_ms`, `mgmt_ms`, `read_bytes`, `majflt` (major page
faults); others are left alone. So the series of a folder of evidence are read, and BigMoeOnEdge's own `--csv` files of
every build.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.calibration.columns import needed
from moereplay.calibration.rows import Line, read_lines
from moereplay.simulator.errors import ConfigError

NEEDED = needed("tokens")
PARTS = ("compute_ms", "io_ms", "stall_ms", "mgmt_ms", "majflt")


@dataclass(frozen=True)
class Series:
    """Arrays of one number per token, (T,) float64; a column that the file lacks, or leaves empty, is None."""

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
        """Some of the tokens."""
        parts = (rows if rows is None else rows[kept] for rows in (getattr(self, name) for name in PARTS))
        return Series(self.wall_ms[kept], self.read_bytes[kept], *parts)


def read_series(file: Path) -> Series:
    """The log of a file. Raises ConfigError naming the line."""
    lines = read_lines(file, "tokens")
    if not lines:
        raise ConfigError(f"{file}: no tokens; expected a row for each")
    needed = [_column(lines, name) for name in NEEDED]
    for name, rows in zip(NEEDED, needed, strict=True):
        if rows is None:
            raise ConfigError(f"{file}: {name} is empty; expected a number for each token")
    wall, read = (np.zeros(0) if rows is None else rows for rows in needed)
    return Series(wall, read, *(_column(lines, name) for name in PARTS))


def _column(lines: list[Line], name: str) -> np.ndarray | None:
    """(T,) numbers, None if no token has one. Raises ConfigError if only some have."""
    values = [line.amount(name) for line in lines]
    missing = [line for line, value in zip(lines, values, strict=True) if value is None]
    if len(missing) == len(lines):
        return None
    if missing:
        raise ConfigError(f"{missing[0].file} line {missing[0].number}: {name} is empty; others have it: fill it in")
    return np.array(values, float)
