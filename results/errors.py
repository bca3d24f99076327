"""The error of this package."""

from __future__ import annotations

from collections.abc import Collection

from moereplay.traces.texts import hint


class ResultError(Exception):
    """Results cannot be read or drawn; the message names the cause and the fix."""


def unknown(kind: str, name: str, known: Collection[str]) -> ResultError:
    """Return the error for an unknown name, suggesting the nearest one."""
    return ResultError(f"unknown {kind} {name!r}: {hint(name, known)}")
