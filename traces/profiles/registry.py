"""Which form a file of counts has: the one that is named, or the first that recognises it."""

from __future__ import annotations

import importlib
from pathlib import Path

from moereplay.traces.importers.sources import refuse_unreadable
from moereplay.traces.profiles import NAMES
from moereplay.traces.profiles.contract import Form


def load(name: str) -> Form:
    """The form of that name, which is in `NAMES`."""
    return importlib.import_module(f"moereplay.traces.profiles.{name}").FORM


def detect(path: Path, named: str | None = None) -> Form | None:
    """The form that is named, or the first that recognises the file; None if it holds no counts that are known.

    Raises TraceError if nothing can be read.
    """
    refuse_unreadable(path)
    if named:
        return load(named) if named in NAMES else None
    return next((form for form in map(load, NAMES) if form.sniff(path)), None)


def markdown() -> str:
    """The Markdown table of forms in docs/trace-format.md."""
    rows = [f"| `{each.name}` | {each.summary} | {each.formats} |" for each in map(load, NAMES)]
    return "\n".join(["| format | what | read from |", "|---|---|---|", *rows])
