"""Output of a verb: results on stdout, remarks and progress on stderr, so that results can be piped."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
