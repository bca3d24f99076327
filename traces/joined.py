"""What several traces have in common, and the header of a trace that is made of all of them.

It lists the digest of every one. A trace that was merged counts as the ones it was made of, so that merging in steps,
at once, or by appending gives the same header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moereplay.traces.bias import same_bias
from moereplay.traces.metadata import BIAS
from moereplay.traces.schema import LOOKAHEAD, Header, Provenance, Trace, TraceError, shown
from moereplay.traces.synthetic import synthetic_parts

MERGED = "merge"
PART = "part "  #: how a note begins that names a source


class Joined(NamedTuple):
    """What a trace of all requests has."""

    header: Header
    names: list[str]  #: of token arrays
    left_out: list[str]  #: what only some have, each with the first that lacks it, in words


def joined(traces: Sequence[Trace]) -> Joined:
    """Raises TraceError naming the first trace that is of another model, and in what it differs."""
    for trace in traces[1:]:
        _refuse_other_model(traces[0], trace)
    depth = _depth(traces)
    wanted = {name for trace in traces for name in trace.arrays}
    names = [name for name in sorted(wanted) if all(_has(trace, name, depth) for trace in traces)]
    left_out = [f"{name}, which {_lacking(traces, name)} lacks" for name in sorted(wanted - set(names))]
    first = traces[0].header
    header = first.model_copy(update={"provenance": provenance_of(traces), "lookahead_depth": depth})
    if not depth:
        header = header.model_copy(update={"lookahead_input": Header.model_fields["lookahead_input"].default})
    return Joined(header, names, left_out)


def provenance_of(traces: Sequence[Trace]) -> Provenance:
    """What all say alike is kept; notes are those of all, then a line for every source."""
    provenances = [trace.header.provenance for trace in traces]
    each = [one.model_dump(exclude={"synthetic"}) for one in provenances]
    alike = {name: value for name, value in each[0].items() if all(other[name] == value for other in each)}
    notes = [note for trace in traces for note in trace.header.provenance.notes if not _is_part(trace, note)]
    parts = [part for trace in traces for part in _parts(trace)]
    made = {
        "importer": MERGED,
        "source": f"{len(parts)} traces",
        "source_sha256": "",
        "synthetic": synthetic_parts(provenances),
    }
    return Provenance.model_validate(alike | made | {"notes": (*dict.fromkeys(notes), *parts)})


def _parts(trace: Trace) -> list[str]:
    """Lines of what a trace was merged of, or of itself."""
    provenance = trace.header.provenance
    parts = [note for note in provenance.notes if _is_part(trace, note)]
    size = f"{trace.requests} requests, {trace.tokens} tokens"
    return parts or [f"{PART}{trace.digest}: {size} of {provenance.model}, {provenance.source}"]


def _is_part(trace: Trace, note: str) -> bool:
    return trace.header.provenance.importer == MERGED and note.startswith(PART)


def _refuse_other_model(first: Trace, trace: Trace) -> None:
    ours, theirs = (each.geometry.model_dump(mode="json") for each in (first, trace))
    if ours != theirs:
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        said = f"geometry.{name} is {shown(theirs.get(name))}, that of {first.path} is {shown(ours.get(name))}"
        raise TraceError(f"{trace.path}: {said}; give traces of one model, stored alike")
    if not same_bias(first.router_bias, trace.router_bias):
        raise TraceError(f"{trace.path}: {BIAS} is not that of {first.path}; give traces of one model")


def _depth(traces: Sequence[Trace]) -> int:
    """Look-ahead that all have, seen alike."""
    alike = len({trace.header.lookahead_input for trace in traces if trace.header.lookahead_depth}) == 1
    return min(trace.header.lookahead_depth for trace in traces) if alike else 0


def _has(trace: Trace, name: str, depth: int) -> bool:
    return name in trace.arrays and not (name.startswith(LOOKAHEAD) and int(name.removeprefix(LOOKAHEAD)) > depth)


def _lacking(traces: Sequence[Trace], name: str) -> str:
    """The first trace without an array, or whose look-ahead is of another kind."""
    for trace in traces:
        if name not in trace.arrays:
            return str(trace.path)
    other = next(trace for trace in traces if trace.header.lookahead_input != traces[0].header.lookahead_input)
    return f"{other.path} ({other.header.lookahead_input})"
