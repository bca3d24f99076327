"""`moereplay platforms`: machines, every figure with its source."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import show


def platforms(
    name: Annotated[str | None, typer.Argument(help="Show one platform's figures and sources.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="As a file that can be edited and given back.")] = False,
) -> None:
    """List the platform presets, or show one."""
    from pydantic_core import to_json

    from moereplay.analysis.tables import table
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platform_files import as_toml, platform, presets

    if toml and name is None:
        raise ConfigError("--toml prints one platform; name it, as in `moereplay platforms phone-ufs4 --toml`")
    if name and toml:
        print(as_toml(platform(name)), end="")
        return
    if name:
        print(to_json(platform(name).document(), indent=1, inf_nan_mode="null").decode())
        return
    show(table([preset.row() for preset in presets()]))
