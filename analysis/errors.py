"""The one error of this room."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class AnalysisError(Exception):
    """Results cannot be read or drawn as asked; the message names the thing and the fix."""


def unknown(kind: str, name: str, known: Collection[str]) -> AnalysisError:
    """The refusal of a name, suggesting the nearest one."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return AnalysisError(f"no {kind} called {name!r}: {hint}")
