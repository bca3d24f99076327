"""`moereplay traces get`: take a trace out of a library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands.terminal import say, say_wrote


def traces_get(
    name: Annotated[str, typer.Argument(help="As `traces list` names it.", show_default=False)],
    *,
    source: Annotated[
        str | None, typer.Option("--from", help="A folder, or a data set of the hub (owner/name).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The trace to write; else NAME.zarr here.")] = None,
) -> None:
    """Fetch a trace from a library, each file held to the sha256 that was published."""
    from moereplay.traces.library.fetch import fetch
    from moereplay.traces.library.index import folder_of
    from moereplay.traces.library.sources import library_of

    library = library_of(source)
    path = out or Path(folder_of(name))
    trace = fetch(library, name, path)
    licence = library.index().entry(name, library.where).licence
    say(f"{name} is licensed {licence}" if licence else f"no licence is stated for {name}")
    say_wrote(path, trace)
