"""The machine of a run: clock, accelerator, CPU and links; simulated by default.

Events are ordered by (time, phase, resource, issue number), with LINK before CPU before COMPUTE. An engine decides what
is done and in which order. A machine determines how long it takes, at the start or at the end, so that real threads
can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import simpy
from simpy.events import EventPriority

from moereplay.simulator.rates import MILLION, NOT_YET, part
from moereplay.simulator.reference.state import Transfer
from moereplay.simulator.times import Times

#: SimPy's priorities: the phase, and within LINK the resource. `of_link` gives those of links after the first.
LINK, CPU, COMPUTE = EventPriority(1), EventPriority(1001), EventPriority(1002)


def of_link(row: int) -> EventPriority:
    """Return the phase LINK of one link: at the same time the lower link comes first."""
    return EventPriority(LINK + row)


class Span(NamedTuple):
    """Begin and end of an activity in ns of the clock, and how long it kept its resource."""

    began: int
    ended: int
    spent: int  #: less than ended - began where it shared its resource or waited for it


class Activity(simpy.Event):
    """Work that takes time: an event of its phase at its end.

    `span` is None until it is known: from the start under the simulated clock, at the end (`finish`) on a real machine.
    """

    def __init__(self, env: simpy.Environment, phase: EventPriority) -> None:
        super().__init__(env)
        self.callbacks: list
        self.span: Span | None = None
        self.first_piece: Activity | None = None  #: of a transfer: ends when compute may begin with the arrived part
        self._phase = phase

    def finish(self, span: Span) -> None:
        """End the activity in an event of this time. Call it where the environment's events run."""
        self._ends_in(0)
        self.span = span

    def measured(self, use: Callable[[Span], None]) -> None:
        """Call `use` with the span: now if it is known, else first at the end."""
        if self.span is not None:
            use(self.span)
        else:
            self.then(lambda: use(self._known))

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` at the end, unless the activity failed (`fail`)."""
        self.callbacks.append(lambda _: act() if self.ok else None)

    @property
    def _known(self) -> Span:
        if self.span is None:
            raise AssertionError("an activity ended without a span; end it with `finish`")
        return self.span

    def _ends_in(self, delay: int) -> None:
        self._ok = True
        self._value = None
        self.env.schedule(self, priority=self._phase, delay=delay)


class Planned(Activity):
    """An activity of the simulated clock, whose span is known when it begins."""

    def __init__(self, env: simpy.Environment, phase: EventPriority, span: Span) -> None:
        super().__init__(env, phase)
        self._ends_in(span.ended - int(env.now))
        self.span = span


class Wakeup(simpy.Event):
    """A wakeup of compute or of the end of a run: a COMPUTE event of the time at which it is rung."""

    def ring(self) -> None:
        """Wake the waiter."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority=COMPUTE)


# machines


class Accelerator(Protocol):
    """Computes one thing at a time. Activities are of phase COMPUTE."""

    def dense(self, layer: int, tokens: int) -> Activity:
        """Start a layer's dense part; before layer 0 also embedding, head and dense layers."""
        ...

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """Start copy y over the tokens routed to it."""
        ...


class Priced(Protocol):
    """A simulated accelerator, whose times depend on inputs known only at run time."""

    def dense(self, layer: int, tokens: int, context: int, contended: bool, decided: int) -> Activity:
        """Start a dense part that reads `context` positions of KV cache; `contended` if a link works.

        `decided` is the time of the policies' decisions and of drafts, ns.
        """
        ...

    def expert(self, layer: int, y: int, tokens: int, contended: bool, lands: int) -> Activity:
        """Start an expert; `contended` if a link works; if `lands` is later, only a first piece has arrived."""
        ...

    def load(self, y: int) -> Activity:
        """Start the work that compute does before copy y is fetched."""
        ...

    def stage(self, layer: int, work: Sequence[tuple[int, int]], contended: bool, matrix: int) -> Activity:
        """Start one matrix, numbered from 1, of all copies and their tokens in `work`; 0: all matrices."""
        ...


class Processor(Protocol):
    """A CPU that works in parallel with the accelerator. Activities are of phase CPU."""

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        """Start the expert of copy y, after those started before; `contended` if a link works too.

        `extra_ns` is what a simulated CPU takes more, once per step.
        """
        ...


class Channel(Protocol):
    """The wire of a link: transfers end in the order of their start. Activities are of phase `of_link(row)`."""

    depth: int  #: transfers issued at once

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """Start a transfer; `contended` if the CPU computes. `Span.spent` is how long it kept the wire."""
        ...

    def abandon(self) -> None:
        """Abandon transfers in flight at a reset: the wire counts as free."""
        ...


class BatchChannel(Protocol):
    """The wire of a link that reads matrix by matrix over all experts of a transfer."""

    def start_batch(self, transfers: Sequence[Transfer], contended: bool) -> Sequence[Activity]:
        """Start a transfer of several copies; return the landings of the first, second, ... matrix of all of them."""
        ...


@dataclass(frozen=True)
class Machine:
    """Everything that takes time in a run, on one clock of integer nanoseconds."""

    env: simpy.Environment
    accelerator: Accelerator
    cpu: Processor
    links: tuple[Channel, ...]  #: in the order of the platform's rows
    priced: Priced | None = None  #: the accelerator, if it is to be told what its times depend on
    batches: tuple[BatchChannel, ...] = ()  #: the links, if they read matrix by matrix
    #: Starts the head over so many tokens, where it is computed after the last layer: an activity of phase COMPUTE.
    head: Callable[[int], Activity] | None = None

    def pause(self, ns: int) -> Activity:
        """Return time in which compute does nothing, on the simulated clock."""
        now = int(self.env.now)
        return Planned(self.env, COMPUTE, Span(now, now + ns, 0))


def simulated(times: Times, precisions: int) -> Machine:
    """Return the simulated machine of a platform."""
    env = simpy.Environment()
    compute, cpu = SimulatedAccelerator(env, times, precisions), SimulatedProcessor(env, times, precisions)
    links = tuple(SimulatedChannel(env, times, precisions, row) for row in range(len(times.depth)))
    return Machine(env, compute, cpu, links, priced=compute, batches=links if times.by_matrix else ())


class SimulatedAccelerator:
    """Times of a platform's [compute]."""

    def __init__(self, env: simpy.Environment, times: Times, precisions: int) -> None:
        self._env, self._times, self._precisions = env, times, precisions

    def dense(self, layer: int, tokens: int, context: int = 0, contended: bool = False, decided: int = 0) -> Activity:
        """Start the dense part of a layer; layer 0 includes the time of the pass."""
        before = self._times.pass_ns(tokens, contended) if layer == 0 else 0
        dense = self._times.dense_ns(layer, tokens, contended) + self._times.kv_ns(context, contended)
        return self._busy(dense + before + decided)

    def expert(self, layer: int, y: int, tokens: int, contended: bool = False, lands: int = 0) -> Activity:
        """Start a copy; if it arrives in pieces, it ends no sooner than the last piece (at `lands`) allows."""
        spent = self._times.expert_ns(*self._times.kind(y), tokens, contended)
        home = self._times.homes[y // self._precisions]
        rest = part(spent, MILLION - self._times.first[home])
        return self._busy(spent, until=lands + rest if lands else 0)

    def load(self, y: int) -> Activity:
        """Start the time that compute spends on having a copy loaded."""
        row, precision = self._times.kind(y)
        return self._busy(self._times.load_ns[row][precision])

    def stage(self, layer: int, work: Sequence[tuple[int, int]], contended: bool, matrix: int) -> Activity:
        """Start one matrix of several copies, or all of them: the rounded sums of the matrices add up to the whole."""
        whole = sum(self._times.expert_ns(*self._times.kind(y), tokens, contended) for y, tokens in work)
        if not matrix:
            return self._busy(whole)
        return self._busy(self._times.of_matrices(whole, matrix) - self._times.of_matrices(whole, matrix - 1))

    def _busy(self, spent: int, until: int = 0) -> Activity:
        now = int(self._env.now)
        return Planned(self._env, COMPUTE, Span(now, max(now + spent, until), spent))


class SimulatedProcessor:
    """Times of a platform's [cpu]."""

    def __init__(self, env: simpy.Environment, times: Times, precisions: int) -> None:
        self._env, self._times, self._precisions = env, times, precisions
        self._free_at = 0

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        """Queue an expert; its times are known at once."""
        began = max(int(self._env.now), self._free_at)
        spent = self._times.cpu_ns(*self._times.kind(y), tokens, contended) + extra_ns
        self._free_at = began + spent
        return Planned(self._env, CPU, Span(began, self._free_at, spent))


class SimulatedChannel:
    """Times of one of a platform's links: latencies overlap, bytes do not."""

    def __init__(self, env: simpy.Environment, times: Times, precisions: int, row: int) -> None:
        self._env, self._times, self._precisions, self._row = env, times, precisions, row
        self.depth = times.depth[row]
        self._last_done = NOT_YET

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """Start a transfer, which ends at max(now + latency, end of the previous one) + its time on the wire."""
        wire_ns = (self._times.contended_wire_ns if contended else self._times.wire_ns)[self._row]
        row, precision = self._times.kind(transfer.y)
        whole = wire_ns[row][precision]
        free, span = self._move(transfer, whole, transfer.victims)
        piece = self._first_piece(span.began, free, whole)
        activity = Planned(self._env, of_link(self._row), span)
        activity.first_piece = piece
        return activity

    def start_batch(self, transfers: Sequence[Transfer], contended: bool) -> list[Activity]:
        """Start a transfer of several copies, whose matrices land one after the other; the last completes it."""
        whole = self._times.batch_ns(self._row, [self._times.kind(transfer.y) for transfer in transfers], contended)
        free, span = self._move(transfers[0], whole, sum(transfer.victims for transfer in transfers))
        landings = [free + self._times.of_matrices(whole, many + 1) for many in range(len(self._times.matrices))]
        return [Planned(self._env, of_link(self._row), span._replace(ended=landing)) for landing in landings]

    def _move(self, transfer: Transfer, whole: int, victims: int) -> tuple[int, Span]:
        """Take the wire for `whole` ns; return when bytes begin, and the span. `transfer` is the first of a batch."""
        now = int(self._env.now)
        row, precision = self._times.kind(transfer.y)
        idle = self._last_done < now
        latency = self._times.latency_ns[self._row] + (self._times.start_ns[self._row][row][precision] if idle else 0)
        latency += victims * self._times.victim_ns
        free, begins = max(now + latency, self._last_done), max(now, self._last_done)
        self._last_done = free + whole
        return free, Span(now, self._last_done, self._last_done - begins)

    def _first_piece(self, now: int, free: int, whole: int) -> Activity | None:
        """Plan the first piece before the whole: if both end at once, it is first."""
        first = self._times.first[self._row]
        if not self._times.has_pieces or first == MILLION:
            return None
        return Planned(self._env, of_link(self._row), Span(now, free + part(whole, first), 0))

    def abandon(self) -> None:
        """Free the wire."""
        self._last_done = NOT_YET
