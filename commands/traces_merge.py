"""`moereplay traces merge`: the requests of several traces as one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands.interrupt import keeping, left_of
from moereplay.commands.options import NewTrace
from moereplay.commands.terminal import say, say_made


def traces_merge(
    sources: Annotated[list[Path], typer.Argument(help="Traces of one model, NAME.zarr.", show_default=False)],
    *,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted merge.")] = False,
) -> None:
    """Merge traces of one model: all requests in order, with the arrays that every trace has."""
    from moereplay.traces.combine import merged
    from moereplay.traces.store import open_trace

    with keeping(lambda: left_of(out, "merged")):
        trace, left_out = merged(out, [open_trace(source) for source in sources], resume)
    for array in left_out:
        say(f"left out: {array}")
    say_made(out, trace)
