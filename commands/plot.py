"""`moereplay plot`: figures from results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.terminal import say

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

#: The figure that can be drawn from curves without replays.
CURVES_ALONE = "hit_rate_by_capacity"


def plot(
    results: Annotated[
        str,
        typer.Argument(
            help="Folder of `replay`, `curve`, `validate`, `measure --out` or `sweep run`; URL of `sweep run`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for figures; default figures in RESULTS, or here.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Comma list of figures; default all that the results allow.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these replays.")] = None,
) -> None:
    """Draw figures from results, PNG and SVG: collisions by layer, misses, hit rate and latency against capacity."""
    from analysis.figures import save
    from sweeps.store import place_of

    place = place_of(results)
    folder = out or place.beside(Path()) / "figures"
    for name, drawn in _drawn(place.local(), figure.split(",") if figure else None, where or []):
        for path in save(drawn, folder / name):
            say(f"wrote {path}")


def _drawn(folder: Path, names: list[str] | None, where: list[str]) -> list[tuple[str, Figure]]:
    """Figures of a validation, of curves alone, or of replays with the curves behind them."""
    from analysis.figures import draw_all, draw_curves
    from results import curves, measured, validation

    if (folder / measured.FILE).exists():
        return draw_all(measured.load(folder), names)
    if (folder / validation.FILE).exists():
        return draw_all(validation.load(folder), names)
    lines = curves.load(folder)
    alone = not lines.is_empty() and not any(folder.glob("part-*"))
    if alone and names in (None, [CURVES_ALONE]):
        return [(CURVES_ALONE, draw_curves(lines))]
    return draw_all(_rows(folder, where), names, lines)


def _rows(folder: Path, where: list[str]) -> pl.DataFrame:
    """The replays of a folder that `replay` or `sweep` wrote, with the checks of a sweep."""
    from analysis.checks import with_checks
    from results import checks
    from results import read as results
    from results import read_sweep as sweeps

    rows = results.filtered((sweeps if sweeps.is_sweep(folder) else results).load(folder), where)
    return with_checks(rows, checks.load(folder))
