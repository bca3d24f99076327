"""`moereplay traces append`: more requests for a finished trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands.interrupt import keeping
from moereplay.commands.terminal import say, say_made


def traces_append(
    trace: Annotated[Path, typer.Argument(help="The trace that grows, NAME.zarr.", show_default=False)],
    more: Annotated[list[Path], typer.Argument(help="Traces of the same model.", show_default=False)],
) -> None:
    """Append the requests of other traces to a trace, in place: all of them, or after a kill none."""
    from moereplay.traces.combine import appended
    from moereplay.traces.store import open_trace

    with keeping(lambda: f"{trace} is as it was"):
        grown, left_out = appended(trace, [open_trace(source) for source in more])
    for array in left_out:
        say(f"left out: {array}")
    say_made(trace, grown)
    if trace.with_name(f"{trace.name}.derived").exists():
        say(f"note: what replays keep in {trace}.derived is of the shorter trace; it may be removed")
