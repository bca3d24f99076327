"""What a verb says: answers on stdout, remarks and progress on stderr, so that answers can be piped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.schema import Trace


def say(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr)


def say_wrote(path: Path, trace: Trace) -> None:
    """Where a trace is, how much is in it, and its name in results."""
    say(f"wrote {path}: {trace.requests:,} requests, {trace.tokens:,} tokens, digest {trace.digest[:12]}")


def say_if_compiling(engine: str) -> None:
    """A line if nothing has left the engine's machine code on disk yet, so that the wait has a reason."""
    from simulator.replay import is_ready

    if not is_ready(engine):
        say("compiling the replay engine (about a minute, once)")


def show(*parts: Any) -> None:
    """Text and tables on stdout, as wide as the terminal."""
    from analysis.tables import console

    out = console()
    for part in parts:
        out.print(part)
