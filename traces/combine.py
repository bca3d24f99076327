"""Combine traces: merge several, copy some requests of one, append to one, in constant memory.

Rows are copied in pieces (`traces/pieces.py`) and checked as they are read. Readers see only committed
requests. A damaged source ends the run, and the unfinished output is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.traces.documents import canonical_digest
from moereplay.traces.pieces import Piece, pieces, same_bias
from moereplay.traces.schema import LOOKAHEAD, Header, Provenance, Trace, TraceError, shown
from moereplay.traces.selection import runs
from moereplay.traces.store import open_trace
from moereplay.traces.stored import BIAS
from moereplay.traces.summary import synthetic_parts
from moereplay.traces.texts import counted
from moereplay.traces.writer import TraceWriter, begun


class Part(NamedTuple):
    """Requests [first, last) of a source trace."""

    trace: Trace
    first: int
    last: int


def merged(out: str | Path, traces: Sequence[Trace], resume: bool = False) -> tuple[Trace, list[str]]:
    """Write all requests of all traces to `out`; return the trace and, in words, the arrays that were left out.

    Raises TraceError if the traces are of different models, one is damaged, `out` exists or cannot be written.
    """
    shared = joined(traces)
    parts = [Part(trace, 0, trace.requests) for trace in traces]
    with begun(out, shared.header, traces[0].router_bias, resume) as writer:
        _copy(parts, shared.names, writer)
        return writer.finish(), shared.left_out


def taken(out: str | Path, trace: Trace, requests: Sequence[int], said: str, resume: bool = False) -> Trace:
    """Write the given requests of a trace to `out`; `said` describes them in a header note. Raises TraceError."""
    parts = [Part(trace, first, last) for first, last in runs(requests)]
    with begun(out, _noted(trace, said), trace.router_bias, resume) as writer:
        _copy(parts, sorted(trace.arrays), writer)
        return writer.finish()


def appended(path: str | Path, traces: Sequence[Trace]) -> tuple[Trace, list[str]]:
    """Append all requests of the traces to the finished trace at `path`. Returns the same values as `merged`.

    Raises TraceError, without changing the trace, if one of them is damaged or of another model, or a write fails.
    """
    grown = open_trace(path)
    shared = joined([grown, *traces])
    _refuse_lost(grown, shared)
    parts = [Part(trace, 0, trace.requests) for trace in traces]
    with TraceWriter.reopen(path, shared.header, grown.digest) as writer:
        _copy(parts, shared.names, writer)
        return writer.finish(), shared.left_out


def content_digest(trace: Trace) -> str:
    """Return the sha256 over geometry, look-ahead and every array's sha256: equal however the trace was assembled."""
    header = trace.header.model_dump(mode="json", exclude={"provenance"})
    return canonical_digest([header, dict(trace.array_digests)])


def _copy(parts: Sequence[Part], names: Sequence[str], writer: TraceWriter) -> None:
    """Append the parts, but for the requests that an unfinished store already holds."""
    for piece in _read(parts, names, 0 if writer.grows_in_place else writer.requests_done, writer):
        writer.append_piece(piece)


def _read(parts: Sequence[Part], names: Sequence[str], done: int, writer: TraceWriter) -> Iterator[Piece]:
    try:
        for trace, first, last in parts:
            skipped = min(done, last - first)
            done -= skipped
            yield from pieces(trace, first + skipped, last, names)
    except TraceError:  # a source is damaged; errors of the writer are not raised inside this generator
        writer.discard()
        raise


def _noted(trace: Trace, said: str) -> Header:
    """Return the header of a part; the importer shows that it is only a part of a merged trace."""
    provenance = trace.header.provenance
    importer = f"part of a {MERGED}" if provenance.importer == MERGED else provenance.importer
    notes = (*provenance.notes, f"{said} of {trace.digest}")
    made = provenance.model_copy(update={"importer": importer, "notes": notes})
    return trace.header.model_copy(update={"provenance": made})


def _refuse_lost(grown: Trace, shared: Joined) -> None:
    """Raise TraceError if the finished trace would lose an array."""
    lost = [text for text in shared.left_out if text.split(",")[0] in grown.arrays]
    if lost:
        raise TraceError(
            f"{grown.path} has {lost[0]}; use `moereplay traces merge`, which keeps the arrays that all traces have"
        )


# -- The header of a merged trace lists the digest of every source. A source that was merged counts as its own sources,
# so merging in steps, merging at once and appending give the same header.

MERGED = "merge"
PART = "part "  #: prefix of a note that names a source


class Joined(NamedTuple):
    """Header and arrays of a trace that holds the requests of several."""

    header: Header
    names: list[str]  #: token arrays that all have
    left_out: list[str]  #: arrays that only some have, each with the first trace that lacks it, in words


def joined(traces: Sequence[Trace]) -> Joined:
    """Return header and arrays of the merged trace. Raises TraceError naming the first trace of another model."""
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
    """Return the fields that are equal in all traces, with the notes of all and then a line for every source."""
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
    """Return the notes that name the sources of a merged trace, or a note on the trace itself."""
    provenance = trace.header.provenance
    parts = [note for note in provenance.notes if _is_part(trace, note)]
    size = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    return parts or [f"{PART}{trace.digest}: {size} of {provenance.model}, {provenance.source}"]


def _is_part(trace: Trace, note: str) -> bool:
    return trace.header.provenance.importer == MERGED and note.startswith(PART)


def _alike(value: Any) -> str:
    """Return a value, or the one that all layers have."""
    same = isinstance(value, list) and len(value) > 1 and len(set(value)) == 1
    return f"{shown(value[0])} in every layer" if same else shown(value)


def _refuse_other_model(first: Trace, trace: Trace) -> None:
    ours, theirs = (each.geometry.model_dump(mode="json") for each in (first, trace))
    if ours != theirs:
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        values = f"geometry.{name} is {_alike(theirs.get(name))}, that of {first.path} is {_alike(ours.get(name))}"
        raise TraceError(f"{trace.path}: {values}: expected traces of one model at one precision")
    if not same_bias(first.router_bias, trace.router_bias):
        raise TraceError(f"{trace.path}: {BIAS} differs from that of {first.path}: expected traces of one model")


def _depth(traces: Sequence[Trace]) -> int:
    """Return the look-ahead depth that all traces have, 0 if they computed it from different inputs."""
    alike = len({trace.header.lookahead_input for trace in traces if trace.header.lookahead_depth}) == 1
    return min(trace.header.lookahead_depth for trace in traces) if alike else 0


def _has(trace: Trace, name: str, depth: int) -> bool:
    return name in trace.arrays and not (name.startswith(LOOKAHEAD) and int(name.removeprefix(LOOKAHEAD)) > depth)


def _lacking(traces: Sequence[Trace], name: str) -> str:
    """Return the first trace that lacks an array, or has look-ahead from another input."""
    for trace in traces:
        if name not in trace.arrays:
            return str(trace.path)
    other = next(trace for trace in traces if trace.header.lookahead_input != traces[0].header.lookahead_input)
    return f"{other.path} ({other.header.lookahead_input})"
