"""Progress: a bar on a terminal, a plain line now and then elsewhere. On stderr, so that output can be piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moereplay.commands.status_line import StatusLine


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Yields a function to call after each of `total` pieces of work, or with how many; one piece shows nothing."""
    if total <= 2:
        yield lambda pieces=1: None
    elif sys.stderr.isatty():
        with _bar(total, what) as advance:
            yield advance
    else:
        yield _lines(total, what)


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[..., None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from moereplay.analysis.tables import console

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda pieces=1: bar.advance(task, pieces)


def _lines(total: int, what: str) -> Callable[..., None]:
    done, line = 0, StatusLine()

    def advance(pieces: int = 1) -> None:
        nonlocal done
        done += pieces
        line.show(lambda: f"{done}/{total} {what}", last=done == total)

    return advance


@contextmanager
def searching(most: int, seconds: float | None) -> Iterator[Callable[[int, float], None]]:
    """Yields a function to call with a number of replays done and the most tokens/s so far."""
    from moereplay.traces.texts import digits

    begun, done, first, line = 0.0, 0, 0, StatusLine()

    def advance(replays: int, fastest: float) -> None:
        nonlocal begun, done, first
        if not done:  # the first replays may have to be compiled
            begun, first = time.monotonic(), replays
        done += replays
        line.show(lambda: f"{done:,} of at most {most:,} replays, {_left()}best so far {digits(fastest, 4)} tokens/s")

    def _left() -> str:
        spent = time.monotonic() - begun
        if done == first:
            return ""
        whole = spent * max(0, most - done) / (done - first)
        left = whole if seconds is None else min(whole, max(0.0, seconds - spent))
        return f"about {left:.0f} s left; " if left < 100 else f"about {left / 60:.0f} min left; "

    try:
        yield advance
    finally:
        line.close()
