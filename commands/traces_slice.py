"""`moereplay traces slice`: some requests of a trace, by their numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.interrupt import keeping, left_of
from moereplay.commands.options import NewTrace, TracePath
from moereplay.commands.terminal import say_made


def traces_slice(
    trace: TracePath,
    *,
    requests: Annotated[
        str, typer.Option(help="Numbers from 0 on and ranges without their end: 10:50 or 1,5,9.", show_default=False)
    ],
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy some requests of a trace, in the order in which they are named."""
    from moereplay.traces.combine import taken
    from moereplay.traces.selection import listed
    from moereplay.traces.store import open_trace

    opened = open_trace(trace)
    numbers = listed(requests, opened.requests)
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, f"requests {requests}", resume)
    say_made(out, made)
