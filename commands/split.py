"""`moereplay split`: requests to fit a policy to, the others to try it on, and the profile of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.terminal import say_wrote


def split(
    trace: options.TracePath,
    out: Annotated[Path, typer.Option(help="A new folder: train.zarr, test.zarr, profile.json.", show_default=False)],
    share: Annotated[float, typer.Option(help="Of the requests, those to fit to.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Which requests.")] = 0,
) -> None:
    """Split a trace by requests: what is fitted to some of them is tried on the others."""
    from moereplay.commands.profiles import write_profile
    from moereplay.results.outputs import check_output
    from moereplay.traces.split import profile
    from moereplay.traces.split import split as drawn
    from moereplay.traces.store import open_trace
    from moereplay.traces.writer import write_trace

    opened = open_trace(trace)
    parts = drawn(opened.requests, share, seed)
    for name in ("train.zarr", "test.zarr", "profile.json"):
        check_output(out / name)
    made = []
    for name, requests in zip(("train", "test"), parts, strict=True):
        path = out / f"{name}.zarr"
        rows = map(opened.request, requests)
        made.append(write_trace(path, opened.header, rows, opened.router_bias, resumable=False))
        say_wrote(path, made[-1])
    write_profile(out / "profile.json", profile(made[0]))
