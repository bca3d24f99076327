"""Schedules of passes by plain loops: requests are (prompt, all tokens); a row's token counts through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from moereplay.policies.contract import DECODE, PREFILL
from moereplay.simulator.source import Row

Lengths = Sequence[tuple[int, int]]  #: (prompt tokens, tokens) of each request


class Guess(NamedTuple):
    """Drafts by plain loops."""

    many: int
    accept: Sequence[float]
    rejected: str
    seed: int
    record: Sequence[int] = ()  #: of every token, as in the array `drafts`; instead of `many` and `accept`


def laid(lengths: Lengths, passes: str, guess: Guess | None = None) -> list[list[Row]]:
    """The rows of every pass of a schedule by its name."""
    name, _, number = passes.partition(":")
    if name == "batch":
        slots, _, chunk = number.partition(":chunk=")
        return in_slots(lengths, int(slots), int(chunk or 0), guess)
    if name == "decode":
        return laid([(min(prompt, int(number)), tokens) for prompt, tokens in lengths], "recorded", guess)
    size = {"recorded": 0, "token": 1}.get(name, int(number or 0))
    return [rows for request in range(len(lengths)) for rows in given(lengths, request, size, guess)]


def in_slots(lengths: Lengths, slots: int, chunk: int = 0, guess: Guess | None = None) -> list[list[Row]]:
    """Requests in slots: pass by pass, each slot gives the next rows of its request, or else of the next request."""
    waiting = [rows for request in range(len(lengths)) if (rows := given(lengths, request, chunk, guess))]
    held: list[list[list[Row]]] = [[] for _ in range(slots)]
    passes = []
    while waiting or any(held):
        for slot, coming in enumerate(held):
            if not coming and waiting:
                held[slot] = waiting.pop(0)
        passes.append([row for coming in held if coming for row in coming.pop(0)])
    return passes


def given(lengths: Lengths, request: int, size: int, guess: Guess | None) -> list[list[Row]]:
    """The rows that a request gives to each pass: pieces of its prompt, then known tokens with their drafts."""
    alone = _alone(lengths, request, size)
    prompt = [rows for rows in alone if rows[0].phase == PREFILL]
    if guess is None:
        return alone
    first = sum(length for _, length in lengths[:request])
    i, end = first + lengths[request][0], first + lengths[request][1]
    while i < end:
        rows, right = [Row(request, i, DECODE)], True
        for j in range(1, (guess.record[i] if guess.record else min(guess.many, end - 1 - i)) + 1):
            right = right and _is_right(guess, i, j)
            reads = i + j if right else min(i + j, end - 1)
            if not right and guess.rejected == "other":
                reads = first + hash53(guess.seed + 1, i * 64 + j) % (end - first)
            if not right and guess.rejected == "recorded":
                before = sum(each if each > 0 else -(each < 0) for each in guess.record[:i])
                reads = len(guess.record) + before + j - 1 - sum(row.draft == 1 for row in rows)
            rows.append(Row(request, i + j, DECODE, reads, 1 if right else 2))
        prompt.append(rows)
        i += sum(row.kept for row in rows)
    return prompt


def _is_right(guess: Guess, i: int, j: int) -> bool:
    if guess.record:
        return i + j < len(guess.record) and guess.record[i + j] < 0
    return hash53(guess.seed, i + j) / 2**53 < guess.accept[min(j, len(guess.accept)) - 1]


def hash53(seed: int, t: int) -> int:
    """53 random bits."""
    x = (seed * 0x9E3779B97F4A7C15 + t + 1) % 2**64
    for _ in range(3):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return x >> 11


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
