"""`moereplay forecast`: what live points of a model say of policy sets that were not run live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands.terminal import show, show_json


def forecast(
    folder: Annotated[Path, typer.Argument(help="Folder of `quality --out`.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="One of its tasks; default the first.")] = None,
    measure: Annotated[str | None, typer.Option(help="nll (perplexity), kl, ...; default nll.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Fit quality loss by the counters of replays, and say how good that is: signal, errors, coverage. FORECAST."""
    from moereplay.analysis.forecast import forecast as made_of
    from moereplay.analysis.forecast_page import document, page
    from moereplay.results.quality import load

    made = made_of(load(folder), task, measure)
    if as_json:
        show_json({"forecast": document(made)})
    else:
        show(*page(made))
