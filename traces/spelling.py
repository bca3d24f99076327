"""Names as users type them: what a line that refuses an unknown name says of the known ones. Imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def whole(text: str) -> int | None:
    """A whole number of at most 18 digits, which int64 holds, as typed; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever its case; None if none is near."""
    by_spelling = {_folded(each): each for each in known}
    near = get_close_matches(_folded(name), by_spelling, n=1)
    return by_spelling[near[0]] if near else None


def hint(name: str, known: Iterable[str], otherwise: str = "choose from") -> str:
    """The nearest known name as a question; if none is near, `otherwise` and all of them, the nearest first."""
    known = list(known)
    near = nearest(name, known)
    if near:
        return f"did you mean {near}?"
    likeness = {each: SequenceMatcher(None, _folded(name), _folded(each)).ratio() for each in known}
    return f"{otherwise} {', '.join(sorted(known, key=lambda each: -likeness[each]))}"


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")
