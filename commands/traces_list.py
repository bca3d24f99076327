"""`moereplay traces list`: what a library of traces holds."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import show, show_json

FIELDS = ("name", "model", "licence", "requests", "tokens", "bytes", "capabilities", "digest", "source")
Library = Annotated[str | None, typer.Argument(help="A folder, or a data set of the hub (owner/name).")]


def traces_list(
    source: Library = None, *, as_json: Annotated[bool, typer.Option("--json", help="As one document.")] = False
) -> None:
    """List the traces of a library; without one, those that come with the program."""
    from moereplay.analysis.tables import table
    from moereplay.traces.library.sources import library_of

    library = library_of(source)
    entries = library.index().traces
    if as_json:
        show_json([entry.model_dump(mode="json", include=set(FIELDS)) for entry in entries])
        return
    if not entries:
        show(f"{library.where} holds no traces; add one with: moereplay traces publish TRACE --licence SPDX --out DIR")
        return
    rows = [
        {
            "name": entry.name,
            "model": entry.model,
            "licence": entry.licence or "not stated",
            "requests": entry.requests,
            "tokens": entry.tokens,
            "MB": f"{entry.bytes / 1e6:,.1f}",
            "holds": ", ".join(entry.capabilities),
        }
        for entry in entries
    ]
    show(table(rows))
