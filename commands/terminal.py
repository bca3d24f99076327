"""Output and Ctrl-C of a verb: results on stdout, remarks and progress on stderr, so that results can be piped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from moereplay.analysis.figures.catalogue import Drawn
    from moereplay.traces.schema import Trace

STDOUT = Path("-")  #: means standard output for verbs that write one text
INTERRUPTED = 130  #: exit code of a program that Ctrl-C ended, as shells report it
#: Time for threads to remove half-written files, or to finish a step.
SECONDS_TO_END = 0.3


# -- output


def show(*parts: str) -> None:
    """Print lines and tables to stdout; wider lines are folded."""
    from moereplay.analysis.tables import folded
    from moereplay.traces.texts import escaped

    for line in (line for part in parts for line in part.split("\n")):
        print(folded(escaped(line)))


def show_json(document: object) -> None:
    """Print one JSON document to stdout."""
    from moereplay.traces.documents import json_text

    print(json_text(document, indent=1))


def say(line: str) -> None:
    """Print a remark to stderr, wrapped to the terminal or to COLUMNS; without a terminal in one line."""
    from moereplay.analysis.tables import folded, width_of
    from moereplay.traces.texts import escaped_lines

    folds = sys.stderr.isatty() or "COLUMNS" in os.environ
    lines = escaped_lines(line)
    print(folded(lines, width_of(sys.stderr)) if folds else lines, file=sys.stderr)


def rewrite(line: str, before: int = 0) -> int:
    """Replace the last line of stderr's terminal, `before` characters long. Return the length of the new one."""
    from moereplay.analysis.tables import width_of
    from moereplay.traces.texts import escaped

    cut = escaped(line)[: width_of(sys.stderr) - 1]  # a full line would scroll
    print(f"\r{cut:{min(before, width_of(sys.stderr) - 1)}}", end="", file=sys.stderr, flush=True)
    return len(cut)


def mute() -> None:
    """Discard further output on stdout, after its reader has closed it or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clock(seconds: float) -> str:
    """Format seconds as 1:02:03, rounded."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def say_wrote(path: Path, trace: Trace) -> None:
    """Print path, size and digest of a trace that was written."""
    from moereplay.traces.texts import counted

    size = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    say(f"wrote {path}: {size}, digest {trace.digest[:12]}")


def say_made(path: Path, trace: Trace) -> None:
    """Print path, size and digests of a trace that was assembled from others."""
    from moereplay.traces.combine import content_digest

    say_wrote(path, trace)
    say(f"content digest {content_digest(trace)[:12]} (independent of how the trace was assembled)")


def say_left_out(drawn: Drawn) -> None:
    """Print one line per reason for leaving figures out, with their names."""
    for why in dict.fromkeys(drawn.left_out.values()):
        say(f"left out: {', '.join(name for name, reason in drawn.left_out.items() if reason == why)}: {why}")


def say_shared(shared: int, of: int, what: str) -> None:
    """Print how many replays were computed from another's decisions."""
    if shared:
        say(f"{shared:,} of {of:,} {what}: only times were computed, since platforms decide alike")


class _ToStderr(logging.Handler):
    """Prints log messages to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_when_compiling() -> None:
    """Print a line when the engine compiles something that is not in its cache, to explain the wait."""
    log = logging.getLogger("moereplay.simulator.compiled.engine")
    log.setLevel(logging.INFO)
    log.handlers = [_ToStderr()]


# -- Ctrl-C: the first ends the command with one line, the second ends the process at once


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C in this block, and end the process at the second."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, in the background of a script
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C in this block, end the verb with one line: the result of `kept`, which describes what was stored."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        raise typer.Exit(INTERRUPTED) from None


def left_of(out: Path, done: str) -> str:
    """Describe what an interrupted trace has stored and how to resume; `done` is a participle such as recorded."""
    partial = out.with_name(f"{out.name}.partial")
    if not partial.exists():
        return f"nothing was {done}"
    return f"{done} requests are kept in {partial}; run the same command with --resume to continue"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C or SIGTERM. A second signal raises KeyboardInterrupt."""
    interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        interrupted = True
        say("stopping: finishing replays in flight; press Ctrl-C again to end at once")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: Any) -> NoReturn:
    """End the process even while a thread compiles, which cannot be interrupted."""
    logging.getLogger("asyncio").disabled = True  # it reports reads of zarr that an interrupt abandoned
    if threading.active_count() > 1:
        from moereplay.simulator.threads import end_all

        sys.unraisablehook = lambda unraisable: None  # a thread may be ended inside a callback of the compiler
        if not end_all(SECONDS_TO_END):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)
