"""Progress of a run of a real model: requests done, tokens/s and time left."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moereplay.commands.status_line import StatusLine
from moereplay.commands.terminal import clock, say

if TYPE_CHECKING:
    from moereplay.tracegen.record import Progress

SECONDS_TO_FIRST_LINE = 2


class Meter:
    """A status line of recordings and live runs."""

    def __init__(self) -> None:
        self._line = StatusLine(SECONDS_TO_FIRST_LINE)

    def show(self, at: Progress) -> None:
        """To be called with every request's progress."""
        if at.skipped and at.done == at.skipped:
            say(f"resuming after {at.skipped} of {at.total} requests")
        elif at.done > at.skipped:
            self._line.show(partial(_status, at))

    def close(self) -> None:
        """End the status line."""
        self._line.close()


def _status(at: Progress) -> str:
    """One line: 12/80 requests, 431 tokens/s, 0:02:41 left."""
    return f"{at.done}/{at.total} requests, {at.tokens_per_second:,.0f} tokens/s, {clock(at.seconds_left)} left"
