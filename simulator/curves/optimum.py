"""The most hits at one capacity for a given demand, by any eviction that knows the future, for experts of equal bytes.

`FORCED`: the demand of a step stays, as far as it fits; of the rest, the experts with the nearest next uses.
`RELAXED`: after a step a pool keeps the best of what it held and what the step demanded, whether or not the fast tier
could have held both at once. A heap per pool has the farthest next use on top; entries of what has left or was used
since are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import Cut, Demands, spans
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called

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


def _walk(demands, first, last, cut, bits, forced, pools, counts):
    """Walk steps [first, last)."""
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            pools.held[:], pools.entries[:], pools.key[:], pools.ever[:] = 0, 0, OUT, 0
        pool, base = layer if cut.per_layer else 0, layer * cut.experts
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together = stop - begin if cut.atomic else 1
        for group in range(begin, stop, max(1, together)):
            look_up(demands, group, group + together, pool, base, bits, forced, pools, counts)


WALK = compiled(_walk)


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
        WALK(demands, first, last, cut, bits, forced, pools, counts)
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
