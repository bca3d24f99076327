"""The error of this package, and the check for it whether an output can be written, before a long computation."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from moereplay.traces.files import refuse_inside_trace
from moereplay.traces.texts import hint


class ResultError(Exception):
    """Results cannot be read or drawn; the message names the cause and the fix."""


def unknown(kind: str, name: str, known: Collection[str]) -> ResultError:
    """Return the error for an unknown name, suggesting the nearest one."""
    return ResultError(f"unknown {kind} {name!r}: {hint(name, known)}")


def check_output(path: Path) -> None:
    """Raise ResultError if this file or its parent folders cannot be created; create nothing."""
    if path.parts[:1] == ("-",):
        raise ResultError("cannot write to standard output (-): the output has several files; pass a file or a folder")
    try:
        refuse_inside_trace(path)
    except OSError as refused:
        raise ResultError(f"cannot write {path}: {refused.strerror}; choose another folder") from None
    if path.is_dir():
        raise ResultError(f"cannot write {path}: it is a folder; choose another name")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise ResultError(f"cannot write {path}: {nearest} is not a folder; choose another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ResultError(f"cannot write {path}: no permission to write into {nearest}; choose another folder")
