"""Options of the verbs that show the FORECAST quality loss of replays, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    import polars as pl

    from moereplay.analysis.forecast import Forecast

Quality = Annotated[
    Path | None, typer.Option(help="Folder of `quality --out`: the FORECAST loss of each replay from its live points.")
]


class Foreseen(NamedTuple):
    """Which live points to forecast from, and which loss is the largest that is shown."""

    quality: Quality = None
    max_loss: Annotated[
        str | None,
        typer.Option(help="With --quality: only what is FORECAST to lose no more; 1% of perplexity, or 0.02 nats."),
    ] = None

    def beside(self, frame: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
        """A frame of results with what is forecast, and what is said of it; as it is where nothing was asked.

        Raises ResultError where nothing can be forecast, or nothing is within the largest loss.
        """
        from moereplay.analysis.forecasts import refusals, share_of, with_forecasts, within
        from moereplay.results.result import ResultError

        if self.quality is None:
            if self.max_loss is not None:
                raise ResultError("--max-loss needs live points; give --quality FOLDER, of `moereplay quality --out`")
            return frame, []
        most = None if self.max_loss is None else share_of(self.max_loss)
        made = forecast_of(self.quality)
        whole = with_forecasts(frame, made)
        kept = whole if most is None else within(whole, most)
        chosen = "" if most is None else f"; within {most:.4g}, interval included: {len(kept)} of {len(whole)}"
        return kept, [_said(made) + chosen, *refusals(whole)]


def forecast_of(folder: Path) -> Forecast:
    """What the live points of a folder say of perplexity. Raises ResultError."""
    from moereplay.analysis.forecasts import of_perplexity
    from moereplay.results.quality import load

    return of_perplexity(load(folder))


def _said(made: Forecast) -> str:
    from moereplay.analysis.left_out import LEVEL

    live = f"{len(made.points)} live points of {made.task}"
    return f"FORECAST: rise of perplexity from {live}, {LEVEL:.0%} intervals"
