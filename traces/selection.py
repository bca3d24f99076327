"""Which requests of a trace: those that a text lists, so many evenly spaced, or so many drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby

from moereplay.traces.schema import TraceError, shown

FORM = "write numbers and ranges as 1,5,10:50; the first request is 0, and 10:50 ends with 49"


def listed(text: str, requests: int) -> list[int]:
    """The requests that `10:50`, `1,5,9` or `0:10,40` names, of so many, as they stand there.

    Raises TraceError for what is no such text, beyond the trace or named twice.
    """
    found: list[int] = []
    for part in text.split(","):
        found += _range(part.strip(), text, requests)
    if len(set(found)) < len(found):
        twice = next(at for at, number in enumerate(found) if number in set(found[:at]))
        raise TraceError(f"--requests {shown(text)} names request {found[twice]} twice; name each once")
    return found


def _range(part: str, text: str, requests: int) -> range:
    first, colon, last = part.partition(":")
    begin = _number(first or ("0" if colon else ""), text)
    end = (_number(last, text) if last else requests) if colon else begin + 1
    if not begin < end <= requests:
        raise TraceError(f"--requests {shown(part)}: the trace has requests 0 to {requests - 1}; {FORM}")
    return range(begin, end)


def _number(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise TraceError(f"--requests {shown(text)} is no list of requests; {FORM}")
    return int(digits)


def spaced(count: int, requests: int) -> list[int]:
    """So many of the requests, evenly spaced, the first among them. Raises TraceError if there are not so many."""
    _check(count, requests)
    return [at * requests // count for at in range(count)]


def drawn(count: int, requests: int, seed: int) -> list[int]:
    """So many of the requests, drawn by the seed, in the trace's order. Raises TraceError if there are not so many."""
    _check(count, requests)
    return sorted(random.Random(seed).sample(range(requests), count))


def _check(count: int, requests: int) -> None:
    if not 1 <= count <= requests:
        raise TraceError(f"--requests {count}: the trace has {requests}; give 1 to {requests}")


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of neighbours, which are read together."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield members[0], members[-1] + 1
