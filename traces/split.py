"""Requests of a trace in two: those that something is fitted to, and the others, on which it is tried."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

from moereplay.traces.profiles.contract import ranked
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.usage import uses


def split(requests: int, share: float = 0.5, seed: int = 0) -> tuple[list[int], list[int]]:
    """Numbers of the requests to fit to, a share drawn by the seed, and of the others, both in the trace's order.

    Raises TraceError if either would be empty.
    """
    if not 0 < share < 1 or requests < 2:
        raise TraceError(f"{requests} requests at a share of {share:g}: a split needs two, and a share between 0 and 1")
    count = min(max(round(share * requests), 1), requests - 1)
    fitted = set(random.Random(seed).sample(range(requests), count))
    return sorted(fitted), [at for at in range(requests) if at not in fitted]


def profile(trace: Trace) -> list[tuple[int, int]]:
    """(layer, expert) of all that the trace chose, the most often chosen first, ties by layer and expert."""
    return ranked(uses(trace))


def first_requests(trace: Trace, requests: int) -> Trace:
    """The trace cut after so many requests, which reads the same store; its digest, which names derived arrays, is
    its own.
    """
    if requests >= trace.requests:
        return trace
    digest = hashlib.sha256(f"{trace.digest} requests 0..{requests - 1}".encode()).hexdigest()
    return replace(
        trace,
        request_offsets=trace.request_offsets[: requests + 1],
        prompt_lengths=trace.prompt_lengths[:requests],
        digest=digest,
        array_digests={},
    )
