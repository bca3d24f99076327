"""A status line on stderr: rewritten in place on a terminal, elsewhere a line of its own now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from moereplay.commands.terminal import rewrite, say

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
