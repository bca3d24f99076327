"""Slow, obvious models of whole replays under a prefetch policy, written from the definitions and not from the code.

The policies modelled predict by look-ahead scores alone, so all predictions are known before the replay. `Cache` is an
LRU of copies in lists and sets; `Unhurried` replays where compute is so slow that every transfer lands before it is
needed, and so needs no clock. `tests/kit/policy_models_timed.py` has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from moereplay.traces.routers import scores, to_units
from moereplay.traces.schema import Trace
from tests.kit.policy_models import named

Expert = tuple[int, int]  #: layer, expert
Copy = tuple[int, int, int]  #: layer, expert, precision
Moment = tuple[int, int]  #: pass, layer
Entry = tuple[int, str, int, int, int, int]  #: time, kind, pass, layer, expert, precision

#: Counters that are not called like their kind of event.
COUNTED = {"evict": "evictions", "cancel": "prefetch_cancelled", "drop": "prefetch_dropped"}


class Rules(NamedTuple):
    """The settings of a replay; eviction is LRU."""

    room: int  #: bytes of a pool
    sizes: Sequence[int]  #: bytes of a copy by precision
    per_layer: bool = False
    buffers: int = 0  #: side buffers; 0: prefetches go into the pool
    sequential: bool = False
    after_demand: bool = False  #: prefetches are suggested at the end of a step
    free_only: bool = False  #: a prefetch may not evict


class Step(NamedTuple):
    """One step, and what the prefetch policy suggests at it."""

    step_pass: int
    layer: int
    demand: list[int]  #: in demand order
    wants: list[int]  #: the precision that will do, by place in the demand
    names: list[Expert]  #: in queue order


class Namer(NamedTuple):
    """A prefetch policy's definition: which experts one token's scores of one later layer name."""

    picks: Callable[[Sequence[int]], Collection[int]]
    depth: int = 1  #: layers ahead
    own_scores: bool = False  #: this layer's scores stand for the later layers'


def steps_of(trace: Trace, prompt: int, namer: Namer, wants: Callable[[int], list[int]]) -> list[Step]:
    """Every step in run order; `wants` says the precisions for so many demanded experts."""
    return [
        Step(step_pass, layer, demand, wants(len(demand)), names_at(trace, rows, layer, namer))
        for step_pass, rows in enumerate(passes_of(trace, prompt))
        for layer in range(trace.geometry.layers)
        for demand in [demand_at(trace, rows, layer)]
    ]


def passes_of(trace: Trace, prompt: int) -> Iterator[range]:
    """Tokens of each pass: of every request the prompt at once, then token by token."""
    for request in range(trace.requests):
        first, last = (int(offset) for offset in trace.request_offsets[request : request + 2])
        decoded = first + min(prompt, last - first)
        if decoded > first:
            yield range(first, decoded)
        yield from (range(t, t + 1) for t in range(decoded, last))


def demand_at(trace: Trace, rows: range, layer: int) -> list[int]:
    """The union over tokens by descending largest gate weight, ties by lowest id."""
    ids, weights = (trace.read(name, rows.start, rows.stop)[:, layer] for name in ("chosen", "weights"))
    largest: dict[int, int] = {}
    for e, weight in zip(ids.ravel().tolist(), to_units(weights).ravel().tolist(), strict=True):
        largest[e] = max(weight, largest.get(e, 0))
    return sorted(largest, key=lambda e: (-largest[e], e))


def names_at(trace: Trace, rows: range, layer: int, namer: Namer) -> list[Expert]:
    """Nearest layer first and none beyond the last; per layer each token's picks, their union, best score first."""
    found: list[Expert] = []
    for target in range(layer + 1, min(layer + namer.depth, trace.geometry.layers - 1) + 1):
        name = "logits" if namer.own_scores else f"lookahead/{target - layer}"
        logits = trace.read(name, rows.start, rows.stop)[:, layer]
        tokens = to_units(scores(trace.geometry.router, logits)).tolist()
        found += [(target, e) for e in named(tokens, [namer.picks(token) for token in tokens])]
    return found


class Cache:
    """Copies in pools and side buffers, whose experts were used when, and a log of what happened."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.now = rules, 0
        self.pool = list[Copy]()  # takes room, from the start of its transfer
        self.buffers = dict[Copy, Moment]()  # the gate that it is for; oldest transfer first
        self.here = set[Copy]()  # of both, what has arrived
        self.by_use = list[Expert]()  # least recent first
        self.unused = set[Copy]()  # prefetched, and not used since
        self.ever, self.left_in = set[Copy](), dict[Copy, int]()
        self.kept, self.computed = list[Copy](), list[Copy]()  # of this step's demand
        self.promised = list[Expert]()  # suggested for later layers of this pass
        self.last_gate: Moment = (-1, -1)
        self.log, self.counts = list[Entry](), Counter[str]()

    def note(self, kind: str, copy: Copy) -> None:
        """Into the log, and into a counter of that name or of its own."""
        self.log.append((self.now, kind, self.step.step_pass, *copy))
        self.counts[COUNTED.get(kind, kind)] += 1

    # a step

    def begin(self, step: Step) -> None:
        """The execution point moves; what the step before used is no longer kept."""
        self.step = step
        self.kept, self.computed = [], []

    def open(self) -> None:
        """The gate: what was promised for this layer comes true, or does not."""
        self.last_gate = (self.step.step_pass, self.step.layer)
        mine = [e for layer, e in self.promised if layer == self.step.layer]
        self.promised = [name for name in self.promised if name[0] != self.step.layer]
        self.counts["predicted_demanded"] += sum(e in self.step.demand for e in mine)

    def look_up(self, n: int) -> tuple[str, Copy]:
        """Return the class of the n-th demanded expert, and the copy that will serve it."""
        good = [(self.step.layer, self.step.demand[n], tier) for tier in range(self.step.wants[n] + 1)]
        kind, copy = self.classified(good)
        self.note(kind, copy)
        return kind, copy

    def classified(self, good: list[Copy]) -> tuple[str, Copy]:
        """`good` are the copies that would do, most precise first; the last of them is what a miss fetches."""
        resident, taken = ([copy for copy in good if copy in place] for place in (self.here, self.taken))
        if resident or taken:
            return ("hits", resident[0]) if resident else ("late", taken[0])
        self.counts["misses"] += 1
        if not self.ever.intersection(good):
            return "compulsory", good[-1]
        latest = max(self.left_in.get(copy, -1) for copy in good)
        return "collisions" if latest == self.step.step_pass else "capacity", good[-1]

    @property
    def taken(self) -> list[Copy]:
        return [*self.pool, *self.buffers]

    def use(self, copy: Copy) -> None:
        """Demanded: the most recent of all, and no victim in this step."""
        self.refresh(copy)
        self.kept.append(copy)
        if copy in self.unused:
            self.unused.remove(copy)
            self.counts.update(["prefetch_hits", "prefetch_used"])

    def refresh(self, copy: Copy) -> None:
        """Recency is an expert's, whatever its precision."""
        self.by_use = [*(expert for expert in self.by_use if expert != copy[:2]), copy[:2]]

    def names(self, queued: Collection[Copy]) -> list[Copy]:
        """Return the suggestions of this step to fetch: those neither resident, on the link nor queued for it."""
        self.promised += self.step.names
        self.counts["predicted"] += len(self.step.names)
        copies = [(layer, e, 0) for layer, e in self.step.names]
        absent = [copy for copy in copies if copy not in self.taken and copy not in queued]
        self.counts["prefetch_issued"] += len(absent)
        return absent

    # room

    def size(self, copy: Copy) -> int:
        """Bytes."""
        return self.rules.sizes[copy[2]]

    def beside(self, copy: Copy) -> list[Copy]:
        """Return the copies that occupy the pool of the copy."""
        return [other for other in self.pool if other[0] == copy[0] or not self.rules.per_layer]

    def short(self, copy: Copy) -> int:
        """Bytes that are missing for it; nothing is missing at 0 or below."""
        return sum(map(self.size, self.beside(copy))) + self.size(copy) - self.rules.room

    def loose(self, copy: Copy) -> list[Copy]:
        """Residents of its pool that this step does not use."""
        return [other for other in self.beside(copy) if other in self.here and other not in self.kept]

    def last_resort(self, copy: Copy) -> list[Copy]:
        """Those that this step has used and computed already; only a demand may push them out."""
        return [other for other in self.beside(copy) if other in self.computed and other in self.kept]

    def make_room(self, copy: Copy, prefetch: bool = False) -> bool:
        """Evict the least recently used until it fits, or nothing if that would not do."""
        if self.short(copy) > 0 and prefetch and self.rules.free_only:
            return False
        could_leave = self.loose(copy) + ([] if prefetch else self.last_resort(copy))
        if self.short(copy) > sum(map(self.size, could_leave)):
            return False
        while self.short(copy) > 0:
            leaving = self.loose(copy) or self.last_resort(copy)
            oldest = min(leaving, key=lambda other: (self.by_use.index(other[:2]), other))
            self.pool.remove(oldest)
            self.leave(oldest)
        return True

    def leave(self, copy: Copy) -> None:
        """The counters of an eviction, from a pool or a side buffer."""
        self.here.remove(copy)
        self.note("evict", copy)
        self.left_in[copy] = self.step.step_pass
        self.kept, self.computed = ([other for other in some if other != copy] for some in (self.kept, self.computed))
        if copy in self.unused:
            self.unused.remove(copy)
            self.counts["bytes_wasted"] += self.size(copy)

    def make_buffer_free(self) -> bool:
        """The oldest side buffer is overwritten whose gate has passed and whose copy is not in use."""
        if len(self.buffers) < self.rules.buffers:
            return True
        over = [copy for copy, gate in self.buffers.items() if gate <= self.last_gate and copy in self.here]
        over = [copy for copy in over if copy not in self.kept]
        if over:
            del self.buffers[over[0]]
            self.leave(over[0])
        return bool(over)

    # transfers

    def take_demand(self, copy: Copy) -> bool:
        """A demand's transfer starts, if there is room."""
        if not self.make_room(copy):
            return False
        self.pool.append(copy)
        self.note("transfer", copy)
        return True

    def take_prefetch(self, copy: Copy) -> bool:
        """A prefetch's transfer starts, or it is dropped."""
        if not (self.make_buffer_free() if self.rules.buffers else self.make_room(copy, prefetch=True)):
            self.note("drop", copy)
            return False
        if self.rules.buffers:
            self.buffers[copy] = (self.step.step_pass, copy[0])
        else:
            self.pool.append(copy)
        self.counts["prefetch_started"] += 1
        self.note("transfer", copy)
        return True

    def arrive(self, copy: Copy, unused: bool) -> None:
        """A transfer ends. Nobody has used a prefetch yet, so its arrival is what makes it recent."""
        self.here.add(copy)
        self.ever.add(copy)
        self.counts["insertions"] += 1
        if unused:
            self.unused.add(copy)
            self.refresh(copy)
        else:
            self.promote(copy)

    def promote(self, copy: Copy) -> None:
        """A demanded copy moves from its side buffer into the cache, if room can be made."""
        if copy in self.buffers and self.make_room(copy):
            del self.buffers[copy]
            self.pool.append(copy)
            self.note("promote", copy)


class Unhurried:
    """Replays where every transfer takes no time in the eyes of compute."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.cache = rules, Cache(rules)

    def play(self, steps: Sequence[Step]) -> None:
        """Every step."""
        for step in steps:
            self.cache.begin(step)
            self.cache.open()
            (self.one_by_one if self.rules.sequential else self.together)(step)
            if self.rules.after_demand:
                self.cache.begin(step)  # the step has ended: nothing of it is kept
                self.prefetch(self.cache.names(queued=()))

    def together(self, step: Step) -> None:
        """All are looked up and used; then the link brings what is missing, then what was predicted."""
        found = [self.cache.look_up(n) for n in range(len(step.demand))]
        for _, copy in found:
            self.cache.use(copy)
        for kind, copy in found:
            if kind == "hits":
                self.cache.promote(copy)
        absent = [] if self.rules.after_demand else self.cache.names(queued=())
        running = [copy for kind, copy in found if kind == "hits"]
        for kind, copy in found:
            if kind != "hits":
                self.fetch(copy, running)
        self.prefetch(absent)

    def fetch(self, copy: Copy, running: list[Copy]) -> None:
        """A demand without room waits until compute has finished so much of the step's demand that it may leave."""
        while not self.cache.take_demand(copy):
            self.cache.computed.append(running.pop(0))
        self.cache.arrive(copy, unused=False)
        running.append(copy)

    def one_by_one(self, step: Step) -> None:
        """The suggestions are fetched while the first expert is computed."""
        absent = [] if self.rules.after_demand else self.cache.names(queued=())
        for n in range(len(step.demand)):
            kind, copy = self.cache.look_up(n)
            self.cache.use(copy)
            if kind == "hits":
                self.cache.promote(copy)
            else:
                self.fetch(copy, [])
            self.prefetch(absent)
            absent = []
            self.cache.kept = []

    def prefetch(self, absent: list[Copy]) -> None:
        """One after the other, each landing before the next."""
        for copy in absent:
            if self.cache.take_prefetch(copy):
                self.cache.arrive(copy, unused=True)
