"""`moereplay platforms`: machines, every figure with its source."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.terminal import show


def platforms(
    name: Annotated[str | None, typer.Argument(help="Show one platform's figures and sources.")] = None,
) -> None:
    """List the platform presets, or show one."""
    from analysis.tables import table
    from simulator.platform import platform, presets

    if name:
        print(platform(name).model_dump_json(indent=1))
        return
    show(table([preset.row() for preset in presets()]))
