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


def show(*parts: Any) -> None:
    """Text and tables on stdout, as wide as the terminal."""
    from analysis.tables import console

    out = console()
    for part in parts:
        out.print(part)
