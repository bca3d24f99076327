"""Input and output of the curve kernels: the demand stream with its resets, its look-ups, the counts, and the stays;
and the most hits for a demand.

A stay is what lies between one use of an expert and its next: the bytes that it occupies if the next use hits. The time
line of a pool is cut into *places*, each with *room* for some bytes. Choosing stays so that those at each place fit its
room is choosing hits; `unequal.py` says how many they can be.

- Relaxed: a place is what lies between two look-ups, with room for the pool's bytes.
- Forced: a place is a look-up, with room for what is left beside the experts that it demands, and a stay lies over the
  look-ups between its two. Where a look-up demands more than the pool holds, nothing stays over it, and another place
  follows, with room for the pool's bytes, on which the experts that it leaves lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moereplay.simulator.config import parse_reset
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called
from moereplay.simulator.threads import check_stop
from moereplay.traces.demand import demand_of
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace
from moereplay.traces.units import NEVER

STEPS_AT_ONCE = 1 << 16  #: per call of a kernel, between which it may be stopped
FIRST_USE = 1 << 62  #: the depth of an expert that has not been used since the start or the last reset
NOWHERE = -1


class Demands(NamedTuple):
    """The demand stream as `traces.demand.Demand` has it; memory-mapped if the trace is on disk."""

    offsets: np.ndarray  #: (P * L + 1,) int64
    expert: np.ndarray  #: (n,) int16, of the layer
    next_use: np.ndarray  #: (n,) int64
    fresh: np.ndarray  #: (P,) bool: the cache is cleared before this pass


class Cut(NamedTuple):
    """Division of the stream into pools and look-ups."""

    layers: int
    experts: int  #: of a layer
    per_layer: bool  #: a pool per layer, or one
    atomic: bool  #: a step's experts are looked up together, or one by one

    @property
    def pools(self) -> int:
        """Number of caches."""
        return self.layers if self.per_layer else 1

    @property
    def units(self) -> int:
        """Experts that share a cache."""
        return self.experts if self.per_layer else self.layers * self.experts


class Tally(NamedTuple):
    """Accesses by the smallest of G rising capacities at which they hit, and steps by that at which all of them do."""

    grid: np.ndarray  #: (G,) int64, in the unit of depths; empty means 1, 2, ... G
    found: np.ndarray  #: (L, G + 2) int64; column G hits at no capacity of the grid, G + 1 is a first use
    complete: np.ndarray  #: likewise, of the steps that demand an expert
    undecided: np.ndarray  #: (G + 1,) int64: +1 at the start of a range of undecided capacities, -1 after its end


def demands_of(trace: Trace, passes: str, reset: str) -> Demands:
    """Return the stream of a trace under a schedule. Raises TraceError or ValueError for an unknown setting."""
    demand = demand_of(trace, passes)
    fresh = resets(schedule(trace, passes), reset)
    return Demands(*(_locked(array) for array in (demand.offsets, demand.expert, demand.next_use, fresh)))


def without(demands: Demands, cut: Cut, resident: Sequence[int]) -> tuple[Demands, np.ndarray]:
    """Return the stream without the demand for some experts x, and the new place of each position; of NEVER last."""
    offsets, steps = np.asarray(demands.offsets), len(demands.offsets) - 1
    layer = np.repeat(np.arange(steps) % cut.layers, np.diff(offsets))
    kept = ~np.isin(layer * cut.experts + demands.expert, list(resident))
    place = np.append(np.cumsum(kept) - 1, NEVER)
    next_use = place[demands.next_use[kept].clip(max=len(kept))]
    counted = np.concatenate([[0], np.cumsum(kept)])[offsets]
    return Demands(*map(_locked, (counted, demands.expert[kept], next_use, demands.fresh))), place


def resets(plan: Passes, reset: str) -> np.ndarray:
    """Return which passes start with an empty cache because of `reset`, (P,); the first one always does."""
    fresh, every = np.zeros(len(plan), bool), parse_reset(reset)
    if every < 0:
        fresh = plan.apart()
    if every > 0:
        begun = 0
        while (begun := int(np.searchsorted(plan.start, plan.start[begun] + every))) < len(plan):
            fresh[begun] = True
    return fresh


def tally(layers: int, capacities: int, grid: np.ndarray | None = None) -> Tally:
    """Return zeros for so many capacities: those of `grid`, or 1, 2, 3 and so on."""
    found, complete = (np.zeros((layers, capacities + 2), np.int64) for _ in range(2))
    return Tally(np.empty(0, np.int64) if grid is None else grid, found, complete, np.zeros(capacities + 1, np.int64))


def spans(demands: Demands, done: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps [first, last); `done` is called with the length of each counted range.

    Raises KeyboardInterrupt before a range if the count is to stop.
    """
    steps = len(demands.offsets) - 1
    for first in range(0, steps, STEPS_AT_ONCE):
        check_stop()
        last = min(first + STEPS_AT_ONCE, steps)
        yield first, last
        done(last - first)


def _locked(array: np.ndarray) -> np.ndarray:
    """Return a plain read-only view, so that memory maps and arrays have one type."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


# stays

ALWAYS = 0  #: the entry of `Line.told` that counts hits which need no room


class Stays(NamedTuple):
    """The n stays of one pool that need room, over P places, in the order in which they begin."""

    begin: np.ndarray  #: (n,) int32: the first place
    end: np.ndarray  #: (n,) int32: the place after the last
    size: np.ndarray  #: (n,) int64: bytes
    room: np.ndarray  #: (P,) int64: bytes
    always: int  #: hits that need no room


class Line(NamedTuple):
    """The time line as far as it has been walked."""

    begin: np.ndarray  #: (m,) int32, a stay for each warm expert and each access
    end: np.ndarray  #: (m,) int32; NOWHERE where no use follows
    size: np.ndarray  #: (m,) int64
    room: np.ndarray  #: (P,) int64
    open: np.ndarray  #: (experts of the model,) int64: the stay that its next use ends, or NOWHERE
    told: np.ndarray  #: (3,) int64: ALWAYS, places and stays so far


def _walk(demands, first, last, cut, sizes, pool, forced, line):
    """Walk steps [first, last): end the stays of what is demanded, and begin new ones."""
    place, stays = line.told[1], line.told[2]
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            line.open[:] = NOWHERE
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together = stop - begin if cut.atomic else 1
        for group in range(begin, stop, max(1, together)):
            after, size = place + 1 if forced else place, np.int64(0)
            for at in range(group, group + together):
                x = layer * cut.experts + np.int64(demands.expert[at])
                if line.open[x] != NOWHERE:
                    line.end[line.open[x]] = place
                line.begin[stays], line.end[stays], line.size[stays] = after, NOWHERE, sizes[x]
                line.open[x] = stays
                stays += 1
                size += sizes[x]
            if forced:
                line.room[place] = max(0, pool[0] - size)
                place += 1
            if not forced or size > pool[0]:
                line.room[place] = pool[0]
                place += 1
    line.told[1], line.told[2] = place, stays


def _keep_real(line):
    """Move the stays that end and need room to the front, in their order; count those that need none."""
    kept = 0
    for n in range(line.told[2]):
        if line.end[n] == NOWHERE:
            continue
        if line.end[n] == line.begin[n]:
            line.told[ALWAYS] += 1
            continue
        line.begin[kept], line.end[kept], line.size[kept] = line.begin[n], line.end[n], line.size[n]
        kept += 1
    line.told[2] = kept


WALK, KEEP_REAL = compiled(_walk), compiled(_keep_real)


def stays_of(
    demands: Demands, cut: Cut, sizes: Sequence[int], pool: int, forced: bool, warm: Sequence[int] = ()
) -> Stays:
    """Return the stays of one pool of all layers.

    `sizes`: the bytes of an expert, by layer, or of every expert x; `pool`: bytes; `warm`: experts of the model that
    are cached at the start.
    """
    each, room = of_every(sizes, cut), np.array([pool], np.int64)
    line = _empty(demands, cut, each, pool, forced, len(warm))
    for n, x in enumerate(warm):
        line.begin[n], line.end[n], line.size[n], line.open[x] = 0, NOWHERE, each[x], n
    line.told[2] = len(warm)
    for first, last in spans(demands, lambda steps: None):
        WALK(demands, first, last, cut, each, room, forced, line)
    KEEP_REAL(line)
    always, places, kept = line.told.tolist()
    return Stays(line.begin[:kept], line.end[:kept], line.size[:kept], line.room[:places], always)


def of_every(sizes: Sequence[int], cut: Cut) -> np.ndarray:
    """Return the bytes of every expert x (L * E,) int64, given these, or those by layer."""
    return np.repeat(np.array(sizes, np.int64), cut.layers * cut.experts // len(sizes))


def step_bytes(demands: Demands, cut: Cut, sizes: np.ndarray) -> np.ndarray:
    """Return the bytes that each step demands, given those of every expert x."""
    layer = np.repeat(np.arange(len(demands.offsets) - 1) % cut.layers, np.diff(demands.offsets))
    ends = np.concatenate([[0], np.cumsum(sizes[layer * cut.experts + demands.expert])])
    return ends[demands.offsets[1:]] - ends[demands.offsets[:-1]]


def _empty(demands: Demands, cut: Cut, sizes: np.ndarray, pool: int, forced: bool, warm: int) -> Line:
    many = np.diff(demands.offsets)
    stays, looked_up = int(demands.offsets[-1]) + warm, np.count_nonzero(many) if cut.atomic else int(many.sum())
    beyond = int(np.count_nonzero(step_bytes(demands, cut, sizes) > pool)) if forced and cut.atomic else 0
    places = np.zeros(looked_up + beyond + 1, np.int64)
    begin, end = np.zeros(stays, np.int32), np.zeros(stays, np.int32)
    open_ = np.full(cut.layers * cut.experts, NOWHERE, np.int64)
    return Line(begin, end, np.zeros(stays, np.int64), places, open_, np.zeros(3, np.int64))


# -- The most hits at one capacity, by any eviction that knows the future, for experts of equal bytes.
#
# `FORCED`: the demand of a step stays, as far as it fits; of the rest, the experts with the nearest next uses.
# `RELAXED`: after a step a pool keeps the best of what it held and what the step demanded, whether or not the fast tier
# could have held both at once. A heap per pool has the farthest next use on top; entries of what has left or was used
# since are passed over.

HITS, ACCESSES, COMPULSORY = range(3)
OUT = -1  #: the key of an expert that is not cached


class Pools(NamedTuple):
    """The cached experts. A key is next use << bits | expert, so that one comparison also settles ties."""

    slots: np.ndarray  #: (pools,) int64: how many experts each holds
    held: np.ndarray  #: (pools,) int64: how many are cached
    heap: np.ndarray  #: (pools, room) int64: keys, the largest first
    entries: np.ndarray  #: (pools,) int64: of the heap
    key: np.ndarray  #: (experts,) int64: of each expert of the model, or OUT
    ever: np.ndarray  #: (experts,) int8: 1 once it has been cached


@called
def rise(heap, at):
    """Put a new entry where it belongs."""
    while at > 0 and heap[(at - 1) >> 1] < heap[at]:
        heap[(at - 1) >> 1], heap[at] = heap[at], heap[(at - 1) >> 1]
        at = (at - 1) >> 1


@called
def sink(heap, entries):
    """Put the entry on top where it belongs."""
    at = 0
    while 2 * at + 1 < entries:
        child = 2 * at + 1
        if child + 1 < entries and heap[child + 1] > heap[child]:
            child += 1
        if heap[at] >= heap[child]:
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@called
def _forget_stale(pools, pool, ids):
    """Make space in the heap: keep the entries of cached experts only."""
    heap, kept = pools.heap[pool], 0
    for at in range(pools.entries[pool]):
        if pools.key[heap[at] & ids] == heap[at]:
            heap[kept] = heap[at]
            rise(heap, kept)
            kept += 1
    pools.entries[pool] = kept


@called
def put_in(pools, pool, x, next_use, bits):
    """Cache an expert until `next_use`, if space can be found."""
    heap = pools.heap[pool]
    if pools.entries[pool] == len(heap):
        _forget_stale(pools, pool, (1 << bits) - 1)
    key = next_use << bits | x
    pools.key[x], pools.ever[x] = key, 1
    heap[pools.entries[pool]] = key
    rise(heap, pools.entries[pool])
    pools.entries[pool] += 1
    pools.held[pool] += 1


@called
def keep(pools, pool, most, ids):
    """Evict the farthest next uses until at most `most` are cached."""
    heap = pools.heap[pool]
    while pools.held[pool] > most:
        key = heap[0]
        pools.entries[pool] -= 1
        heap[0] = heap[pools.entries[pool]]
        sink(heap, pools.entries[pool])
        if pools.key[key & ids] == key:
            pools.key[key & ids] = OUT
            pools.held[pool] -= 1


@called
def take_out(pools, pool, x, counts):
    """Count an access; the used expert gets a new entry."""
    counts[ACCESSES] += 1
    counts[COMPULSORY] += 1 - pools.ever[x]
    if pools.key[x] != OUT:
        counts[HITS] += 1
        pools.key[x] = OUT
        pools.held[pool] -= 1


@called
def look_up(demands, begin, end, pool, base, bits, forced, pools, counts):
    """Look up demands [begin, end) together, evict victims if all must fit, and insert the ones that are kept."""
    ids, never = (1 << bits) - 1, np.int64(1) << (61 - bits)
    for at in range(begin, end):
        take_out(pools, pool, base + np.int64(demands.expert[at]), counts)
    if forced:
        keep(pools, pool, max(0, pools.slots[pool] - (end - begin)), ids)
    for at in range(begin, end):
        put_in(pools, pool, base + np.int64(demands.expert[at]), min(demands.next_use[at], never), bits)
    keep(pools, pool, pools.slots[pool], ids)


def _count_hits(demands, first, last, cut, bits, forced, pools, counts):
    """Count over steps [first, last)."""
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            pools.held[:], pools.entries[:], pools.key[:], pools.ever[:] = 0, 0, OUT, 0
        pool, base = layer if cut.per_layer else 0, layer * cut.experts
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together = stop - begin if cut.atomic else 1
        for group in range(begin, stop, max(1, together)):
            look_up(demands, group, group + together, pool, base, bits, forced, pools, counts)


COUNT_HITS = compiled(_count_hits)


def count(
    demands: Demands, cut: Cut, slots: Sequence[int], forced: bool, warm: Sequence[tuple[int, int]] = ()
) -> tuple[int, int, int]:
    """Count hits, accesses and compulsory misses.

    `slots` experts fit each pool; `warm` are cached first: (x, its first use). Compulsory misses are those of experts
    that were not resident since the start or the last reset.
    """
    experts, counts = cut.layers * cut.experts, np.zeros(3, np.int64)
    bits = experts.bit_length()
    pools = started(cut, slots, keys(warm, cut))
    for first, last in spans(demands, lambda steps: None):
        COUNT_HITS(demands, first, last, cut, bits, forced, pools, counts)
    hits, accesses, compulsory = counts.tolist()
    return hits, accesses, compulsory


def keys(held: Sequence[tuple[int, int]], cut: Cut) -> list[int]:
    """Return the keys of (expert of the model, its next use), the largest first."""
    bits = (cut.layers * cut.experts).bit_length()
    return sorted((min(use, 1 << (61 - bits)) << bits | x for x, use in held), reverse=True)


def started(cut: Cut, slots: Sequence[int], warm: Sequence[int]) -> Pools:
    """Return pools with the experts of these keys in descending order, which is a heap."""
    room, experts = 4 * cut.units + 1, cut.layers * cut.experts
    held, entries = np.zeros(cut.pools, np.int64), np.zeros(cut.pools, np.int64)
    heap, key = np.zeros((cut.pools, room), np.int64), np.full(experts, OUT, np.int64)
    pools = Pools(np.array(slots, np.int64), held, heap, entries, key, np.zeros(experts, np.int8))
    for each in warm:
        x = each & ((1 << experts.bit_length()) - 1)
        pool = x // cut.experts if cut.per_layer else 0
        heap[pool, entries[pool]], key[x], pools.ever[x] = each, each, 1
        held[pool], entries[pool] = held[pool] + 1, entries[pool] + 1
    return pools
