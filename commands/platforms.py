"""`moereplay platforms`: machines, every figure with its source."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.terminal import show


def platforms(
    name: Annotated[str | None, typer.Argument(help="Show one platform's figures and sources.")] = None,
) -> None:
    """List the platform presets, or show one."""
    from pydantic_core import to_json

    from analysis.tables import table
    from simulator.platform import platform, presets

    if name:
        print(to_json(platform(name).document(), indent=1, inf_nan_mode="null").decode())
        return
    show(table([preset.row() for preset in presets()]))
