"""Progress of `quality`: which set reads which task, tokens so far, and what is done."""

from __future__ import annotations

import sys
import time

from commands.terminal import rewrite, say

SECONDS_BETWEEN_LINES = 10


class Pace:
    """A line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._ended, self._tokens = jobs, 0, 0
        self._began = self._said = time.monotonic()
        self._terminal, self._wide = sys.stderr.isatty(), 0

    def passed(self, name: str, tokens: int) -> None:
        """A pass of a set is over."""
        self._tokens += tokens
        rate = self._tokens / (time.monotonic() - self._began)
        line = f"{self._ended} of {self._jobs} done; {name}: {self._tokens:,} tokens, {rate:.1f} tokens/s"
        if self._terminal:
            self._wide = rewrite(line, self._wide)
        elif time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            say(line)

    def done(self, task: str, name: str, before: bool) -> None:
        """A set has answered a task, now or `before`."""
        self._ended += 1
        seconds = time.monotonic() - self._began
        self.close()
        say(f"{self._ended} of {self._jobs}: {task}, {name}: {'kept from before' if before else f'{seconds:.0f} s'}")
        self._began, self._tokens = time.monotonic(), 0

    def close(self) -> None:
        """End the line that is rewritten, if one is open."""
        if self._wide:
            say("")
            self._wide = 0
