"""`moereplay models`: geometries of published models."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import show

LISTED = ("model", "layers", "experts", "k", "shared", "MiB per expert")
MORE = "router, context, bytes by precision and sources of one: moereplay models NAME"


def models(name: Annotated[str | None, typer.Argument(help="Show one model's geometry and sources.")] = None) -> None:
    """List the models whose geometry is known, or show one."""
    from moereplay.analysis.tables import table
    from moereplay.traces.geometry import MODELS, known

    if name:
        print(known(name).model_dump_json(indent=1))
        return
    show(table([{column: model.row()[column] for column in LISTED} for model in MODELS.values()]))
    show(MORE)
