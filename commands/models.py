"""`moereplay models`: geometries of published models."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.terminal import show


def models(name: Annotated[str | None, typer.Argument(help="Show one model's geometry and sources.")] = None) -> None:
    """List the models whose geometry is known, or show one."""
    from analysis.tables import table
    from traces.geometry import MODELS, known

    if name:
        print(known(name).model_dump_json(indent=1))
        return
    show(table([model.row() for model in MODELS.values()]))
