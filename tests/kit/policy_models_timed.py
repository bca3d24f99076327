"""A slow, obvious model of whole replays with a clock: every nanosecond is looked at, first the link, then compute.

One link serves one transfer at a time, demand before prefetch; what waits for compute is a generator that says when it
may go on. Written from the definitions in `docs/semantics.md`; no heap, no events, no phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.kit.policy_models_replay import Cache, Copy, Rules, Step

GoOn = Callable[[], bool]
PATIENCE = 100_000  #: ns, more than any replay takes; a wrong model fails instead of waiting for ever


class Pace(NamedTuple):
    """Durations in nanoseconds, at least 1 each."""

    dense: int
    expert: int
    transfer: Sequence[int]  #: by precision


@dataclass
class Moving:
    """A transfer on the link."""

    copy: Copy
    end: int
    prefetch: bool
    awaited: bool = False  #: a gate has found it on its way


class Ticking:
    """A replay; `cache` has its counters."""

    def __init__(self, rules: Rules, pace: Pace) -> None:
        self.rules, self.pace, self.cache = rules, pace, Cache(rules)
        self.demands, self.prefetches = list[Copy](), list[Copy]()  # queues
        self.moving: Moving | None = None
        self.ready = list[Copy]()  # arrived, and compute waits for it

    def play(self, steps: Sequence[Step]) -> int:
        """Returns when the last step ended."""
        process = self.process(steps)
        go_on: GoOn | None = self.after(0)
        while True:
            self.land()
            while go_on():
                go_on = next(process, None)
                if go_on is None:
                    return self.cache.now
                self.start()  # the link looks at its queue whenever compute has done something
            self.cache.now += 1
            assert self.cache.now < PATIENCE, "compute waits for what never comes"

    # the link

    def land(self) -> None:
        """The transfer that ends now, if there is one, and the start of the next."""
        if self.moving is None or self.moving.end > self.cache.now:
            return
        landed, self.moving = self.moving, None
        unused = landed.prefetch and not landed.awaited
        self.cache.arrive(landed.copy, unused)
        if not unused:
            self.ready.append(landed.copy)
        self.start()

    def start(self) -> None:
        """The head of the queue; a demand without room holds the link, a prefetch without room is dropped."""
        if self.moving is None and self.demands:
            if self.cache.take_demand(self.demands[0]):
                self.move(self.demands.pop(0), prefetch=False)
            return
        while self.moving is None and self.prefetches:
            copy = self.prefetches.pop(0)
            if self.cache.take_prefetch(copy):
                self.move(copy, prefetch=True)

    def move(self, copy: Copy, prefetch: bool) -> None:
        """From now on."""
        self.moving = Moving(copy, self.cache.now + self.pace.transfer[copy[2]], prefetch)

    # compute

    def process(self, steps: Sequence[Step]) -> Iterator[GoOn]:
        """Dense part, gate, experts, and so on."""
        for step in steps:
            self.cache.begin(step)
            yield self.after(self.pace.dense)
            self.cache.open()
            self.cancel(step)
            yield from self.one_by_one(step) if self.rules.sequential else self.together(step)
            if self.rules.after_demand:
                self.name()

    def after(self, spent: int) -> GoOn:
        """So much later."""
        end = self.cache.now + spent
        return lambda: self.cache.now >= end

    def cancel(self, step: Step) -> None:
        """Cancel transfers that are still queued for this layer, because they are too late."""
        for copy in [copy for copy in self.prefetches if copy[0] <= step.layer]:
            self.prefetches.remove(copy)
            self.cache.note("cancel", copy)

    def name(self) -> None:
        """Behind what is queued already."""
        self.prefetches += self.cache.names(self.prefetches)

    def together(self, step: Step) -> Iterator[GoOn]:
        """All are looked up, then used; hits are computed first, the others as they arrive."""
        found = [self.cache.look_up(n) for n in range(len(step.demand))]
        for kind, copy in found:
            self.meet(kind, copy)
        for kind, copy in found:
            self.serve(kind, copy)
        if not self.rules.after_demand:
            self.name()
        for kind, copy in found:
            if kind == "hits":
                yield from self.compute(copy)
        for kind, _ in found:
            if kind != "hits":
                yield from self.compute_arrival()

    def one_by_one(self, step: Step) -> Iterator[GoOn]:
        """Each is looked up when its turn comes; only it is kept."""
        if not self.rules.after_demand:
            self.name()
        for n in range(len(step.demand)):
            kind, copy = self.cache.look_up(n)
            self.meet(kind, copy)
            self.serve(kind, copy)
            yield from self.compute(copy) if kind == "hits" else self.compute_arrival()
            self.cache.kept = []

    def meet(self, kind: str, copy: Copy) -> None:
        """It is used from now on, wherever it is; a prefetch on its way has come to some use."""
        self.cache.use(copy)
        if kind == "late" and self.moving is not None and not self.moving.awaited:
            assert self.moving.prefetch and self.moving.copy == copy
            self.moving.awaited = True
            self.cache.counts["prefetch_used"] += 1

    def serve(self, kind: str, copy: Copy) -> None:
        """From the cache, from a side buffer, or over the link."""
        if kind == "hits":
            self.cache.promote(copy)
        elif kind != "late":
            self.demands.append(copy)

    def compute_arrival(self) -> Iterator[GoOn]:
        """Whichever comes first."""
        if not self.ready:
            yield lambda: bool(self.ready)
        yield from self.compute(self.ready.pop(0))

    def compute(self, copy: Copy) -> Iterator[GoOn]:
        """One expert."""
        yield self.after(self.pace.expert)
        self.cache.computed.append(copy)
