"""Some requests of a trace, evenly spaced, for what must be quick and is checked on all of them afterwards."""

from __future__ import annotations

from moereplay.traces.schema import Trace, memory_trace


def accesses_of(trace: Trace) -> int:
    """Experts that all tokens choose in all layers."""
    return trace.tokens * trace.geometry.layers * trace.geometry.k


def sampled(trace: Trace, accesses: int) -> Trace:
    """Every n-th request, held in memory, with about so many accesses or fewer, but at least one request.

    The trace itself if it has no more than that, or one request only.
    """
    step = min(-(-accesses_of(trace) // accesses), trace.requests)
    if step <= 1:
        return trace
    requests = [trace.request(at) for at in range(0, trace.requests, step)]
    return memory_trace(trace.header, requests, trace.router_bias)
