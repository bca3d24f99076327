"""Events, told to the policies that subscribe to them: in the order routing, prefetch, eviction, miss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from policies.hooks import HOOKS
from simulator.compiled.runtime.jit import called

ROUTING, PREFETCH, EVICTION, MISS = 1, 2, 4, 8


@cache
def teller(event: str) -> Callable:
    """A function of the state, the bound hooks and what the event's hook takes: it calls the hook of each listener."""
    listeners, pointers = f"{event}_listeners", list(HOOKS).index(event)

    @called
    def tell(s, hooks, *numbers):
        who = s[listeners]
        if who & ROUTING:
            hooks[pointers][0](s, *numbers)
        if who & PREFETCH:
            hooks[pointers][1](s, *numbers)
        if who & EVICTION:
            hooks[pointers][2](s, *numbers)
        if who & MISS:
            hooks[pointers][3](s, *numbers)

    return tell
