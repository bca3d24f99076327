"""Schedules of passes by plain loops: requests are (prompt, all tokens); a row's token counts through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from moereplay.policies.contract import DECODE, PREFILL
from moereplay.simulator.source import Row

Lengths = Sequence[tuple[int, int]]  #: (prompt tokens, tokens) of each request


def laid(lengths: Lengths, passes: str) -> list[list[Row]]:
    """The rows of every pass of a schedule by its name."""
    name, _, number = passes.partition(":")
    if name == "batch":
        slots, _, chunk = number.partition(":chunk=")
        return in_slots(lengths, int(slots), int(chunk or 0))
    if name == "decode":
        return laid([(min(prompt, int(number)), tokens) for prompt, tokens in lengths], "recorded")
    size = {"recorded": 0, "token": 1}.get(name, int(number or 0))
    return [rows for request in range(len(lengths)) for rows in _alone(lengths, request, size)]


def in_slots(lengths: Lengths, slots: int, chunk: int = 0) -> list[list[Row]]:
    """Requests in slots: pass by pass, each slot gives the next rows of its request, or else of the next request."""
    waiting = [rows for request in range(len(lengths)) if (rows := _alone(lengths, request, chunk))]
    held: list[list[list[Row]]] = [[] for _ in range(slots)]
    passes = []
    while waiting or any(held):
        for slot, coming in enumerate(held):
            if not coming and waiting:
                held[slot] = waiting.pop(0)
        passes.append([row for coming in held if coming for row in coming.pop(0)])
    return passes


def mixed(dice: Random, lengths: Lengths) -> list[list[Row]]:
    """Any rows: some of the requests that are left give some of their next tokens, a few of which are left out."""
    left = [[row for rows in _alone(lengths, request, 1) for row in rows] for request in range(len(lengths))]
    passes = []
    while any(left):
        rows = []
        for coming in left:
            if dice.random() < 0.7:
                taken = dice.randint(1, 3)
                rows += [row for row in coming[:taken] if dice.random() < 0.9]
                del coming[:taken]
        if dice.random() < 0.5:
            dice.shuffle(rows)
        passes += [rows] if rows else []
    return passes


def _alone(lengths: Lengths, request: int, size: int) -> list[list[Row]]:
    """The passes of a request without others: `size` prompt tokens together, 0 for all of them, then one by one."""
    first, (prompt, tokens) = sum(length for _, length in lengths[:request]), lengths[request]
    together = size or max(prompt, 1)
    edges = [*range(0, prompt, together), *range(prompt, tokens), tokens]
    return [
        [Row(request, first + at, _phase(lengths[request], at)) for at in range(start, stop)]
        for start, stop in pairwise(edges)
    ]


def _phase(length: tuple[int, int], at: int) -> int:
    return PREFILL if at < length[0] else DECODE
