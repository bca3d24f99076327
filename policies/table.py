"""The catalogue as rows of text, for the command line and the documents."""

from __future__ import annotations

from policies import catalogue
from policies.contract import Parameter, Policy


def rows() -> list[dict[str, str]]:
    """One row per policy: kind, name with parameters, what it needs by default, summary."""
    return [
        {"kind": policy.kind, "policy": signature(policy), "needs": needs(policy), "what": policy.summary}
        for policy in catalogue()
    ]


def signature(policy: Policy) -> str:
    """The spelling with every parameter at its default."""
    return ":".join([policy.name, *(f"{param.name}={default(param)}" for param in policy.params)])


def needs(policy: Policy) -> str:
    """Capabilities that the trace must have under the default parameters."""
    defaults = {param.name: param.default for param in policy.params}
    return ", ".join(sorted(policy.needs(defaults))) or "ids"


def default(param: Parameter) -> str:
    """A parameter's default as one types it."""
    if isinstance(param.default, tuple):
        return "/".join(f"{value:g}" for value in param.default)
    return param.default if isinstance(param.default, str) else f"{param.default:g}"


def explain(policy: Policy) -> list[tuple[str, str]]:
    """(heading, text) pairs on one policy."""
    ranges = [(f"  {param.name}", f"{param.allowed} (default {default(param)})") for param in policy.params]
    return [
        ("policy", f"{policy.kind} {policy.name}"),
        ("what", policy.summary),
        ("source", policy.source),
        ("needs", needs(policy)),
        ("write", signature(policy)),
        *ranges,
    ]
