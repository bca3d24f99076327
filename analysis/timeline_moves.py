"""Steps, stalls and transfers of an event log: link use, causes of waiting, and reasons for transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from moereplay.results.result import Event

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
    return [_step(events[first:last], end) for (first, last), end in zip(cuts, ends, strict=True)]


def _step(events: Sequence[Event], end: int) -> Step:
    dense = events[0]
    return Step(dense.step_pass, dense.layer, dense.t0, dense.t1, end, events)


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
        link = self._link(event)
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

    def _link(self, event: Event) -> int | None:
        if event.kind == "transfer":
            return self.machine.home(copy_of(event))
        return len(self.machine.links) if len(self.machine.fills) == 1 else None

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
