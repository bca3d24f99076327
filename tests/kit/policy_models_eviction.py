"""Slow, obvious models of more evictions, from their definitions; sizes in bytes, prefetches and predictions included.

A pool gets the events in order: a step's gate opens, an expert is looked up, used and, if it was missing,
admitted; between steps one may be prefetched or, where it is resident, predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from moereplay.traces.routers import scores as router_scores
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Trace
from tests.kit.policy_models import DemandStep, Model


class Facts(NamedTuple):
    """What a model may know in addition to the demand; passes have one token."""

    layers: int
    experts: int
    request: Sequence[int]  #: of each token
    position: Sequence[int]  #: of each token in its request
    scores: Sequence[Sequence[Sequence[int]]] = ()  #: (T, L, E) router probabilities in UNITs
    counts: Mapping[int, int] = {}  #: how often the trace chose each expert
    k: int = 1


def facts_of(trace: Trace) -> Facts:
    """Everything, from the trace."""
    sizes, spans = trace.geometry, range(trace.requests)
    lengths = [int(trace.request_offsets[r + 1] - trace.request_offsets[r]) for r in spans]
    chosen = [
        layer * sizes.experts + int(e) for row in trace.read("chosen") for layer, ids in enumerate(row) for e in ids
    ]
    return Facts(
        sizes.layers,
        sizes.experts,
        [r for r, length in enumerate(lengths) for _ in range(length)],
        [at for length in lengths for at in range(length)],
        to_units(router_scores(sizes.router, trace.read("logits"))).tolist(),
        {x: chosen.count(x) for x in sorted(set(chosen))},
        sizes.k,
    )


class Pool(Model):
    """Residents in order of arrival, and every expert with a timestamp in order of it."""

    def __init__(self, capacity: int, size: Mapping[int, int], facts: Facts) -> None:
        super().__init__(0)
        self.capacity, self.size, self.facts = capacity, size, facts
        self.unused_prefetch = dict[int, bool]()  # residents, oldest arrival first
        self.by_timestamp = list[int]()  # oldest timestamp first
        self.time = 0  # timestamps given
        self.gates = list[DemandStep]()

    @property
    def residents(self) -> Collection[int]:
        return self.unused_prefetch.keys()

    @property
    def now(self) -> DemandStep:
        """The step in progress."""
        return self.gates[-1]

    def begin(self, step: DemandStep) -> None:
        self.gates.append(step)

    def has(self, x: int) -> bool:
        return x in self.unused_prefetch

    def use(self, x: int) -> None:
        self._set_timestamp(x)
        self.used(x, hit=x in self.residents and not self.unused_prefetch[x])
        if x in self.residents:
            self.unused_prefetch[x] = False

    def predict(self, x: int) -> None:
        """A prefetch suggests a resident."""
        self.named(x)

    def admit(self, x: int, kept: Collection[int], prefetched: bool = False) -> None:
        if not self.all_may_leave(x, kept):
            self.declined(x)
            return
        while self.too_large(x, ()):
            leaving = self.victim([y for y in self.residents if y not in kept], x)
            del self.unused_prefetch[leaving]
            self.left(leaving)
        self.unused_prefetch[x] = prefetched
        if prefetched:
            self._set_timestamp(x)
        self.arrived(x, prefetched)

    def too_large(self, x: int, gone: Collection[int]) -> bool:
        """Return True if x does not fit with the residents that are not `gone`."""
        return sum(self.size[y] for y in self.residents if y not in gone) + self.size[x] > self.capacity

    def all_may_leave(self, x: int, kept: Collection[int]) -> bool:
        """Return True if x is admitted in place of every victim it needs (with decides_once, of the first)."""
        gone = list[int]()
        while self.may_decline and self.too_large(x, gone) and not (gone and self.decides_once):
            gone.append(self.victim([y for y in self.residents if y not in (*kept, *gone)], x))
            if not self.lets_in(x, gone[-1]):
                return False
        return True

    def _set_timestamp(self, x: int) -> None:
        self.time += 1
        self.by_timestamp = [*(y for y in self.by_timestamp if y != x), x]

    # what a policy defines

    may_decline = decides_once = False

    def victim(self, candidates: list[int], x: int) -> int:
        """The victim for x among the candidates, oldest arrival first."""
        raise NotImplementedError

    def lets_in(self, x: int, leaving: int) -> bool:
        """Return True if x may evict it."""
        raise NotImplementedError

    def declined(self, x: int) -> None:
        """x did not become resident."""

    def used(self, x: int, hit: bool) -> None:
        """x was used; a hit unless it is missing or this is the first use of what a prefetch brought."""

    def named(self, x: int) -> None:
        """A prefetch suggested the resident x."""

    def arrived(self, x: int, prefetched: bool) -> None:
        """x is resident now."""

    def left(self, x: int) -> None:
        """x is not any more."""


Suggestions = Callable[[DemandStep], Sequence[int]]


def play_ahead(steps: Sequence[DemandStep], pools: Sequence[Pool], names: Suggestions) -> list[bool]:
    """Hit or miss of every access under contract atomic; every transfer, also of a prefetch, arrives at once."""
    hits = []
    for step in steps:
        for pool in pools:
            pool.begin(step)
        model = pools[step.layer % len(pools)]
        found = [model.has(x) for x in step.demand]
        for x in step.demand:
            model.use(x)
        absent = [x for x in names(step) if not _named_resident(pools[x // step.experts % len(pools)], x)]
        for x, hit in zip(step.demand, found, strict=True):
            if not hit:
                model.admit(x, kept=step.demand)
        for x in absent:
            pools[x // step.experts % len(pools)].admit(x, kept=step.demand, prefetched=True)
        hits += found
    return hits


def _named_resident(pool: Pool, x: int) -> bool:
    if pool.has(x):
        pool.predict(x)
    return pool.has(x)


class Clock(Pool):
    """A circular list and a hand; the hand spends marks until it finds none."""

    def __init__(self, *setting, bits: int = 1, touch: bool = False) -> None:
        super().__init__(*setting)
        self.most, self.touch = 2**bits - 1, touch
        self.ring, self.marks = list[int](), dict[int, int]()

    def used(self, x: int, hit: bool) -> None:
        if hit:
            self.marks[x] = min(self.most, self.marks[x] + 1)

    def named(self, x: int) -> None:
        if self.touch:
            self.marks[x] = min(self.most, self.marks[x] + 1)

    def arrived(self, x: int, prefetched: bool) -> None:
        """Just behind the hand, which stands before the ring's first."""
        self.ring.append(x)
        self.marks[x] = 0

    def victim(self, candidates: list[int], x: int) -> int:
        while self.ring[0] not in candidates or self.marks[self.ring[0]] > 0:
            if self.ring[0] in candidates:
                self.marks[self.ring[0]] -= 1
            self.ring.append(self.ring.pop(0))
        return self.ring[0]

    def left(self, x: int) -> None:
        self.ring.remove(x)


class Sieve(Pool):
    """Figure 2 of Zhang et al., NSDI 2024: a queue from oldest to newest, marks, and a hand that names an expert."""

    def __init__(self, *setting) -> None:
        super().__init__(*setting)
        self.marked, self.hand = set[int](), None

    def used(self, x: int, hit: bool) -> None:
        if hit:
            self.marked.add(x)

    def victim(self, candidates: list[int], x: int) -> int:
        queue = list(self.residents)
        at = queue.index(self.hand) if self.hand in queue else 0
        while queue[at] not in candidates or queue[at] in self.marked:
            if queue[at] in candidates:
                self.marked.discard(queue[at])
            at = (at + 1) % len(queue)
        self.hand = queue[at + 1] if at + 1 < len(queue) else None
        return queue[at]


class Slru(Pool):
    """Segments from the lowest up, each oldest first."""

    def __init__(self, *setting, segments=2, protected=0.5, lowest=False, touch=False, by_id=False) -> None:
        super().__init__(*setting)
        self.by_id, self.step_of = by_id, dict[int, int]()
        upper = int(self.capacity * protected / (segments - 1))
        self.room = [self.capacity - upper * (segments - 1), *[upper] * (segments - 1)]
        self.segments, self.lowest, self.touch = [list[int]() for _ in range(segments)], lowest, touch

    def held(self, i: int) -> int:
        return sum(self.size[x] for x in self.segments[i])

    def _to(self, i: int, x: int) -> None:
        for segment in self.segments:
            if x in segment:
                segment.remove(x)
        self.segments[i].append(x)
        for upper in range(i, 0, -1):
            while self.held(upper) > self.room[upper]:
                self.segments[upper - 1].append(self.segments[upper].pop(0))

    def where(self, x: int) -> int:
        return next(i for i, segment in enumerate(self.segments) if x in segment)

    def used(self, x: int, hit: bool) -> None:
        if x in self.residents:
            self._to(min(self.where(x) + hit, len(self.segments) - 1), x)

    def named(self, x: int) -> None:
        if self.touch:
            self._to(self.where(x), x)

    def arrived(self, x: int, prefetched: bool) -> None:
        fits = [i for i in range(len(self.segments)) if self.held(i) + self.size[x] <= self.room[i]]
        segment = self.segments[fits[0] if self.lowest and fits else 0]
        self.step_of[x], at = len(self.gates), len(segment)
        while self.by_id and at and segment[at - 1] > x and self.step_of[segment[at - 1]] == len(self.gates):
            at -= 1
        segment.insert(at, x)

    def victim(self, candidates: list[int], x: int) -> int:
        return next(y for segment in self.segments for y in segment if y in candidates)

    def left(self, x: int) -> None:
        self.segments[self.where(x)].remove(x)


class S3Fifo(Pool):
    """Algorithm 1 of Yang et al., SOSP 2023: READ, INSERT, EVICT, EVICTS and EVICTM; queues oldest first."""

    def __init__(self, *setting, small=0.1, ghost=0.9, threshold=2, fill_main=False) -> None:
        super().__init__(*setting)
        self.small_room, self.ghost_room = int(self.capacity * small), int(self.capacity * ghost)
        self.threshold, self.filling = threshold, fill_main
        self.s, self.m, self.g = list[int](), list[int](), list[int]()
        self.freq, self.returning = dict[int, int](), set[int]()

    def bytes_of(self, queue: list[int]) -> int:
        return sum(self.size[x] for x in queue)

    def used(self, x: int, hit: bool) -> None:
        if hit:
            self.freq[x] += 1
        if x in self.g:
            self.g.remove(x)
            self.returning.add(x)

    def arrived(self, x: int, prefetched: bool) -> None:
        if x in self.g:
            self.g.remove(x)
        full = self.filling and self.bytes_of(self.s) >= self.small_room
        (self.m if x in self.returning or full else self.s).append(x)
        self.returning.discard(x)
        self.freq[x] = 0

    def victim(self, candidates: list[int], x: int) -> int:
        main_first = self.bytes_of(self.m) > self.capacity - self.small_room
        for evict in (
            (self.evict_main, self.evict_small, self.evict_main) if main_first else (self.evict_small, self.evict_main)
        ):
            leaving = evict(candidates)
            if leaving is not None:
                return leaving
        raise AssertionError("nothing may leave")

    def evict_small(self, candidates: list[int]) -> int | None:
        for x in [x for x in self.s if x in candidates]:
            if self.freq[x] < self.threshold:
                return x
            self.s.remove(x)
            self.m.append(x)
            self.freq[x] = 0
        return None

    def evict_main(self, candidates: list[int]) -> int | None:
        while mine := [x for x in self.m if x in candidates]:
            if self.freq[mine[0]] == 0:
                return mine[0]
            self.m.remove(mine[0])
            self.m.append(mine[0])
            self.freq[mine[0]] = min(self.freq[mine[0]], 3) - 1
        return None

    def left(self, x: int) -> None:
        self.filling = False
        if x in self.s:
            self.s.remove(x)
            self.g.append(x)
        else:
            self.m.remove(x)
        while self.bytes_of(self.g) > self.ghost_room:
            self.g.pop(0)


class Lirs(Pool):
    """Section 3 of Jiang & Zhang, SIGMETRICS 2002: stack S and queue Q as lists, bottom and front first."""

    def __init__(self, *setting, hir=0.01) -> None:
        super().__init__(*setting)
        self.s, self.q, self.lir = list[int](), list[int](), set[int]()
        self.share, self.returning = hir, set[int]()

    def room(self, x: int) -> int:
        return self.capacity - max(int(self.capacity * self.share), self.size[x])

    def held(self) -> int:
        return sum(self.size[y] for y in self.lir)

    def used(self, x: int, hit: bool) -> None:
        in_s = x in self.s
        self._to_top(x)
        if x not in self.residents:
            self.returning.discard(x)
            self.returning |= {x} if in_s else set()
        elif x in self.lir or in_s or self.held() + self.size[x] <= self.room(x):
            self._to_lir(x)
        else:
            self._to_q(x)
        self._prune()

    def arrived(self, x: int, prefetched: bool) -> None:
        if x in self.returning or (not prefetched and self.held() + self.size[x] <= self.room(x)):
            self._to_top(x)
            self._to_lir(x)
        else:
            if not prefetched:
                self._to_top(x)
            self._to_q(x)
        self.returning.discard(x)
        self._shrink(x)
        self._prune()

    def victim(self, candidates: list[int], x: int) -> int:
        by_recency = [*(y for y in self.q if y in candidates), *(y for y in self.s if y in candidates)]
        return by_recency[0]

    def left(self, x: int) -> None:
        """It stays in S, as a non-resident HIR, unless it was the LIR at the bottom."""
        self.lir.discard(x)
        if x in self.q:
            self.q.remove(x)
        self._prune()

    def _to_top(self, x: int) -> None:
        self.s = [*(y for y in self.s if y != x), x]

    def _to_q(self, x: int) -> None:
        self.q = [*(y for y in self.q if y != x), x]

    def _to_lir(self, x: int) -> None:
        self.q = [y for y in self.q if y != x]
        self.lir.add(x)
        self._shrink(x)

    def _shrink(self, x: int) -> None:
        while self.held() > self.room(x):
            bottom = next(y for y in self.s if y in self.lir)
            self.lir.remove(bottom)
            self._to_q(bottom)
            self._prune()

    def _prune(self) -> None:
        """The bottom of S is a LIR; what was below it has left S."""
        while self.s and self.s[0] not in self.lir:
            self.s.pop(0)


class TinyLfu(Pool):
    """Einziger et al.: a window, a main part in two segments, and counts of up to 15; lists oldest first."""

    decides_once = True

    def __init__(self, *setting, window=0.01, protected=0.8, sample=10) -> None:
        super().__init__(*setting)
        self.share, self.protected_share, self.sample = window, protected, sample
        self.may_decline = window == 0
        self.window, self.probation, self.protected = list[int](), list[int](), list[int]()
        self.counts, self.counted = dict[int, int](), 0

    def room(self, x: int) -> int:
        return max(int(self.capacity * self.share), self.size[x]) if self.share else 0

    def bytes_of(self, *parts: list[int]) -> int:
        return sum(self.size[x] for part in parts for x in part)

    def used(self, x: int, hit: bool) -> None:
        self.counts[x] = min(15, self.counts.get(x, 0) + 1)
        self.counted += 1
        if self.counted >= self.sample * max(1, self.capacity // self.size[x]):
            self.counts, self.counted = {y: n // 2 for y, n in self.counts.items()}, self.counted // 2
        if hit and x in self.probation:
            self.probation.remove(x)
            self.protected.append(x)
            while self.bytes_of(self.protected) > int((self.capacity - self.room(x)) * self.protected_share):
                self.probation.append(self.protected.pop(0))
        else:
            for part in (self.window, self.probation, self.protected):
                if x in part:
                    part.remove(x)
                    part.append(x)

    def arrived(self, x: int, prefetched: bool) -> None:
        (self.window if self.share else self.probation).append(x)

    def victim(self, candidates: list[int], x: int) -> int:
        main_room = self.capacity - self.room(x)
        while self.window and self.bytes_of(self.window, [x]) > self.room(x):
            if self.bytes_of(self.probation, self.protected, self.window[:1]) > main_room:
                break
            self.probation.append(self.window.pop(0))
        leaving = [y for y in (*self.probation, *self.protected) if y in candidates]
        challengers = [y for y in self.window if y in candidates]
        if not leaving or not challengers or self.bytes_of(self.window, [x]) <= self.room(x):
            return (leaving or challengers)[0]
        if not self.lets_in(challengers[0], leaving[0]):
            return challengers[0]
        self.window.remove(challengers[0])
        self.probation.append(challengers[0])
        return leaving[0]

    def lets_in(self, x: int, leaving: int) -> bool:
        return self.counts.get(x, 0) > self.counts.get(leaving, 0)

    def left(self, x: int) -> None:
        next(part for part in (self.window, self.probation, self.protected) if x in part).remove(x)
