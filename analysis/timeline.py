"""Tracks over time of one replay, from its event log: passes, compute, stalls, links, queue, and levels.

Steps, stalls and transfers are read from the log first; the log does not hold why a demand waited, or what a reset cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from moereplay.results.errors import ResultError
from moereplay.results.result import Event, Row
from moereplay.results.trace_events import Instant, Item, Level, Slice, Track
from moereplay.traces.passes import Passes
from moereplay.traces.units import PREFILL

PASSES, COMPUTE, CPU, STALLS, CACHE, LINKS, FILLS, QUEUE = 1, 2, 3, 4, 5, 10, 100, 1000
NAMES = {PASSES: "passes", COMPUTE: "compute", CPU: "CPU", STALLS: "stalls", CACHE: "cache"}
MOST = 1_000_000  #: items of a file; viewers are slow with more
SHOWN_AWAITED = 16  #: experts that a stall lists
MISSED = ("compulsory", "collisions", "capacity")
LOOKED_UP = ("hits", "late", *MISSED)
BUSY = ("expert", "stage", "load", "head")  #: activities of compute after the gate


class Step(NamedTuple):
    """One pass at one layer: times in ns, and the events until the next step."""

    step_pass: int
    layer: int
    begin: int
    gate: int
    end: int
    events: Sequence[Event]


class Stall(NamedTuple):
    """A wait of compute from t0 to t1 in ns; the first transfer is the one that it resumes with."""

    t0: int
    t1: int
    transfers: Sequence[Event]  #: their look-ups, or the compute that ends the wait
    cpu: Sequence[Event]


def steps_of(events: Sequence[Event], end_ns: int) -> list[Step]:
    """Return the steps of a log in order. A step ends when the next one starts, the last with the run, at `end_ns`."""
    starts = [at for at, event in enumerate(events) if event.kind == "dense"]
    ends = [*(events[at].t0 for at in starts), end_ns][1:]
    cuts = pairwise([*starts, len(events)])
    steps = []
    for (first, last), end in zip(cuts, ends, strict=True):
        dense = events[first]
        steps.append(Step(dense.step_pass, dense.layer, dense.t0, dense.t1, end, events[first:last]))
    return steps


def stalls_of(step: Step) -> Iterator[Stall]:
    """Return the idle intervals of compute between gate and end."""
    at, waits = step.gate, _Waits(step)
    for event in step.events:
        acts = event.kind in BUSY
        if (acts or event.kind in LOOKED_UP) and event.t0 > at:
            yield waits.stall(at, event.t0, event)
            at = event.t0
        waits.follow(event)
        at = event.t1 if acts else at
    if step.end > at:
        yield waits.stall(at, step.end, None)


class _Waits:
    """Experts that compute has looked up and still needs. Dropped and replaced ones are never computed."""

    def __init__(self, step: Step) -> None:
        self._computed = {event.expert for event in step.events if event.kind == "expert"}
        #: When demands land, ns, if stages compute all of them together.
        self._lands = dict[int, int]()
        if any(event.kind == "stage" for event in step.events):
            demands = [event for event in step.events if event.kind == "transfer" and event.cause != "prefetch"]
            self._lands = {event.expert: event.t1 for event in demands}
        self._transfers: dict[int, Event] = {}
        self._cpu: list[Event] = []

    def follow(self, event: Event) -> None:
        computed = event.expert in self._computed or event.expert in self._lands
        if event.kind == "late" or (event.kind in MISSED and computed):
            self._transfers[event.expert] = event
        elif event.kind == "expert":
            self._transfers.pop(event.expert, None)
        elif event.kind == "stage":
            left = {expert for expert, lands in self._lands.items() if lands > event.t0}
            self._transfers = {expert: look for expert, look in self._transfers.items() if expert in left}
        elif event.kind == "cpu":
            self._cpu.append(event)

    def stall(self, t0: int, t1: int, ends: Event | None) -> Stall:
        """Return the stall that ends when `ends` starts at t1."""
        others = dict(self._transfers)
        first = []
        if ends is not None and ends.kind == "expert" and others.pop(ends.expert, None):
            first = [ends]
        return Stall(t0, t1, [*first, *others.values()], [event for event in self._cpu if event.t1 > t0])


# Transfers

Copy = tuple[int, int, int]  #: layer, expert, precision
FREE = -1  #: end of a transfer before the first one


class Machine(NamedTuple):
    """Facts about machine and model that a log does not hold."""

    links: Sequence[str]  #: names of links into the fast tier
    fills: Sequence[str]  #: names of links into lower tiers
    homes: Sequence[int]  #: the link of every expert, layer by layer
    sizes: Sequence[Sequence[int]]  #: [precision][layer] bytes of an expert
    queued_together: bool = False  #: whether demands are queued when the last of their step is loaded
    warm: Sequence[tuple[int, int]] = ()  #: (layer, expert) that are resident at the start

    def size(self, copy: Copy) -> int:
        """Return the bytes of a copy."""
        return self.sizes[copy[2]][copy[0]]

    def named(self, copy: Copy) -> str:
        """Name a copy by layer and expert, and by precision if there are several."""
        precision = f" P{copy[2]}" if len(self.sizes) > 1 else ""
        return f"L{copy[0]} E{copy[1]}{precision}"

    def copy_of(self, y: int) -> Copy:
        """Return the copy with a number."""
        x, precision = divmod(y, len(self.sizes))
        return *divmod(x, self._experts), precision

    @property
    def _experts(self) -> int:
        return len(self.homes) // len(self.sizes[0])

    def home(self, copy: Copy) -> int:
        """Return the link of a copy into the fast tier."""
        return self.homes[copy[0] * self._experts + copy[1]]


def copy_of(event: Event) -> Copy:
    """Return the copy that an event concerns."""
    return event.layer, event.expert, event.precision


@dataclass
class Move:
    """One transfer over one link, times in ns."""

    event: Event
    step: tuple[int, int]  #: pass and layer in which it starts
    size: int  #: bytes
    link: int | None  #: its row; None if several links fill lower tiers, which the log does not distinguish
    begins: int  #: first byte on the wire, after the transfer before it
    ends: int
    cut_ns: int = 0  #: time cut off by a reset
    why: str = ""  #: kind of miss, for a demand
    waits_from: int | None = None  #: time of queueing, if known
    late_at: int | None = None  #: time of a delayed hit on it

    @property
    def busy_ns(self) -> int:
        """Part of `link_busy_ns` that this transfer takes."""
        return self.ends - self.begins + self.cut_ns


@dataclass
class Traffic:
    """Transfers of a log, followed step by step."""

    machine: Machine
    moves: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._last_end = [FREE] * (len(self.machine.links) + 1)
        self._last: dict[Copy, Move] = {}  # last transfer of each copy into the fast tier
        self._filled: dict[Copy, int] = {}  # arrival time of each copy in a lower tier
        self._onward: dict[Copy, int] = {}  # the same for copies that will move on from there
        self._moving: list[Move] = []

    def follow(self, step: Step) -> None:
        """Add the transfers that start in a step."""
        asked = _asked(step, self.machine.queued_together)
        for event in step.events:
            copy = copy_of(event)
            if event.kind in ("transfer", "fill"):
                self._start(event, copy, step, asked)
            elif event.kind == "late":
                self._last[copy].late_at = event.t0
            elif event.kind in ("cancel", "drop"):
                self._onward.pop(copy, None)
            elif event.kind == "reset":
                self._abandon(event.t0)

    def _start(self, event: Event, copy: Copy, step: Step, asked: dict[int, tuple[int, str]]) -> None:
        if event.kind == "transfer":
            link = self.machine.home(copy)
        else:
            link = len(self.machine.links) if len(self.machine.fills) == 1 else None
        begins = event.t0 if link is None else max(event.t0, self._last_end[link])
        move = Move(event, (step.step_pass, step.layer), self.machine.size(copy), link, begins, event.t1)
        if event.cause != "prefetch":
            since, move.why = asked[event.expert]
            move.waits_from = max(since, self._filled.get(copy, 0))
        else:
            move.waits_from = self._onward.get(copy)
        if link is not None:
            self._last_end[link] = event.t1
        self._keep(move, copy)

    def _keep(self, move: Move, copy: Copy) -> None:
        self._onward.pop(copy, None)
        if move.event.kind == "fill":
            self._filled[copy] = self._onward[copy] = move.ends
        else:
            self._last[copy] = move
        self._moving.append(move)
        self.moves.append(move)

    def _abandon(self, now: int) -> None:
        """Cut the transfers under way: a reset frees the links."""
        for move in self._moving:
            if move.ends > now:
                move.cut_ns = move.ends - max(move.begins, now)
                move.begins, move.ends = min(move.begins, now), now
        self._clear()


def _asked(step: Step, together: bool) -> dict[int, tuple[int, str]]:
    """Map experts to the time at which their demand was queued, ns, and the kind of their miss."""
    missed = {event.expert: (event.t0, event.kind) for event in step.events if event.kind in MISSED}
    loads = [event for event in step.events if event.kind == "load" and event.cause != "prefetch"]
    for load in loads:
        missed[load.expert] = (loads[-1].t1 if together else load.t1, missed[load.expert][1])
    return missed


def moves_of(steps: Iterable[Step], machine: Machine) -> list[Move]:
    """Return every transfer of a log in the order of their starts."""
    traffic = Traffic(machine)
    for step in steps:
        traffic.follow(step)
    return traffic.moves


# Tracks


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
            row = f"queue {number - QUEUE + 1}" if number >= QUEUE else f"into lower tiers {number - FILLS + 1}"
            yield Track(number, self._names.get(number, row))

    def queued(self, t0: int, t1: int) -> int:
        """Return the queue row of an item; items must be passed in the order of their starts."""
        return QUEUE + _lowest_free(self._queued, t0, t1)

    def fill(self, move: Move) -> int:
        """Return a row for a transfer into lower tiers."""
        return FILLS + _lowest_free(self._fills, move.begins, move.ends)


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
                for copy in list(self._lands):
                    self._leave(copy, event.t0)
        self._times = sorted({0, *self._changes})
        self._held = list(accumulate((self._changes[t] for t in self._times), Held.plus))

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
