"""What any of the four policies may listen to; told in the order routing, prefetch, eviction, miss."""

from __future__ import annotations

from simulator.compiled.jit import called, fast

ROUTING, PREFETCH, EVICTION, MISS = 1, 2, 4, 8


@fast
def gated(w, hands):
    """`on_gate`."""
    heard = w["hears_gate"]
    if heard & ROUTING:
        hands.gate_routing(w)
    if heard & PREFETCH:
        hands.gate_prefetch(w)
    if heard & EVICTION:
        hands.gate_eviction(w)
    if heard & MISS:
        hands.gate_miss(w)


@called
def used(w, hands, y):
    """`on_use`."""
    heard = w["hears_use"]
    if heard & ROUTING:
        hands.use_routing(w, y)
    if heard & PREFETCH:
        hands.use_prefetch(w, y)
    if heard & EVICTION:
        hands.use_eviction(w, y)
    if heard & MISS:
        hands.use_miss(w, y)


@called
def inserted(w, hands, y, prefetched):
    """`on_insert`."""
    heard = w["hears_insert"]
    if heard & ROUTING:
        hands.insert_routing(w, y, prefetched)
    if heard & PREFETCH:
        hands.insert_prefetch(w, y, prefetched)
    if heard & EVICTION:
        hands.insert_eviction(w, y, prefetched)
    if heard & MISS:
        hands.insert_miss(w, y, prefetched)


@called
def evicted(w, hands, y):
    """`on_evict`."""
    heard = w["hears_evict"]
    if heard & ROUTING:
        hands.evict_routing(w, y)
    if heard & PREFETCH:
        hands.evict_prefetch(w, y)
    if heard & EVICTION:
        hands.evict_eviction(w, y)
    if heard & MISS:
        hands.evict_miss(w, y)


@called
def predicted(w, hands, y):
    """`on_predict`."""
    heard = w["hears_predict"]
    if heard & ROUTING:
        hands.predict_routing(w, y)
    if heard & PREFETCH:
        hands.predict_prefetch(w, y)
    if heard & EVICTION:
        hands.predict_eviction(w, y)
    if heard & MISS:
        hands.predict_miss(w, y)
