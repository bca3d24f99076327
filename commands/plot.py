"""`moereplay plot`: figures from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.terminal import say


def plot(
    results: Annotated[
        Path, typer.Argument(help="Folder that `replay --out` or `validate --out` wrote.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures; default RESULTS/figures.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Comma list of figures; default all that the results can feed.")
    ] = None,
) -> None:
    """Draw figures from results, PNG and SVG: collisions by layer, misses, hit rate against capacity."""
    from analysis import results as replays
    from analysis import validation_rows as validations
    from analysis.figures import draw_all, save

    rows = validations if (results / validations.FILE).exists() else replays
    frame = rows.load(results)
    folder = out or results / "figures"
    for name, drawn in draw_all(frame, figure.split(",") if figure else None):
        for path in save(drawn, folder / name):
            say(f"wrote {path}")
