"""Pydantic's validation errors as one line: where, what was expected, what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moereplay.traces.spelling import hint
from moereplay.traces.texts import shown

#: By the type of pydantic's error; braces take its context.
EXPECTED = {
    "missing": "it is missing",
    "extra_forbidden": "nothing is called so here; remove it or correct its name",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "finite_number": "expected a finite number",
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected a text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected a table",
    "mapping": "expected a table",
    "model": "expected a table",
    "union_tag_invalid": "kind {tag!r} is unknown: choose from {expected_tags}",
    "union_tag_not_found": "it names no kind",
}
LONGEST = 60  #: characters that are shown of a value


def first_fault(error: ValidationError) -> str:
    """Of a document: the first thing that is wrong with it, after its place in there."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {words(fault)}" if where else words(fault)


def words(fault: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()` without its place: what was expected, and what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "value_error":  # a validator of ours has said it
        return f"{fault['msg'].removeprefix('Value error, ')}{_got(fault)}"
    if kind == "literal_error":
        options = [option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{hint(str(fault['input']), options)}{_got(fault)}"
    said = EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0])
    if said is None:
        return f"{fault['msg']}{_got(fault)}"
    said = said.format(**{name: _shortest(value) for name, value in context.items()})
    return said if kind in ("missing", "extra_forbidden") else f"{said}{_got(fault)}"


def _shortest(value: Any) -> Any:
    """1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _got(fault: Mapping[str, Any]) -> str:
    """The value that was found, cut if it is long; nothing of a whole document."""
    found = fault["input"]
    if not fault["loc"] or isinstance(found, dict):
        return ""
    text = repr(found) if isinstance(found, str) else shown(found, LONGEST + 1)
    return f" (got {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'})"
