"""Ctrl-C in a long run: the first finishes what is in flight, the second ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from commands.terminal import say


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether somebody has asked to stop: Ctrl-C or SIGTERM; the second time ends at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        say("stopping: finishing what is in flight; once more to end at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
