"""The catalogue as rows of text, for the command line and the documents."""

from __future__ import annotations

import re

from moereplay.policies import catalogue
from moereplay.policies.contract import Choice, Number, Parameter, Policy
from moereplay.policies.files import documentation


def rows() -> list[dict[str, str]]:
    """Return one row per policy: kind, name, parameters with default and range, needs, summary, source."""
    return [
        {
            "kind": policy.kind,
            "policy": policy.label,
            "parameters": ", ".join(map(range_of, policy.params)),
            "needs": needs(policy),
            "what": policy.summary,
            "source": policy.source,
        }
        for policy in catalogue()
    ]


def markdown() -> str:
    """Return the rows as the table of docs/policies-table.md."""
    table = rows()
    body = [[cell.replace("|", "\\|") for cell in row.values()] for row in table]
    rule = "|---" * len(table[0]) + "|"
    head, *lines = (f"| {' | '.join(cells)} |" for cells in [list(table[0]), *body])
    return "\n".join([head, rule, *lines])


def range_of(param: Parameter) -> str:
    """Return a parameter with its default and, in brackets, its allowed values."""
    return f"{param.name}={default(param)} ({allowed(param)})"


def allowed(param: Parameter) -> str:
    """Return a parameter's allowed values in short: options, or the ends of a range."""
    if isinstance(param, Choice):
        return "/".join(param.options)
    ends = f"{param.low:g} to {param.high:g}"
    if isinstance(param, Number):
        return f"integer {ends}" if param.integer else ends
    return f"up to {param.width - 1} of {ends}"


def signature(policy: Policy) -> str:
    """Return the spelling with every parameter at its default."""
    return ":".join([policy.name, *(f"{param.name}={default(param)}" for param in policy.params)])


def needs(policy: Policy) -> str:
    """Return the capabilities that the trace must have under the default parameters."""
    defaults = {param.name: param.default for param in policy.params}
    return ", ".join(sorted(policy.needs(defaults))) or "ids"


def other_needs(policy: Policy) -> list[tuple[str, str]]:
    """Return (option, needs) of each option that changes the needs, other parameters at their defaults."""
    found = []
    for param in policy.params:
        for option in param.options if isinstance(param, Choice) else ():
            given = {each.name: each.default for each in policy.params} | {param.name: option}
            needed = ", ".join(sorted(policy.needs(given))) or "ids"
            found += [(f"{param.name}={option}", needed)] if needed != needs(policy) else []
    return found


def default(param: Parameter) -> str:
    """Return a parameter's default as a user types it."""
    if isinstance(param.default, tuple):
        return "/".join(f"{value:g}" for value in param.default)
    return param.default if isinstance(param.default, str) else f"{param.default:g}"


def _paragraphs(text: str) -> list[str]:
    """Join each paragraph into one line; an indented line or a list item stays separate."""
    parts = [part for block in re.split(r"\n\s*\n", text) for part in (*re.split(r"\n(?=[ *-])", block), "")]
    return [" ".join(part.split()) for part in parts[:-1]]


def explain(policy: Policy) -> list[tuple[str, str]]:
    """Return (heading, text) pairs on one policy."""
    ranges = [(f"  {param.name}", f"{param.allowed} (default {default(param)})") for param in policy.params]
    return [
        ("policy", f"{policy.kind} {policy.label}"),
        ("what", policy.summary),
        ("source", policy.source),
        ("needs", needs(policy)),
        *((f"  {option}", needed) for option, needed in other_needs(policy)),
        ("write", f"--{policy.kind} {signature(policy)}"),
        *ranges,
        *(("" if at else "notes", text) for at, text in enumerate(_paragraphs(documentation(policy)))),
    ]
