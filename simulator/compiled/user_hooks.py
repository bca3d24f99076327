"""Hooks that do not compile: what Numba says of them is one line."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType

from moereplay.policies.contract import Policy, PolicyError
from moereplay.policies.files import complaint

#: Where colorama is installed, Numba colours what it says, whoever reads it.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Each attempt's report begins with one, that on a function which the hook calls inside that on the hook.
STAGE = re.compile(r"\(step: [^)]*\)")
#: Why the implementation that was meant is none for these types.
SPECIFIC = re.compile(r"raised a specific error:\s*\w+: (.*)")
#: A place at the end of a reason, which the error names itself.
PLACE = re.compile(r"[.,]* *(defined at|Raised from) .*")


def refusal(policy: Policy, hook: str, given: FunctionType, said: str) -> PolicyError:
    """The error, at the innermost line of a user's own file, and how to run the hook nevertheless."""
    said = COLOUR.sub("", said)
    name = re.escape(Path(given.__code__.co_filename).name)  # numba spells the folder in its own way
    place = re.search(rf'{name}(?:", line | \()(\d+)', said)
    reason = _reason(said[: place.end()] if place else said)
    if policy.reads is not None:
        reason += f"; it may read {', '.join(sorted(policy.reads)) or 'none'} of what reads may name"
    what = f"hook {hook} does not compile ({reason}); replay it with --engine reference"
    if policy.version:
        return complaint(given, what, int(place[1]) if place else 0)
    return PolicyError(f"{policy.kind} {policy.name}: {what}")


def _reason(said: str) -> str:
    """What a rule of ours or Numba's own says of it, or else the first line of the innermost report."""
    innermost = STAGE.split(said)[-1]
    lines = (PLACE.sub("", line).strip(" :") for line in (*SPECIFIC.findall(innermost), *innermost.splitlines()))
    return next(filter(None, lines), "Numba does not say why")
