"""Output of a verb: results on stdout, remarks and progress on stderr, so that results can be piped."""

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
    from moereplay.analysis.figures import Drawn
    from moereplay.traces.schema import Trace


#: A file of this name is standard output, where a verb writes one text.
STDOUT = Path("-")


def say(line: str) -> None:
    """Print a remark to stderr, as stdout is for results: folded on a terminal, or to COLUMNS; else one line."""
    from moereplay.analysis.tables import folded, width_of
    from moereplay.traces.texts import escaped_lines

    folds = sys.stderr.isatty() or "COLUMNS" in os.environ
    lines = escaped_lines(line)
    print(folded(lines, width_of(sys.stderr)) if folds else lines, file=sys.stderr)


def show_json(document: object) -> None:
    """Print one JSON document to stdout."""
    from moereplay.traces.documents import json_text

    print(json_text(document, indent=1))


def rewrite(line: str, before: int = 0) -> int:
    """Write a line over the one on stderr's terminal, cut to its width; `before` and the answer are how long it is."""
    from moereplay.analysis.tables import width_of
    from moereplay.traces.texts import escaped

    cut = escaped(line)[: width_of(sys.stderr) - 1]  # a full line would scroll
    print(f"\r{cut:{min(before, width_of(sys.stderr) - 1)}}", end="", file=sys.stderr, flush=True)
    return len(cut)


def mute() -> None:
    """Discard what is still to be written on stdout: its reader is gone, or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, rounded to whole ones."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def say_wrote(path: Path, trace: Trace) -> None:
    """Path, size and digest of a trace that was written."""
    from moereplay.analysis.tables import counted

    size = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    say(f"wrote {path}: {size}, digest {trace.digest[:12]}")


def say_made(path: Path, trace: Trace) -> None:
    """The same of a trace that was made of others, and the digest of its content, which they may share."""
    from moereplay.traces.combine import content_digest

    say_wrote(path, trace)
    say(f"content {content_digest(trace)[:12]}: the same for these requests, however they came together")


class _Saying(logging.Handler):
    """Prints the engine's log messages on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_when_compiling() -> None:
    """Print a line whenever the engine compiles something that is not in its cache, to explain the wait."""
    log = logging.getLogger("moereplay.simulator.compiled.engine")
    log.setLevel(logging.INFO)
    log.handlers = [_Saying()]


def show(*parts: str) -> None:
    """Lines and tables on stdout; lines that are wider than it are folded."""
    from moereplay.analysis.tables import folded
    from moereplay.traces.texts import escaped

    for line in (line for part in parts for line in part.split("\n")):
        print(folded(escaped(line)))


# -- Ctrl-C: the first ends the command with one line of text, the second ends the process at once.

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


def say_left_out(drawn: Drawn) -> None:
    """Print one line per reason for leaving figures out, with their names."""
    for why in dict.fromkeys(drawn.left_out.values()):
        say(f"left out: {', '.join(name for name, said in drawn.left_out.items() if said == why)}: {why}")
