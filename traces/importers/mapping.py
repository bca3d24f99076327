"""Find a file's columns of request, token, layer, experts, weights and phase: as passed, or by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from moereplay.traces.schema import TraceError, shown
from moereplay.traces.texts import hint

NEEDED = ("token", "layer", "experts")
FIELDS = ("request", *NEEDED, "weights", "phase")
LISTS = {"experts": "expert", "weights": "weight"}  #: fields of several numbers, and what one of them is called
COUNTS = "counts"  #: no field of a trace: whose counts of an archive become a profile
FORM = "token=NAME,layer=NAME,experts=NAME[,request=NAME,weights=NAME,phase=NAME]"

#: The columns of each field, by the names that the file has for them.
Columns = dict[str, tuple[str, ...]]


def named(text: str) -> Columns:
    """Return columns as typed: `token=pos,experts=e0+e1`, a list in several columns with +. Raises TraceError."""
    found: Columns = {}
    for part in text.split(","):
        field, _, names = part.partition("=")
        field = field.strip()
        if field not in (*FIELDS, COUNTS):
            raise TraceError(
                f"--columns {shown(part)}: unknown field {shown(field)!r}, {hint(field, FIELDS)}; expected {FORM}"
            )
        columns = tuple(name.strip() for name in names.split("+"))
        if not all(columns) or field in found or (len(columns) > 1 and field not in LISTS):
            raise TraceError(f"--columns {shown(part)}: expected one name for {field}, given once, as in {FORM}")
        found[field] = columns
    return found


def where(text: str) -> tuple[str, str]:
    """Return a column and its value as typed: `event_type=routing`. Raises TraceError."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise TraceError(f"invalid --where {shown(text)!r}: expected KEY=VALUE, such as event_type=routing")
    return key, value


def chosen(file: Path, found: tuple[str, ...], asked: Mapping[str, tuple[str, ...]]) -> Columns:
    """Return the columns of each field that the file has. Raises TraceError for one that was named, or is needed."""
    mapped: Columns = {field: asked.get(field) or _by_name(field, found) for field in FIELDS}
    for field, names in mapped.items():
        if missing := [name for name in names if name not in found]:
            fix = f"found {shown(', '.join(found), 200)}; correct --columns {field}="
            raise TraceError(f"{file}: missing column {shown(missing[0])}: {fix}")
        if not names and field in NEEDED:
            fix = f"found {shown(', '.join(found), 200)}; pass --columns {field}=NAME"
            raise TraceError(f"{file}: missing column {field}: {fix}")
    return {field: names for field, names in mapped.items() if names}


def _by_name(field: str, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the column of the field's name; else expert_0, expert_1, ... in the order of their numbers."""
    if field in found or field not in LISTS:
        return (field,) if field in found else ()
    numbers = [int(each[1]) for name in found if (each := re.fullmatch(rf"{LISTS[field]}_([0-9]{{1,5}})", name))]
    return tuple(f"{LISTS[field]}_{number}" for number in sorted(numbers))


def words(columns: Columns) -> list[str]:
    """Describe the columns whose names differ from their fields'."""
    others = {field: names for field, names in columns.items() if names != (field,)}
    return [_words(field, names) for field, names in others.items()]


def _words(field: str, names: tuple[str, ...]) -> str:
    first, *_, last = (*names, *names)
    if first != last:
        return f"columns {shown(first)} to {shown(last)} hold the {field}"
    return f"column {shown(first)} {'has' if field in LISTS else 'is'} the {field}"
