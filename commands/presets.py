"""`moereplay presets`: configurations of the papers, every value with its source."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import show

LISTED = ("preset", "what")
MORE = "policies, capacity, platform and sources of one: moereplay presets NAME"


def presets(name: Annotated[str | None, typer.Argument(help="Explain one preset.")] = None) -> None:
    """List the presets of `replay --preset`, or explain one: values, sources, and what was assumed."""
    from moereplay.analysis.tables import definitions, table
    from moereplay.simulator.preset import NAMES, explain, preset

    if name:
        show(*definitions(explain(preset(name))))
        return
    show(table([{column: preset(known).row()[column] for column in LISTED} for known in NAMES]))
    show(MORE)
