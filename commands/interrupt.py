"""Ctrl-C: the first ends the command with one line of text, the second ends the process at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer

from moereplay.commands.terminal import say

INTERRUPTED = 130  #: what a shell reports of a program that Ctrl-C has ended
#: For threads to remove what they have half written, or to come to the end of a step.
SECONDS_TO_END = 0.3


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """In this block the first Ctrl-C raises KeyboardInterrupt, and the second ends the process."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored: in the background of a script
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def keeping(what: Callable[[], str]) -> Iterator[None]:
    """In this block Ctrl-C ends the verb with one line that says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {what()}")
        raise typer.Exit(INTERRUPTED) from None


def left_of(out: Path, done: str) -> str:
    """What is left of a trace whose writing was interrupted, and how to resume; `done`: recorded, imported."""
    partial = out.with_name(f"{out.name}.partial")
    if not partial.exists():
        return f"nothing was {done}"
    return f"what was {done} is kept in {partial}, the same command with --resume continues"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function: has Ctrl-C or SIGTERM come once? The second one raises KeyboardInterrupt."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        asked = True
        say("stopping: finishing what is in flight; once more to end at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: Any) -> NoReturn:
    """End the process even while a thread compiles, which nothing can interrupt."""
    logging.getLogger("asyncio").disabled = True  # it reports reads of zarr's that an interruption has abandoned
    if threading.active_count() > 1:
        from moereplay.simulator.threads import end_all

        sys.unraisablehook = lambda unraisable: None  # a thread may be made to end inside a callback of the compiler
        if not end_all(SECONDS_TO_END):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)
