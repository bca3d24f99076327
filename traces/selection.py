"""Choose requests of a trace: by a list, evenly spaced, at random, split in two, or the first ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from moereplay.traces.profiles.contract import ranked
from moereplay.traces.schema import Request, Trace, TraceError, memory_trace, shown
from moereplay.traces.summary import uses

FORM = "use numbers and ranges such as 1,5,10:50; the first request is 0, and 10:50 ends with 49"


def listed(text: str, requests: int) -> list[int]:
    """Return the requests that `10:50`, `1,5,9` or `0:10,40` lists, in this order, for a trace of `requests`.

    Raises TraceError for an invalid list, and for a request that is beyond the trace or listed twice.
    """
    found: list[int] = []
    for part in text.split(","):
        found += _range(part.strip(), text, requests)
    if len(set(found)) < len(found):
        twice = next(at for at, number in enumerate(found) if number in set(found[:at]))
        raise TraceError(f"invalid --requests {shown(text)}: it lists request {found[twice]} twice; list each once")
    return found


def _range(part: str, text: str, requests: int) -> range:
    first, colon, last = part.partition(":")
    begin = _number(first or ("0" if colon else ""), text)
    end = (_number(last, text) if last else requests) if colon else begin + 1
    if not begin < end <= requests:
        raise TraceError(f"invalid --requests {shown(part)}: the trace has requests 0 to {requests - 1}; {FORM}")
    return range(begin, end)


def _number(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise TraceError(f"invalid --requests {shown(text)}: expected a list of requests; {FORM}")
    return int(digits)


def spaced(count: int, requests: int) -> list[int]:
    """Return `count` evenly spaced requests, beginning with the first. Raises TraceError if there are fewer."""
    _check(count, requests)
    return [at * requests // count for at in range(count)]


def drawn(count: int, requests: int, seed: int) -> list[int]:
    """Return `count` requests drawn at random, in the trace's order. Raises TraceError if there are fewer."""
    _check(count, requests)
    return sorted(random.Random(seed).sample(range(requests), count))


def _check(count: int, requests: int) -> None:
    if not 1 <= count <= requests:
        raise TraceError(f"invalid --requests {count}: expected 1 to {requests}, the requests of the trace")


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of consecutive numbers, which can be read together."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield members[0], members[-1] + 1


def accesses_of(trace: Trace) -> int:
    """Return how many experts all tokens choose in all layers."""
    return trace.tokens * trace.geometry.layers * trace.geometry.k


def sampled(trace: Trace, accesses: int) -> Trace:
    """Return every n-th request in memory, with at most about `accesses` accesses, but at least one request.

    A trace with no more accesses, or with one request, is returned unchanged.
    """
    step = min(-(-accesses_of(trace) // accesses), trace.requests)
    if step <= 1:
        return trace
    requests = [trace.request(at) for at in range(0, trace.requests, step)]
    return memory_trace(trace.header, requests, trace.router_bias)


LEAST = 2  #: fewest requests of a shortened trace, if it has them


def shortened(trace: Trace, accesses: int, least: int = LEAST) -> Trace:
    """Return requests in memory as `sampled` does, shortened if even `least` of them have more accesses.

    A shortened request keeps the end of its prompt, as half of its tokens or as many as too few decoded tokens leave,
    and its first decoded tokens.
    """
    step = min(-(-accesses_of(trace) // accesses), max(1, trace.requests // least))
    numbers = range(0, trace.requests, step)
    most = max(2, accesses // (len(numbers) * trace.geometry.layers * trace.geometry.k))
    lengths = [int(trace.request_offsets[at + 1] - trace.request_offsets[at]) for at in numbers]
    if step == 1 and max(lengths) <= most:
        return trace
    return memory_trace(trace.header, [_cut(trace, at, most) for at in numbers], trace.router_bias)


def _cut(trace: Trace, number: int, most: int) -> Request:
    begin, end = (int(offset) for offset in trace.request_offsets[number : number + 2])
    prompt = int(trace.prompt_lengths[number])
    skipped = max(0, min(prompt - most // 2, end - begin - most))
    first, last = begin + skipped, min(end, begin + skipped + most)
    return trace.cut(first, last, min(prompt - skipped, last - first))


def split(requests: int, share: float = 0.5, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the requests to fit on, a random share, and the others to test on, both in the trace's order.

    Raises TraceError if either would be empty.
    """
    if not 0 < share < 1 or requests < 2:
        raise TraceError(
            f"invalid --share {share:g} for {requests} requests: expected a share between 0 and 1, and two requests"
        )
    count = min(max(round(share * requests), 1), requests - 1)
    fitted = set(random.Random(seed).sample(range(requests), count))
    return sorted(fitted), [at for at in range(requests) if at not in fitted]


def profile(trace: Trace) -> list[tuple[int, int]]:
    """Return (layer, expert) of all experts that the trace chose, the most frequent first, ties by layer and expert."""
    return ranked(uses(trace))


def first_requests(trace: Trace, requests: int) -> Trace:
    """Return the trace cut after `requests` requests; it reads the same store and has its own digest."""
    if requests >= trace.requests:
        return trace
    digest = hashlib.sha256(f"{trace.digest} requests 0..{requests - 1}".encode()).hexdigest()
    last = int(trace.request_offsets[requests])
    return replace(
        trace,
        request_offsets=trace.request_offsets[: requests + 1],
        prompt_lengths=trace.prompt_lengths[:requests],
        digest=digest,
        array_digests={},
        rejects=trace.verified.span(0, last)[1].stop if trace.verified else 0,
    )
