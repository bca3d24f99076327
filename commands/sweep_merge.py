"""`moereplay sweep merge`: results of any number of runs as one set of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.terminal import say


def sweep_merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `sweep run` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="A new folder.", show_default=False)],
) -> None:
    """Merge results: each configuration once, sorted; the same bytes whatever the way of running."""
    from simulator.sweep.merge import merge

    merged = merge(folders, out)
    failed = f" and {merged.errors:,} error rows" if merged.errors else ""
    say(f"wrote {merged.folder}: {merged.configurations:,} configurations{failed}")
