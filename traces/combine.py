"""Traces made of others: several as one, some requests of one, more of one. In memory that no length changes.

Rows are copied a piece at a time (`traces/pieces.py`) and are checked as they are read; the writer's commits decide
what of them is seen. A source that is damaged ends the making, and nothing is left of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moereplay.traces.joined import MERGED, Joined, joined
from moereplay.traces.pieces import Piece, pieces
from moereplay.traces.schema import Header, Trace, TraceError, canonical
from moereplay.traces.selection import runs
from moereplay.traces.store import open_trace
from moereplay.traces.writer import TraceWriter, begun


class Part(NamedTuple):
    """Requests [first, last) of a trace."""

    trace: Trace
    first: int
    last: int


def merged(out: str | Path, traces: Sequence[Trace], resume: bool = False) -> tuple[Trace, list[str]]:
    """All requests of all traces in their order, and what of their arrays was left out, in words.

    Raises TraceError if they are of different models, one is damaged, `out` exists or the disk refuses.
    """
    shared = joined(traces)
    parts = [Part(trace, 0, trace.requests) for trace in traces]
    with begun(out, shared.header, traces[0].router_bias, resume) as writer:
        _copy(parts, shared.names, writer)
        return writer.finish(), shared.left_out


def taken(out: str | Path, trace: Trace, requests: Sequence[int], said: str, resume: bool = False) -> Trace:
    """These requests of a trace; `said`, in words which they are, becomes a note. Raises TraceError."""
    parts = [Part(trace, first, last) for first, last in runs(requests)]
    with begun(out, _noted(trace, said), trace.router_bias, resume) as writer:
        _copy(parts, sorted(trace.arrays), writer)
        return writer.finish()


def appended(path: str | Path, traces: Sequence[Trace]) -> tuple[Trace, list[str]]:
    """Add all requests of the traces to a finished one, as `merged` would, and what of their arrays was left out.

    Raises TraceError, the trace being as it was, if it or one of them is damaged or of another model, or the disk
    refuses.
    """
    grown = open_trace(path)
    shared = joined([grown, *traces])
    _refuse_lost(grown, shared)
    parts = [Part(trace, 0, trace.requests) for trace in traces]
    with TraceWriter.reopen(path, shared.header, grown.digest) as writer:
        _copy(parts, shared.names, writer)
        return writer.finish(), shared.left_out


def content_digest(trace: Trace) -> str:
    """sha256 of what a trace holds, wherever it comes from: equal for the same requests in any packing.

    Over geometry, look-ahead, and the sha256 of every array.
    """
    header = trace.header.model_dump(mode="json", exclude={"provenance"})
    return hashlib.sha256(canonical([header, dict(trace.array_digests)])).hexdigest()


def _copy(parts: Sequence[Part], names: Sequence[str], writer: TraceWriter) -> None:
    """All but the requests that an unfinished store holds already."""
    for piece in _read(parts, names, 0 if writer.grows_in_place else writer.requests_done, writer):
        writer.append_piece(piece)


def _read(parts: Sequence[Part], names: Sequence[str], done: int, writer: TraceWriter) -> Iterator[Piece]:
    try:
        for trace, first, last in parts:
            skipped = min(done, last - first)
            done -= skipped
            yield from pieces(trace, first + skipped, last, names)
    except TraceError:  # of a source: what the writer raises is not raised here
        writer.discard()
        raise


def _noted(trace: Trace, said: str) -> Header:
    """The header of a part. What was merged is no longer all of its sources."""
    provenance = trace.header.provenance
    importer = f"part of a {MERGED}" if provenance.importer == MERGED else provenance.importer
    notes = (*provenance.notes, f"{said} of {trace.digest}")
    made = provenance.model_copy(update={"importer": importer, "notes": notes})
    return trace.header.model_copy(update={"provenance": made})


def _refuse_lost(grown: Trace, shared: Joined) -> None:
    """A finished trace loses no array."""
    lost = [said for said in shared.left_out if said.split(",")[0] in grown.arrays]
    if lost:
        raise TraceError(
            f"{grown.path} has {lost[0]}; `moereplay traces merge` makes a new trace of the arrays that all have"
        )
