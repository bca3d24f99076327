"""`moereplay policies`: the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.terminal import show

LISTED = ("kind", "policy", "what")
MORE = "parameters, needs and source of one: moereplay policies NAME; of all: --markdown"


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain one policy.")] = None,
    policy_file: options.PolicyFiles = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The list as docs/policies-table.md has it.")] = False,
) -> None:
    """List the policies of all four kinds with parameters, needs and sources, or explain one."""
    from moereplay.analysis.tables import definitions, table
    from moereplay.policies import named
    from moereplay.policies.table import explain, rows
    from moereplay.policies.table import markdown as as_markdown

    if name is None and markdown:
        print(as_markdown())
        return
    if name is None:
        show(table([{column: row[column] for column in LISTED} for row in rows()]))
        show(MORE)
        return
    for policy in named(name):
        show(*definitions(explain(policy)), "")
