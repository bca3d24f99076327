"""`moereplay traces publish`: add a trace to a library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.terminal import say


def traces_publish(
    trace: options.TracePath,
    *,
    licence: Annotated[str, typer.Option(help="SPDX, as Apache-2.0 or CC-BY-4.0.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The library: a folder, new or not.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="In the library; else the trace's.")] = None,
    source: Annotated[str, typer.Option(help="Where the routing comes from, in words.")] = "",
) -> None:
    """Add a trace to a library, without its prompts, with licence, digests and a card."""
    from moereplay.traces.library.publish import publish
    from moereplay.traces.store import open_trace

    entry = publish(open_trace(trace), out, name or trace.name.removesuffix(".zarr"), licence, source)
    if entry.prompts_sha256:
        say("note: token ids are left out, as they spell the prompts; traces.json has a hash of them")
    say(f"wrote {out / entry.name}.zarr, {entry.bytes / 1e6:,.1f} MB, {entry.licence}, digest {entry.digest[:12]}")
    say(f"to share it: hf upload OWNER/NAME {out} --repo-type dataset")
