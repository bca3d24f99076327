"""`moereplay inspect`: checks of a trace, and statistics of its routing."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.options import TracePath
from moereplay.commands.terminal import show, show_json


def inspect(
    trace: TracePath,
    full: Annotated[bool, typer.Option("--full", help="Re-read every byte and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check a trace and summarise its routing: reuse, working set, entropy, look-ahead recall."""
    from moereplay.analysis.inspection import document, render
    from moereplay.traces.store import open_trace, verify
    from moereplay.traces.summary import summarise
    from moereplay.traces.validator import examine

    opened = open_trace(trace)
    if full:
        verify(opened)
    findings, summary = examine(opened), summarise(opened)
    if as_json:
        show_json(document(opened, summary, findings))
    else:
        show(*render(opened, summary, findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
