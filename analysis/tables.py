"""Tables of text for a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 220  #: a pipe has no width, and a cut cell is worse than a long line


def console(stderr: bool = False) -> Console:
    """The console on stdout, as wide as the terminal, or wide enough for any table in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, soft_wrap=True)  # [x] is text


def table(rows: Sequence[Mapping[str, object]], title: str = "") -> Table:
    """A column per key of any row; numbers to the right, floats with four significant digits."""
    drawn = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(cell(row.get(name)) for name in names))
    return drawn


def cell(value: object) -> str:
    """A value as text: floats with four significant digits, thousands separated by commas."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
