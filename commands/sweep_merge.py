"""`moereplay sweep merge`: results of any number of runs as one set of tables."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import say


def sweep_merge(
    results: Annotated[list[str], typer.Argument(help="Folders or URLs that `sweep run` wrote.", show_default=False)],
    out: Annotated[str, typer.Option(help="A new folder or URL.", show_default=False)],
) -> None:
    """Merge results: each configuration once, sorted; the same bytes whatever the way of running."""
    from moereplay.sweeps.parts import merge
    from moereplay.sweeps.store import place_of

    merged = merge([place_of(each) for each in results], place_of(out))
    failed = f" and {merged.errors:,} error rows" if merged.errors else ""
    say(f"wrote {merged.where}: {merged.configurations:,} configurations{failed}")
