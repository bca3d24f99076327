"""Events that any of the four policies may subscribe to; told in the order routing, prefetch, eviction, miss."""

from __future__ import annotations

from simulator.compiled.runtime.jit import called, fast

ROUTING, PREFETCH, EVICTION, MISS = 1, 2, 4, 8


@fast
def gated(s, hooks):
    """`on_gate`."""
    who = s["gate_listeners"]
    if who & ROUTING:
        hooks.gate_routing(s)
    if who & PREFETCH:
        hooks.gate_prefetch(s)
    if who & EVICTION:
        hooks.gate_eviction(s)
    if who & MISS:
        hooks.gate_miss(s)


@called
def used(s, hooks, y):
    """`on_use`."""
    who = s["use_listeners"]
    if who & ROUTING:
        hooks.use_routing(s, y)
    if who & PREFETCH:
        hooks.use_prefetch(s, y)
    if who & EVICTION:
        hooks.use_eviction(s, y)
    if who & MISS:
        hooks.use_miss(s, y)


@called
def inserted(s, hooks, y, prefetched):
    """`on_insert`."""
    who = s["insert_listeners"]
    if who & ROUTING:
        hooks.insert_routing(s, y, prefetched)
    if who & PREFETCH:
        hooks.insert_prefetch(s, y, prefetched)
    if who & EVICTION:
        hooks.insert_eviction(s, y, prefetched)
    if who & MISS:
        hooks.insert_miss(s, y, prefetched)


@called
def evicted(s, hooks, y):
    """`on_evict`."""
    who = s["evict_listeners"]
    if who & ROUTING:
        hooks.evict_routing(s, y)
    if who & PREFETCH:
        hooks.evict_prefetch(s, y)
    if who & EVICTION:
        hooks.evict_eviction(s, y)
    if who & MISS:
        hooks.evict_miss(s, y)


@called
def predicted(s, hooks, y):
    """`on_predict`."""
    who = s["predict_listeners"]
    if who & ROUTING:
        hooks.predict_routing(s, y)
    if who & PREFETCH:
        hooks.predict_prefetch(s, y)
    if who & EVICTION:
        hooks.predict_eviction(s, y)
    if who & MISS:
        hooks.predict_miss(s, y)
