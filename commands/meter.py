"""Progress of a run of a real model: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from commands.terminal import clock, rewrite, say

if TYPE_CHECKING:
    from tracegen.record import Progress

SECONDS_BETWEEN_LINES = 10
SECONDS_TO_FIRST_LINE = 2


class Meter:
    """Requests done, tokens/s and time left: a line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic() - SECONDS_BETWEEN_LINES + SECONDS_TO_FIRST_LINE
        self._wide = 0

    def show(self, at: Progress) -> None:
        """To be called with every request's progress."""
        if at.skipped and at.done == at.skipped:
            say(f"resuming after {at.skipped} of {at.total} requests")
        elif self._terminal:
            self._wide = rewrite(_status(at), self._wide)
        elif at.done > at.skipped and time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            say(_status(at))

    def close(self) -> None:
        """End the status line, if one is open, so that what follows begins a new one."""
        if self._wide:
            say("")


def _status(at: Progress) -> str:
    """One line: 12/80 requests, 431 tokens/s, 0:02:41 left."""
    if at.done == at.skipped:
        return f"{at.done}/{at.total} requests"
    return f"{at.done}/{at.total} requests, {at.tokens_per_second:,.0f} tokens/s, {clock(at.seconds_left)} left"
