"""A status line on stderr: rewritten in place on a terminal, elsewhere a line of its own now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from moereplay.commands.terminal import clock, rewrite, say

if TYPE_CHECKING:
    from moereplay.sweeps.dispatch import Progress as SweepProgress
    from moereplay.tracegen.record import Progress


SECONDS_BETWEEN_LINES = 10
SECONDS_BETWEEN_REWRITES = 0.2


class StatusLine:
    """What long work shows of itself."""

    def __init__(self, seconds_to_first: float = SECONDS_BETWEEN_LINES) -> None:
        """On a terminal the first is shown at once."""
        self._terminal = sys.stderr.isatty()
        self._due = time.monotonic() + (0 if self._terminal else seconds_to_first)
        self._wide = 0

    def show(self, status: Callable[[], str], last: bool = False) -> None:
        """To be called as often as anything changes; `status` is asked when a line is due, and for the `last` one."""
        if time.monotonic() < self._due and not last:
            return
        self._due = time.monotonic() + (SECONDS_BETWEEN_REWRITES if self._terminal else SECONDS_BETWEEN_LINES)
        if self._terminal:
            self._wide = rewrite(status(), self._wide)
        else:
            say(status())

    def close(self) -> None:
        """End the line that is rewritten, if one is open, so that what follows begins a new one."""
        if self._wide:
            say("")
        self._wide = 0


# -- Progress: a bar on a terminal, a plain line now and then elsewhere. On stderr, so that output can be piped.


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


# -- Progress of a run of a real model: requests done, tokens/s and time left.

SECONDS_TO_FIRST_LINE = 2


class RequestMeter:
    """A status line of recordings and live runs."""

    def __init__(self) -> None:
        self._line = StatusLine(SECONDS_TO_FIRST_LINE)

    def show(self, at: Progress) -> None:
        """To be called with every request's progress."""
        if at.skipped and at.done == at.skipped:
            say(f"resuming after {at.skipped} of {at.total} requests")
        elif at.done > at.skipped:
            self._line.show(partial(_requests_status, at))

    def close(self) -> None:
        """End the status line."""
        self._line.close()


def _requests_status(at: Progress) -> str:
    """One line: 12/80 requests, 431 tokens/s, 0:02:41 left."""
    return f"{at.done}/{at.total} requests, {at.tokens_per_second:,.0f} tokens/s, {clock(at.seconds_left)} left"


# -- Progress of a sweep: done of total, replays/s, time left and the best figures so far.


class SweepMeter:
    """A status line of the progress of a sweep."""

    def __init__(self) -> None:
        self._line = StatusLine()

    def show(self, at: SweepProgress) -> None:
        """To be called as often as anything changes."""
        self._line.show(partial(sweep_status, at), last=at.done == at.total)

    def close(self) -> None:
        """End the status line."""
        self._line.close()


def sweep_status(at: SweepProgress) -> str:
    """431/1,000 replays, 12.5/s, 0:00:46 left, best hit rate 71.2% (3f9a...), best TPOT 41.2 ms (...)."""
    parts = [f"{at.done:,}/{at.total:,} replays"]
    if at.done:
        parts.append(f"{at.per_second:.3g}/s, {clock(at.seconds_left or 0)} left")
    if at.errors or at.killers:
        parts.append(f"{len(at.errors) + len(at.killers):,} failed")
    if "hit_rate" in at.best:
        value, identity = at.best["hit_rate"]
        parts.append(f"best hit rate {100 * value:.1f}% ({identity[:8]})")
    if "tpot_ms" in at.best:
        value, identity = at.best["tpot_ms"]
        parts.append(f"best TPOT {value:.3g} ms ({identity[:8]})")
    return ", ".join(parts)


# -- Progress of `quality`: which set reads which task, tokens so far, and what is done.


class QualityMeter:
    """A status line, and a line for each of so many jobs that ends: a task under a policy set."""

    def __init__(self, jobs: int) -> None:
        self._line = StatusLine()
        self._jobs, self._ended, self._tokens = jobs, 0, 0
        self._began = time.monotonic()

    def passed(self, name: str, tokens: int) -> None:
        """A pass of a set is over."""
        self._tokens += tokens
        self._line.show(lambda: self._status(name))

    def _status(self, name: str) -> str:
        rate = self._tokens / (time.monotonic() - self._began)
        return f"{self._ended} of {self._jobs} done; {name}: {self._tokens:,} tokens, {rate:.1f} tokens/s"

    def done(self, task: str, name: str, before: bool) -> None:
        """A set has answered a task, now or `before`."""
        self._ended += 1
        seconds = time.monotonic() - self._began
        self._line.close()
        say(f"{self._ended} of {self._jobs}: {task}, {name}: {'kept from before' if before else f'{seconds:.0f} s'}")
        self._began, self._tokens = time.monotonic(), 0

    def close(self) -> None:
        """End the status line."""
        self._line.close()
