"""LRU replays in plain Python with the semantics of two published tools, each written anew and as short as it can be.

A gate is the experts of one layer that one token needs, numbered across layers; each takes one of `slots`. All replays
return their hits. They know neither time nor link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

Gates = Sequence[Sequence[int]]


def scanned(gates: Gates, slots: int) -> int:
    """Replay as BigMoeOnEdge does: a gate's experts become resident, then others leave, each found by a scan of all."""
    last_use: dict[int, int] = {}
    clock = hits = 0
    for gate in gates:
        for expert in gate:
            clock += 1
            hits += expert in last_use
            last_use[expert] = clock
        while len(last_use) > slots:
            others = [expert for expert in last_use if expert not in gate]
            if not others:
                break
            del last_use[min(others, key=lambda expert: last_use[expert])]
    return hits


def ranked(gates: Gates, slots: int) -> int:
    """Replay events of moe-cache-eval, at once: hits against the cache before, then the best of old and new stay."""
    experts = 1 + max(map(max, gates))
    cached, last_use = np.zeros(experts, bool), np.full(experts, -1)
    ties = np.random.default_rng(0).random(experts)
    hits = 0
    for event, gate in enumerate(map(np.asarray, gates)):
        hits += int(cached[gate].sum())
        last_use[gate] = event
        kept = np.union1d(np.flatnonzero(cached), gate)
        if len(kept) > slots:
            kept = kept[np.lexsort((ties[kept], -last_use[kept]))[:slots]]
        cached[:] = False
        cached[kept] = True
    return hits


def queued(gates: Gates, slots: int) -> int:
    """Replay accesses of moe-cache-eval, one by one, with a heap of last uses from which old entries are dropped."""
    last_use: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    clock = hits = 0
    for gate in gates:
        for expert in gate:
            clock += 1
            if expert in last_use:
                hits += 1
            elif len(last_use) == slots:
                used, victim = heappop(heap)
                while last_use.get(victim) != used:
                    used, victim = heappop(heap)
                del last_use[victim]
            last_use[expert] = clock
            heappush(heap, (clock, expert))
    return hits


#: By the tool whose semantics they have.
TOOLS: dict[str, Callable[[Gates, int], int]] = {
    "BigMoeOnEdge": scanned,
    "moe-cache-eval, events": ranked,
    "moe-cache-eval, accesses": queued,
}
