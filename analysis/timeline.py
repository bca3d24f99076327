"""Tracks over time of one replay, from its event log: passes, compute, stalls, links, queue, and levels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from moereplay.analysis.timeline_moves import (
    BUSY,
    FREE,
    LOOKED_UP,
    Copy,
    Machine,
    Move,
    Stall,
    Step,
    copy_of,
    moves_of,
    stalls_of,
    steps_of,
)
from moereplay.results.errors import ResultError
from moereplay.results.result import Event, Row
from moereplay.results.trace_events import Instant, Item, Level, Slice, Track
from moereplay.traces.passes import Passes
from moereplay.traces.units import PREFILL

PASSES, COMPUTE, CPU, STALLS, CACHE, LINKS, FILLS, QUEUE = 1, 2, 3, 4, 5, 10, 100, 1000
NAMES = {PASSES: "passes", COMPUTE: "compute", CPU: "CPU", STALLS: "stalls", CACHE: "cache"}
MOST = 1_000_000  #: items of a file; viewers are slow with more
SHOWN_AWAITED = 16  #: experts that a stall lists


class Timeline:
    """The tracks of a whole log, pass by pass."""

    def __init__(self, events: Sequence[Event], end_ns: int, machine: Machine, plan: Passes | None = None) -> None:
        """Read a log that ended at `end_ns`; `plan`, if known, describes the passes."""
        self._machine, self._plan = machine, plan
        steps = steps_of(events, end_ns)
        moves = moves_of(steps, machine)
        self._levels = Levels(steps, moves, machine)
        self._passes = [list(group) for _, group in groupby(steps, key=lambda step: step.step_pass)]
        self._moves = {number: list(group) for number, group in groupby(moves, key=lambda move: move.step[0])}
        self._tracks = _Tracks(machine)

    def __len__(self) -> int:
        """Return the number of passes."""
        return len(self._passes)

    def items(self, number: int) -> Iterator[Item]:
        """Return the items of one pass; passes must be requested in order. An item belongs to the pass in which it
        starts.
        """
        steps, moves = self._passes[number], self._moves.get(number, [])
        for item in self._of_pass(number, steps, moves):
            if not isinstance(item, Slice | Instant):
                yield item
                continue
            yield from self._tracks.first(item.track)
            yield item

    def _of_pass(self, number: int, steps: Sequence[Step], moves: Sequence[Move]) -> Iterator[Item]:
        begin, end = steps[0].begin, steps[-1].end
        yield Slice(PASSES, f"pass {number}", begin, end, self._about(number))
        for step in steps:
            yield from _layer(step)
            yield from self._activities(step)
            yield from (self._stall(step, stall) for stall in stalls_of(step))
            yield from (self._instant(event) for event in step.events if event.kind in INSTANTS)
        for move in moves:
            yield self._transfer(move)
        yield from self._queue(moves)
        yield from self._levels.between(begin, end + (number == len(self._passes) - 1))

    def _about(self, number: int) -> Row:
        if self._plan is None:
            return {}
        phase = "prefill" if self._plan.phase[number] == PREFILL else "decode"
        tokens = int(self._plan.stop[number] - self._plan.start[number])
        return {"request": int(self._plan.request[number]), "phase": phase, "tokens": tokens}

    def _activities(self, step: Step) -> Iterator[Slice]:
        for event in step.events:
            if event.kind in (*BUSY, "cpu"):
                name = f"{event.kind} {self._machine.named(copy_of(event))}" if event.expert >= 0 else event.kind
                track = CPU if event.kind == "cpu" else COMPUTE
                yield Slice(track, name, event.t0, event.t1, {"pass": step.step_pass})
            elif event.kind == "dense":
                yield Slice(COMPUTE, f"dense L{step.layer}", event.t0, event.t1, {"pass": step.step_pass})

    def _stall(self, step: Step, stall: Stall) -> Slice:
        awaited = [self._machine.named(copy_of(event)) for event in stall.transfers]
        awaited += [f"{self._machine.named(copy_of(event))} (CPU)" for event in stall.cpu]
        more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
        args = {"pass": step.step_pass, "layer": step.layer, "awaits": awaited[:SHOWN_AWAITED], "awaited": len(awaited)}
        return Slice(STALLS, f"wait for {awaited[0]}{more}" if awaited else "wait", stall.t0, stall.t1, args)

    def _instant(self, event: Event) -> Instant:
        name = f"{event.kind} {self._machine.named(copy_of(event))}" if event.expert >= 0 else event.kind
        args: Row = {"pass": event.step_pass, "cause": event.cause}
        if event.kind == "evict":
            args["cause"] = f"for {self._machine.named(self._machine.copy_of(int(event.cause.removeprefix('for '))))}"
        return Instant(CACHE, name, event.t0, args)

    def _transfer(self, move: Move) -> Slice:
        event, (step_pass, layer) = move.event, move.step
        why = event.cause if move.late_at is None else "late"  # of prefetches alone
        args = {"pass": step_pass, "layer": layer, "cause": event.cause, "bytes": move.size}
        args |= {"issued_ns": event.t0, "into": "fast tier" if event.kind == "transfer" else "lower tier"}
        args |= {} if move.link is None else {"busy_ns": move.busy_ns}
        args |= {"why": move.why} if move.why else {}
        args |= {} if move.late_at is None else {"late_at_ns": move.late_at}
        args |= {"abandoned_ns": move.cut_ns} if move.cut_ns else {}
        track = self._tracks.fill(move) if move.link is None else LINKS + move.link
        return Slice(track, f"{self._machine.named(copy_of(event))} {why}", move.begins, move.ends, args)

    def _queue(self, moves: Iterable[Move]) -> Iterator[Slice]:
        waits = [(move.waits_from, move) for move in moves if move.waits_from is not None]
        for since, move in sorted(waits, key=lambda wait: wait[0]):
            if since < move.event.t0:
                name = f"{self._machine.named(copy_of(move.event))} {move.event.cause}"
                args = {"pass": move.step[0], "layer": move.step[1], "bytes": move.size}
                yield Slice(self._tracks.queued(since, move.event.t0), name, since, move.event.t0, args)


def limited(timeline: Timeline, passes: range, most: int = MOST) -> Iterator[Item]:
    """Return the items of a range of passes. Raises ResultError above `most` items, naming how many passes fit."""
    count = 0
    for number in passes:
        for item in timeline.items(number):
            count += 1
            if count > most:
                raise ResultError(_too_many(passes, number - passes.start, most))
            yield item


def _too_many(passes: range, fit: int, most: int) -> str:
    said = f"passes {passes.start} to {passes.stop - 1} make more than {most:,} events, the most that viewers open"
    if fit == 0:
        return f"pass {passes.start} alone makes more than {most:,} events; --passes chunk:N makes smaller passes"
    return f"{said}; nothing was written: pass --first-pass {passes.start} --passes-shown {fit}"


#: Kinds of events without duration that change the cache or its pending transfers.
INSTANTS = ("evict", "promote", "cancel", "drop", "reset")


def _layer(step: Step) -> Iterator[Slice]:
    """Return a layer with its dense and expert parts, and counts of the gate's demand and the cache's changes."""
    kinds = Counter(event.kind for event in step.events)
    found = {kind: kinds[kind] for kind in (*LOOKED_UP, *INSTANTS, "cpu") if kinds[kind]}
    yield Slice(PASSES, f"layer {step.layer}", step.begin, step.end, {"pass": step.step_pass, **found})
    yield Slice(PASSES, "dense, gate", step.begin, step.gate, {})
    yield Slice(PASSES, "experts", step.gate, step.end, {})


class _Tracks:
    """Names of tracks, and rows for items that overlap."""

    def __init__(self, machine: Machine) -> None:
        rows = [*machine.links, *machine.fills]
        self._names = NAMES | {LINKS + row: f"link {name}" for row, name in enumerate(rows)}
        self._named = set[int]()
        self._queued: list[int] = []  # end of the last item of each row
        self._fills: list[int] = []

    def first(self, number: int) -> Iterator[Track]:
        """Return the track before its first item."""
        if number not in self._named:
            self._named.add(number)
            yield Track(number, self._names.get(number) or _row_name(number))

    def queued(self, t0: int, t1: int) -> int:
        """Return the queue row of an item; items must be passed in the order of their starts."""
        return QUEUE + _lowest_free(self._queued, t0, t1)

    def fill(self, move: Move) -> int:
        """Return a row for a transfer into lower tiers."""
        return FILLS + _lowest_free(self._fills, move.begins, move.ends)


def _row_name(number: int) -> str:
    return f"queue {number - QUEUE + 1}" if number >= QUEUE else f"into lower tiers {number - FILLS + 1}"


def _lowest_free(rows: list[int], t0: int, t1: int) -> int:
    row = next((row for row, until in enumerate(rows) if until <= t0), len(rows))
    rows += [FREE] * (row == len(rows))
    rows[row] = t1
    return row


# Levels over time


class Held(NamedTuple):
    """Contents of the fast tier and transfers at a time, or a change of them."""

    experts: int = 0  #: resident copies, including side buffers
    resident: int = 0  #: their bytes
    arriving: int = 0  #: bytes in flight into the fast tier
    demands: int = 0  #: demand transfers in flight, on any link
    prefetches: int = 0  #: prefetches in flight
    waiting: int = 0  #: queued demands

    def plus(self, other: Held) -> Held:
        """Add field by field."""
        return Held(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self) -> Held:
        """Return the inverse change."""
        return Held(*(-each for each in self))

    def levels(self, t: int) -> Iterator[Level]:
        """Return the counters of the viewer."""
        yield Level("resident experts", t, {"experts": self.experts})
        yield Level("fast tier", t, {"resident bytes": self.resident, "arriving bytes": self.arriving})
        yield Level("in flight", t, {"demand": self.demands, "prefetch": self.prefetches})
        yield Level("demands queued", t, {"transfers": self.waiting})


class Levels:
    """The contents at every time at which they change, in ns."""

    def __init__(self, steps: Iterable[Step], moves: Iterable[Move], machine: Machine) -> None:
        self._machine = machine
        self._changes: defaultdict[int, Held] = defaultdict(Held)
        self._lands: dict[Copy, int] = {}  # arrival time of each copy that is or will be resident
        for layer, expert in machine.warm:
            self._land((layer, expert, 0), 0)
        starts = iter(moves)
        for event in (event for step in steps for event in step.events):
            if event.kind in ("transfer", "fill"):
                self._start(next(starts))
            elif event.kind == "evict":
                self._leave(copy_of(event), event.t0)
            elif event.kind == "reset":
                self._empty(event.t0)
        self._sum()

    def between(self, t0: int, t1: int) -> Iterator[Level]:
        """Return the levels at t0, then those that change before t1."""
        first, last = bisect_right(self._times, t0), bisect_left(self._times, t1)
        yield from self._held[first - 1].levels(t0)
        for at in range(first, last):
            before = self._held[at - 1].levels(self._times[at])
            after = self._held[at].levels(self._times[at])
            yield from (level for level, old in zip(after, before, strict=True) if level != old)

    def _add(self, t: int, change: Held) -> None:
        self._changes[t] = self._changes[t].plus(change)

    def _land(self, copy: Copy, t: int) -> None:
        self._lands[copy] = t
        self._add(t, self._resident(copy))

    def _resident(self, copy: Copy) -> Held:
        return Held(experts=1, resident=self._machine.size(copy))

    def _start(self, move: Move) -> None:
        fast, prefetch = move.event.kind == "transfer", move.event.cause == "prefetch"
        under_way = Held(arriving=move.size if fast else 0, demands=not prefetch, prefetches=prefetch)
        self._add(move.event.t0, under_way)
        self._add(move.ends, under_way.minus())
        if not prefetch and move.waits_from is not None:
            self._add(move.waits_from, Held(waiting=1))
            self._add(move.event.t0, Held(waiting=-1))
        if fast and move.event.cause != "streamed" and move.ends == move.event.t1:
            self._land(copy_of(move.event), move.ends)

    def _leave(self, copy: Copy, t: int) -> None:
        if self._lands.pop(copy, None) is not None:
            self._add(t, self._resident(copy).minus())

    def _empty(self, t: int) -> None:
        for copy in list(self._lands):
            self._leave(copy, t)

    def _sum(self) -> None:
        self._times = sorted({0, *self._changes})
        self._held = list(accumulate((self._changes[t] for t in self._times), Held.plus))
