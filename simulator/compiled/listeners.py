"""Events, passed to the policies that listen, in the order of `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from moereplay.policies.hooks import HOOKS, KINDS
from moereplay.simulator.jit.marks import called

ROUTING, PREFETCH, EVICTION, MISS = (1 << at for at in range(len(KINDS)))


@cache
def notifier(event: str) -> Callable:
    """A function of the state, the bound hooks and what the event's hook takes: it calls the hook of each listener."""
    listeners, pointers = f"listeners_{event}", list(HOOKS).index(event)

    @called
    def notify(s, hooks, *numbers):
        listening = s[listeners]
        if listening & ROUTING:
            hooks[pointers][0](s, *numbers)
        if listening & PREFETCH:
            hooks[pointers][1](s, *numbers)
        if listening & EVICTION:
            hooks[pointers][2](s, *numbers)
        if listening & MISS:
            hooks[pointers][3](s, *numbers)

    return notify
