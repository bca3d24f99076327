"""Progress of `quality`: which set reads which task, tokens so far, and what is done."""

from __future__ import annotations

import time

from moereplay.commands.status_line import StatusLine
from moereplay.commands.terminal import say


class Pace:
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
