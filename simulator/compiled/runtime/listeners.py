"""What any of the four policies may listen to; told in the order routing, prefetch, eviction, miss."""

from __future__ import annotations

from simulator.compiled.runtime.jit import called, fast

ROUTING, PREFETCH, EVICTION, MISS = 1, 2, 4, 8


@fast
def gated(w, hooks):
    """`on_gate`."""
    heard = w["hears_gate"]
    if heard & ROUTING:
        hooks.gate_routing(w)
    if heard & PREFETCH:
        hooks.gate_prefetch(w)
    if heard & EVICTION:
        hooks.gate_eviction(w)
    if heard & MISS:
        hooks.gate_miss(w)


@called
def used(w, hooks, y):
    """`on_use`."""
    heard = w["hears_use"]
    if heard & ROUTING:
        hooks.use_routing(w, y)
    if heard & PREFETCH:
        hooks.use_prefetch(w, y)
    if heard & EVICTION:
        hooks.use_eviction(w, y)
    if heard & MISS:
        hooks.use_miss(w, y)


@called
def inserted(w, hooks, y, prefetched):
    """`on_insert`."""
    heard = w["hears_insert"]
    if heard & ROUTING:
        hooks.insert_routing(w, y, prefetched)
    if heard & PREFETCH:
        hooks.insert_prefetch(w, y, prefetched)
    if heard & EVICTION:
        hooks.insert_eviction(w, y, prefetched)
    if heard & MISS:
        hooks.insert_miss(w, y, prefetched)


@called
def evicted(w, hooks, y):
    """`on_evict`."""
    heard = w["hears_evict"]
    if heard & ROUTING:
        hooks.evict_routing(w, y)
    if heard & PREFETCH:
        hooks.evict_prefetch(w, y)
    if heard & EVICTION:
        hooks.evict_eviction(w, y)
    if heard & MISS:
        hooks.evict_miss(w, y)


@called
def predicted(w, hooks, y):
    """`on_predict`."""
    heard = w["hears_predict"]
    if heard & ROUTING:
        hooks.predict_routing(w, y)
    if heard & PREFETCH:
        hooks.predict_prefetch(w, y)
    if heard & EVICTION:
        hooks.predict_eviction(w, y)
    if heard & MISS:
        hooks.predict_miss(w, y)
