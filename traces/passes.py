"""Schedules of passes: which tokens go through the model together. A schedule is applied at replay, not stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from moereplay.traces.derived import derived, shared
from moereplay.traces.drafts import OFF, Rows, Shares, parse_drafts, shares
from moereplay.traces.growing import VALUES_AT_ONCE, Growing, append
from moereplay.traces.growing import Rows as Column
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.texts import meant, whole
from moereplay.traces.units import DECODE, PREFILL

LONG = 1 << 20  #: a schedule of this many passes is kept on disk, not in memory
#: Arrays of a schedule on disk.
COLUMNS = {"start": Column("<i8"), "stop": Column("<i8"), "request": Column("<i8"), "phase": Column("i1")}


@dataclass(frozen=True)
class Passes:
    """Forward passes in run order; pass p has rows [start[p], stop[p])."""

    start: np.ndarray  #: (P,) int64; also the number of rows of all passes before
    stop: np.ndarray  #: (P,) int64
    request: np.ndarray  #: (P,) int64, of the first row
    phase: np.ndarray  #: (P,) int8, of the first row: 0 prefill, 1 decode
    rows: Rows | None = None  #: None: row r is token r, and all rows of a pass have its request and phase

    @classmethod
    def of_rows(cls, lengths: np.ndarray, rows: Rows) -> Passes:
        """Return passes that have `lengths` (P,) rows each, at least one."""
        stop = np.cumsum(lengths)
        start = stop - lengths
        request, phase = rows.request[start], rows.phase[start]
        follow = np.array_equal(rows.token, np.arange(len(rows.token)))
        alike = np.array_equal(rows.request, np.repeat(request, lengths))
        plain = follow and alike and not rows.draft.any() and np.array_equal(rows.phase, np.repeat(phase, lengths))
        return cls(start, stop, request, phase, None if plain else rows)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def every_row(self) -> Rows:
        """All rows, whatever they are."""
        if self.rows is not None:
            return self.rows
        tokens = self.stop - self.start
        return Rows.plain(np.arange(tokens.sum()), np.repeat(self.request, tokens), np.repeat(self.phase, tokens))

    def repeated(self, requests: int) -> Passes:
        """Return the passes of so many requests: those of these, which begin anew under further numbers.

        Every pass must have one request, and requests their numbers in run order.
        """
        own = int(self.request[-1]) + 1
        whole, part = divmod(requests, own)
        lengths = np.resize(self.stop - self.start, whole * len(self) + int(np.searchsorted(self.request, part)))
        rows, many = self.every_row, int(lengths.sum())
        further = np.arange(many) // len(rows.token) * own
        columns = {name: np.resize(column, many) for name, column in zip(Rows._fields, rows, strict=True)}
        return Passes.of_rows(lengths, Rows(**columns | {"request": columns["request"] + further}))

    def tokens(self, first: int, last: int) -> slice | np.ndarray:
        """Return the tokens whose routing rows [first, last) have, as an index of the token axis."""
        return slice(first, last) if self.rows is None else self.rows.reads[first:last]

    def apart(self) -> np.ndarray:
        """Return (P,) bool: True if a pass shares no request with the pass before; False for the first."""
        if self.rows is None:
            first = np.zeros(len(self), bool)
            np.not_equal(self.request[1:], self.request[:-1], out=first[1:])
            return first
        passes = np.repeat(np.arange(len(self)), self.stop - self.start)
        number = np.unique(self.rows.request, return_inverse=True)[1]
        seen = np.unique(number * len(self) + passes)  # pairs of request and pass
        follows = np.isin(seen - 1, seen) & (seen % len(self) > 0)
        apart = np.ones(len(self), bool)
        apart[seen[follows] % len(self)] = apart[:1] = False
        return apart


Schedule = Callable[[Trace], Passes]
BESIDE = "+draft="  #: joins the name of a schedule and its drafts


def named_schedule(passes: str, draft: str, seed: int) -> str:
    """Return the name of a schedule with drafts, for `schedule`; without any it is `passes`."""
    return passes if draft == OFF else f"{passes}{BESIDE}{draft}:seed={seed}"


def schedule(trace: Trace, passes: str) -> Passes:
    """Return the passes of a trace under a named schedule. Raises TraceError for an unknown name."""
    name, _, drafted = passes.partition(BESIDE)
    if not drafted:
        return parse_passes(name)(trace)
    draft, _, seed = drafted.rpartition(":seed=")

    def laid_out() -> Passes:
        slots, given = shares_of(trace, name, draft, int(seed))
        return _by_slot(given, *_in_slots(np.diff(given.begins).tolist(), slots))

    return shared(trace, f"passes-{passes}", laid_out)


def parse_passes(text: str) -> Schedule:
    """Return the schedule of that name. Raises TraceError."""
    if text in NAMED:
        return NAMED[text]
    name, _, number = text.partition(":")
    if name in NUMBERED and (size := whole(number)):
        return partial(NUMBERED[name], size=size)
    if BESIDE not in text and (slots := slots_of(text)):
        return partial(batch, size=slots.many, chunk=slots.chunk)
    *others, last = (*NAMED, *(f"{name}:N" for name in NUMBERED))
    raise TraceError(
        f"unknown passes {text!r}: {meant(name, (*NAMED, *NUMBERED))}"
        f"expected {', '.join(others)} or {last}, with N of at least 1 "
        f"(batch:N:chunk=C for prompts in pieces)"
    )


class Slots(NamedTuple):
    """A schedule of requests that run together, `batch:N[:chunk=C]`."""

    many: int  #: N, requests at a time
    chunk: int  #: C, tokens of a prompt per pass at most; 0: all of them
    drafted: str = ""  #: what follows the name where passes have drafts

    @property
    def alone(self) -> str:
        """The schedule in which a request's passes are its shares of these passes."""
        return f"batch:1:chunk={self.chunk}{self.drafted}" if self.chunk else f"batch:1{self.drafted}"


def slots_of(passes: str) -> Slots | None:
    """Return the slots of a schedule by its name, or None if it is another one."""
    plain, beside, drafted = passes.partition(BESIDE)
    name, _, numbers = plain.partition(":")
    many, has_chunk, chunk = numbers.partition(":chunk=")
    if name != "batch" or not whole(many) or (has_chunk and not whole(chunk)):
        return None
    return Slots(int(many), int(chunk or 0), beside + drafted)


def prompts_by_token(passes: str) -> bool:
    """Return True if no pass has more than one token of a prompt, so that none is a prefill of many tokens."""
    slots = slots_of(passes)
    return slots.chunk == 1 if slots else passes.partition(BESIDE)[0] in ("token", "chunk:1")


def shares_of(trace: Trace, passes: str, draft: str, seed: int) -> tuple[int, Shares]:
    """Return how many requests a schedule runs at a time, and the shares that they give to its passes."""
    parse_passes(passes)
    name, _, number = passes.partition(":")
    prompts = np.asarray(trace.prompt_lengths, np.int64)
    slots = slots_of(passes) or Slots(1, {"token": 1, "chunk": whole(number) or 0}.get(name, 0))
    if name == "decode":
        prompts = np.minimum(prompts, int(number))
    return slots.many, shares(trace, prompts, slots.chunk, parse_drafts(draft), seed)


def _by_slot(given: Shares, begins: np.ndarray, slots: np.ndarray) -> Passes:
    """Return the passes of requests whose first shares fall in passes `begins` (R,), in `slots` (R,)."""
    counts = np.diff(given.begins)
    request = np.repeat(np.arange(len(counts)), counts)
    passes = begins[request] + np.arange(len(request)) - given.begins[request]
    order = np.lexsort((slots[request], passes))
    lengths = np.diff(given.offsets)
    ends = np.cumsum(lengths[order])
    starts = np.repeat(given.offsets[:-1][order] - (ends - lengths[order]), lengths[order])
    rows = given.rows.at(starts + np.arange(len(starts)))
    return Passes.of_rows(np.bincount(passes, lengths).astype(np.int64), rows)


def longest_context(trace: Trace, passes: str, arrive: bool = False) -> int:
    """Return the most positions that a pass looks back at, summed over its requests. Raises TraceError.

    `arrive`: which requests run together depends on time, so it is the sum of the longest.
    """
    offsets = np.asarray(trace.request_offsets)
    if arrive and (slots := slots_of(passes)):
        return int(np.sort(np.diff(offsets))[-min(slots.many, trace.requests) :].sum())
    plan = schedule(trace, passes)
    if plan.rows is None:
        return int(np.diff(offsets).max(initial=0))
    at = np.repeat(np.arange(len(plan)), plan.stop - plan.start)
    reach = plan.rows.token - offsets[plan.rows.request] + 1
    order = np.lexsort((reach, plan.rows.request, at))
    pairs = np.stack([at, plan.rows.request])[:, order]
    last = np.append((np.diff(pairs) != 0).any(0), True)
    return int(np.bincount(pairs[0][last], reach[order][last]).max(initial=0))


def one_by_one(trace: Trace, size: int) -> Passes:
    """Schedule requests one after the other: prompts in chunks of `size` tokens (0: whole), then one token per pass."""
    return _in_turn(trace, f"chunk-{size}", InTurn.of(trace, np.asarray(trace.prompt_lengths), size))


def decode(trace: Trace, size: int) -> Passes:
    """Schedule requests one after the other: up to `size` tokens of the prompt in one pass, then one token per pass."""
    return _in_turn(trace, f"decode-{size}", InTurn.of(trace, np.minimum(trace.prompt_lengths, size), 0))


def _in_turn(trace: Trace, name: str, turns: InTurn) -> Passes:
    """Return the passes in memory, or on disk as derived arrays if there are many."""
    count = int(turns.begins[-1])
    if not is_long(count):
        return _passes(turns.passes(0, count))

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first in range(0, count, VALUES_AT_ONCE):
            for column, rows in turns.passes(first, min(first + VALUES_AT_ONCE, count)).items():
                append(arrays[column], rows)

    return _passes(derived(trace, f"passes-{name}", COLUMNS, fill))


def _passes(columns: Mapping[str, np.ndarray]) -> Passes:
    return Passes(columns["start"], columns["stop"], columns["request"], columns["phase"])


def is_long(passes: int) -> bool:
    """Return True if arrays with an entry per pass are kept on disk."""
    return passes >= LONG


class InTurn(NamedTuple):
    """Passes of requests that run one after the other, (R,) each."""

    offsets: np.ndarray  #: first token
    prompts: np.ndarray  #: prompt tokens
    pieces: np.ndarray  #: passes of the prompt
    begins: np.ndarray  #: (R + 1,) first pass; the last entry is the number of passes
    size: int  #: tokens of a piece, 0: all

    @classmethod
    def of(cls, trace: Trace, prompts: np.ndarray, size: int) -> InTurn:
        """Return the passes for prompts of these lengths (R,), in pieces of `size`."""
        offsets = np.asarray(trace.request_offsets)
        pieces = -(-prompts // size) if size else (prompts > 0).astype(np.int64)
        begins = np.concatenate([[0], np.cumsum(pieces + np.diff(offsets) - prompts)])
        return cls(offsets[:-1], prompts, pieces, begins, size)

    def passes(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Return the arrays of passes [first, last)."""
        number = np.arange(first, last)
        request = np.searchsorted(self.begins, number, "right") - 1
        inside = number - self.begins[request]
        prompt, pieces = self.prompts[request], self.pieces[request]
        decoded = inside - pieces  # below 0 in the prompt
        size = self.size or prompt
        start = self.offsets[request] + np.where(decoded < 0, inside * size, prompt + decoded)
        tokens = np.where(decoded < 0, np.minimum(size, prompt - inside * size), 1)
        phase = np.where(decoded < 0, PREFILL, DECODE).astype(np.int8)
        return {"start": start, "stop": start + tokens, "request": request, "phase": phase}


def batch(trace: Trace, size: int, chunk: int = 0) -> Passes:
    """Schedule `size` requests at a time, each in a slot: its prompt, then one token per pass.

    A prompt enters whole, or in pieces of `chunk` tokens, one per pass. A slot that is free takes the next request of
    the trace, the lowest slot first. Rows go by slot.
    """
    return _together(trace, *_in_slots(_passes_of_requests(trace, chunk).tolist(), size), chunk)


def _pieces(trace: Trace, chunk: int) -> np.ndarray:
    """Return the number of passes of each prompt, in pieces of `chunk` tokens (0: whole)."""
    prompts = np.asarray(trace.prompt_lengths, np.int64)
    return -(-prompts // chunk) if chunk else (prompts > 0).astype(np.int64)


def _passes_of_requests(trace: Trace, chunk: int = 0) -> np.ndarray:
    """Return the number of passes of each request: those of its prompt, and one for every other token."""
    return np.diff(trace.request_offsets) - np.asarray(trace.prompt_lengths, np.int64) + _pieces(trace, chunk)


def _together(trace: Trace, begins: np.ndarray, slots: np.ndarray, chunk: int = 0) -> Passes:
    """Return the passes of requests that begin at `begins` (n,) in `slots` (n,); rows are ordered by slot."""
    prompts = np.asarray(trace.prompt_lengths, np.int64)
    request = np.repeat(np.arange(trace.requests), np.diff(trace.request_offsets))
    inside = np.arange(trace.tokens) - np.asarray(trace.request_offsets)[request]
    decoded = inside - prompts[request]  # below 0 in the prompt
    piece = inside // chunk if chunk else 0
    passes = begins[request] + np.where(decoded < 0, piece, decoded + _pieces(trace, chunk)[request])
    order = np.lexsort((slots[request], passes))  # stable: tokens of a request stay in order
    phase = np.where(decoded < 0, PREFILL, DECODE)[order].astype(np.int8)
    rows = Rows.plain(order.astype(np.int64), request[order], phase)
    return Passes.of_rows(np.bincount(passes), rows)


def _in_slots(passes: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign requests of these numbers of passes to slots; return first pass and slot of each, (n,)."""
    free = [(0, slot) for slot in range(min(size, len(passes)))]  # (first free pass, slot)
    heapify(free)
    taken = []
    for length in passes:
        begin, slot = free[0]
        taken.append((begin, slot))
        heapreplace(free, (begin + length, slot))
    begins, slots = zip(*taken, strict=True)
    return np.array(begins, np.int64), np.array(slots, np.int64)


#: Schedules by their names in `--passes`; those of NUMBERED are typed as `name:N`.
NAMED: dict[str, Schedule] = {"recorded": partial(one_by_one, size=0), "token": partial(one_by_one, size=1)}
NUMBERED: dict[str, Callable[..., Passes]] = {"chunk": one_by_one, "decode": decode, "batch": batch}
