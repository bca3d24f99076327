"""`moereplay policies`: what there is to combine."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.terminal import show


def policies(name: Annotated[str | None, typer.Argument(help="Explain one policy.")] = None) -> None:
    """List the policies of all four kinds, or explain one."""
    from analysis.tables import table
    from policies import named
    from policies.table import explain, rows

    if name is None:
        show(table(rows()))
        return
    for policy in named(name):
        width = max(len(heading) for heading, _ in explain(policy))
        show(*(f"{heading:{width}}  {text}" for heading, text in explain(policy)), "")
