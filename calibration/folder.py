"""A folder of evidence: measured runs, the models that they ran, and what was logged beside them.

Paths in `cells.csv` are relative to it. Nothing here is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from calibration.rows import SHOWN, Line, read_lines
from calibration.series import Series, read_series
from simulator.errors import ConfigError
from traces.spelling import hint

CELLS, MODELS = "cells.csv", "models.csv"
NEEDED = ("cell", "device", "model")
#: Columns of numbers; a word in one of them is a fault of the file.
AMOUNTS = (
    *("moe_layers", "experts", "k", "expert_bytes_mean", "dense_mib", "cache_mib", "cache_slots", "lanes"),
    *("prompt_tokens", "decode_tokens", "hit_pct", "read_mib_per_token", "tok_s", "tpot_ms", "tpot_median_ms"),
    *("compute_ms", "io_ms", "stall_ms", "mgmt_ms", "token_demand_mib"),
)


@dataclass(frozen=True)
class Evidence:
    """The rows of a folder."""

    path: Path
    cells: tuple[Line, ...]
    models: tuple[Line, ...]

    def series(self, cell: Line) -> Series | None:
        """The cell's per-token log, None where none is named or the named one is not there. Raises ConfigError."""
        named = cell.text("per_token_file")
        return read_series(self.path / named) if named and (self.path / named).exists() else None

    def model(self, cell: Line) -> Line | None:
        """The row of models.csv of what the cell ran: same name, and same quantisation where both say one."""
        named = [line for line in self.models if line.text("model") == cell.text("model")]
        said = [line for line in named if line.text("quant") == cell.text("quant")]
        return (said or named or [None])[0]

    @cached_property
    def names(self) -> list[str]:
        """Of the cells, in the order of the file."""
        return [cell.text("cell") for cell in self.cells]

    def chosen(self, globs: Sequence[str]) -> list[Line]:
        """The cells whose names match any of the patterns. Raises ConfigError for a pattern that matches none."""
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in self.names):
                raise ConfigError(f"--fit {glob!r} matches no cell of {self.path / CELLS}: {hint(glob, self.names)}")
        return [cell for cell in self.cells if any(fnmatchcase(cell.text("cell"), glob) for glob in globs)]


def read_folder(path: Path) -> Evidence:
    """The folder's rows. Raises ConfigError naming file and line."""
    cells = read_lines(path / CELLS, NEEDED)
    known: dict[str, Line] = {}
    for cell in cells:
        _check_amounts(cell)
        name = cell.text("cell")
        if name in known:
            raise ConfigError(f"{cell.file} line {cell.number}: cell {name!r} again, as on line {known[name].number}")
        known[name] = cell
    if not cells:
        raise ConfigError(f"{path / CELLS}: no cells; expected a row for each run")
    models = read_lines(path / MODELS, ("model",)) if (path / MODELS).exists() else []
    return Evidence(path, tuple(cells), tuple(models))


def _check_amounts(cell: Line) -> None:
    """Raises ConfigError naming the column of numbers that has something else."""
    for column in AMOUNTS:
        cell.amount(column)
    if (cell.amount("hit_pct") or 0) > 100:
        said = f"{cell.file} line {cell.number}: hit_pct is {cell.text('hit_pct')[:SHOWN]!r}"
        raise ConfigError(f"{said}; expected percent, from 0 to 100, or nothing")
