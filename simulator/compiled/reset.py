"""Start, reset and end: what is resident before, what is forgotten, and what was never used."""

from __future__ import annotations

from moereplay.policies.contract import RESIDENT
from moereplay.simulator.compiled import listeners
from moereplay.simulator.compiled.cache import clear_cache, warm_copy
from moereplay.simulator.compiled.counters import BYTES_UNUSED_AT_END, count
from moereplay.simulator.compiled.links import clear_links
from moereplay.simulator.compiled.log import BY_RESET, IS_RESET, NO_COPY, note
from moereplay.simulator.compiled.queues import clear_queues
from moereplay.simulator.compiled.ranking import clear_ranking
from moereplay.simulator.compiled.side_buffer import clear_side_buffers
from moereplay.simulator.compiled.state import (
    copies,
    layer_of,
    own_eviction,
    own_miss,
    own_prefetch,
    own_routing,
    pass_apart,
    pass_tokens,
    warm,
)
from moereplay.simulator.compiled.uses import clear_uses
from moereplay.simulator.jit.marks import called

on_insert = listeners.notifier("on_insert")


@called
def warm_up(s, hooks):
    """What is resident before the start."""
    for i in range(s["n_warm"]):
        y = warm(s)[i]
        warm_copy(s, y)
        if s["listeners_on_insert"] != 0:
            on_insert(s, hooks, y, 0)


@called
def reset_if_due(s, index):
    """Forget everything before pass `index`, if that is due."""
    if is_due(s, index):
        note(s, IS_RESET, NO_COPY, BY_RESET)
        s["reset"]["tokens"] = 0
        reset(s)
    s["reset"]["tokens"] += pass_tokens(s)[index]


@called
def is_due(s, index):
    """Whether everything is forgotten before this pass: never, if all requests are others, or after so many tokens."""
    if index == 0 or s["reset_every"] == 0:
        return False
    if s["reset_every"] < 0:
        return pass_apart(s)[index] == 1
    return s["reset"]["tokens"] >= s["reset_every"]


@called
def reset(s):
    """Residency, policy state, history and queue are cleared; what is in flight is abandoned."""
    clear_uses(s)
    clear_cache(s)
    clear_side_buffers(s)
    clear_ranking(s)
    clear_queues(s)
    clear_links(s)
    clear_memory(own_routing(s))
    clear_memory(own_prefetch(s))
    clear_memory(own_eviction(s))
    clear_memory(own_miss(s))


@called
def clear_memory(own):
    """A policy's, but for its parameters."""
    own.rows[:] = 0
    own.regs[:] = 0
    own.reals[:] = 0.0


@called
def count_unused(s):
    """What was prefetched and is still unused."""
    for y in range(s["n_copies"]):
        if copies(s)[y]["state"] == RESIDENT and copies(s)[y]["prefetched"] == 1:
            count(s, BYTES_UNUSED_AT_END, layer_of(s, y), copies(s)[y]["bytes"])
