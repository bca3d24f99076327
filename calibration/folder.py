"""A folder of evidence: measured runs, the models that they ran, and what was logged beside them.

Paths in `cells.csv` are relative to it. Nothing here is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from moereplay.calibration.rows import QUOTED, Line, read_lines
from moereplay.calibration.series import Series, read_series
from moereplay.simulator.errors import ConfigError
from moereplay.traces.texts import hint

CELLS, MODELS = "cells.csv", "models.csv"


@dataclass(frozen=True)
class Evidence:
    """The rows of a folder."""

    path: Path
    cells: tuple[Line, ...]
    models: tuple[Line, ...]

    def series(self, cell: Line) -> Series | None:
        """The cell's per-token log, None where none is named or the named one is not there. Raises ConfigError."""
        named = cell.text("per_token_file")
        if not named:
            return None
        if not within(self.path, named):
            raise ConfigError(
                f"{cell.where}: per_token_file {named[:QUOTED]!r} leads out of the folder; expected one in it"
            )
        return read_series(self.path / named) if (self.path / named).exists() else None

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
    cells = read_lines(path / CELLS, "cells")
    known: dict[str, Line] = {}
    for cell in cells:
        name = cell.text("cell")
        if name in known:
            raise ConfigError(f"{cell.file} line {cell.number}: cell {name!r} again, as on line {known[name].number}")
        known[name] = cell
    if not cells:
        raise ConfigError(f"{path / CELLS}: no cells; expected a row for each run")
    models = read_lines(path / MODELS, "models") if (path / MODELS).exists() else []
    return Evidence(path, tuple(cells), tuple(models))


def within(folder: Path, named: str) -> bool:
    """Whether a file that a row names lies in the folder, links followed."""
    try:
        return (folder / named).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # links in a circle, a zero byte
        return False
