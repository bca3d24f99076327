"""Cells of a file, as people and programs write them: a number, or a list of numbers."""

from __future__ import annotations

import math
import re
from typing import Any

SEPARATORS = re.compile(r"[\s,;|]+")
BRACKETS = ("[]", "()", "{}")
DIGITS = 18  #: of a whole number, which int64 holds
PLAIN = re.compile(rf"\d{{1,{DIGITS}}}(?: \d{{1,{DIGITS}}})*", re.ASCII)


def number(cell: Any) -> float | None:
    """Return a finite number, as int if it is an integer; None for anything else, including true and false."""
    if isinstance(cell, str):
        if len(cell) <= DIGITS and cell.isascii() and cell.isdigit():
            return int(cell)
        cell = _read(cell.strip())
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not math.isfinite(cell):
        return None
    if cell != int(cell):
        return float(cell)
    return int(cell) if abs(cell) < 10**DIGITS else None


def whole(cell: Any) -> int | None:
    """Return an integer, which may be written as 5.0; None for anything else."""
    found = number(cell)
    return found if isinstance(found, int) else None


def numbers(cell: Any) -> list[float] | None:
    """Return the numbers of a list `[3, 17]`, `3 17` or `3;17`, or a single number; None for anything else."""
    if isinstance(cell, str) and PLAIN.fullmatch(cell):  # what nearly every file has
        return [int(each) for each in cell.split(" ")]
    found = [number(each) for each in _parts(cell)]
    return None if None in found else [each for each in found if each is not None]


def _parts(cell: Any) -> list[Any]:
    if isinstance(cell, list):
        return cell
    if not isinstance(cell, str):
        return [cell]
    text = cell.strip()
    if text[:1] + text[-1:] in BRACKETS:
        text = text[1:-1].strip()
    return SEPARATORS.split(text)


def _read(text: str) -> float | None:
    if len(text) > 2 * DIGITS or "_" in text or not text.isascii():
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None
