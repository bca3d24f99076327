"""`moereplay traces sample`: so many requests of a trace, evenly spaced or drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.interrupt import keeping, left_of
from moereplay.commands.options import NewTrace, TracePath
from moereplay.commands.terminal import say_made


def traces_sample(
    trace: TracePath,
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many.", show_default=False)],
    seed: Annotated[int | None, typer.Option(min=0, help="Draw them; without it they are evenly spaced.")] = None,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy so many requests of a trace, in its order: evenly spaced, or drawn by a seed."""
    from moereplay.traces.combine import taken
    from moereplay.traces.selection import drawn, spaced
    from moereplay.traces.store import open_trace

    opened = open_trace(trace)
    evenly = seed is None
    numbers = spaced(requests, opened.requests) if evenly else drawn(requests, opened.requests, seed)
    said = f"{requests} evenly spaced requests" if evenly else f"{requests} requests drawn with seed {seed}"
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, said, resume)
    say_made(out, made)
