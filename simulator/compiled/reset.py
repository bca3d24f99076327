"""Start, reset and end of a run: initial residents, cleared history, and prefetches that were never used."""

from __future__ import annotations

from moereplay.policies.contract import RESIDENT
from moereplay.simulator.compiled.cache import clear_cache, keep_for_good, warm_copy
from moereplay.simulator.compiled.counters import BY_RESET, BYTES_UNUSED_AT_END, IS_RESET, count, note
from moereplay.simulator.compiled.links import clear_links
from moereplay.simulator.compiled.predictions import forget_predictions
from moereplay.simulator.compiled.ranking import clear_queues, clear_ranking
from moereplay.simulator.compiled.state import (
    layer_of,
    notifier,
    own_eviction,
    own_miss,
    own_prefetch,
    own_routing,
)
from moereplay.simulator.compiled.transfers import clear_side_buffers
from moereplay.simulator.compiled.uses import clear_uses
from moereplay.simulator.interface import NO_COPY
from moereplay.simulator.jit.marks import called

on_insert = notifier("on_insert")


@called
def warm_up(s, hooks):
    """Make the initial residents resident."""
    keep_for_good(s)
    for i in range(s["n_warm"]):
        y = s.warm[i]
        warm_copy(s, y)
        if s["listeners_on_insert"] != 0:
            on_insert(s, hooks, y, 0)


@called
def reset_if_due(s, index):
    """Reset before pass `index` if the configuration requires it."""
    if is_due(s, index):
        note(s, IS_RESET, NO_COPY, BY_RESET)
        s["reset"]["tokens"], s["reset"]["passes"] = 0, 0
        reset(s)
    elif index > 0:
        s["reset"]["passes"] += 1
    s["reset"]["tokens"] += s.pass_tokens[index]


@called
def is_due(s, index):
    """Return whether a reset precedes this pass: never, when no request continues, or after a number of tokens."""
    if index == 0 or s["reset_every"] == 0:
        return False
    if s["reset_every"] < 0:
        return s.pass_apart[index] == 1
    return s["reset"]["tokens"] >= s["reset_every"]


@called
def reset(s):
    """Clear residency, policy memory, history and queues, and abandon transfers."""
    clear_uses(s)
    clear_cache(s)
    clear_side_buffers(s)
    clear_ranking(s)
    clear_queues(s)
    clear_links(s)
    keep_for_good(s)
    if s["next_pass"] == 1:
        forget_predictions(s)
    clear_memory(own_routing(s))
    clear_memory(own_prefetch(s))
    clear_memory(own_eviction(s))
    clear_memory(own_miss(s))


@called
def clear_memory(own):
    """Clear a policy's memory but not its parameters."""
    own.rows[:] = 0
    own.regs[:] = 0
    own.reals[:] = 0.0


@called
def count_unused(s):
    """Count the bytes of prefetched copies that are still unused."""
    for y in range(s["n_copies"]):
        if s.copies[y]["state"] == RESIDENT and s.copies[y]["prefetched"] == 1:
            count(s, BYTES_UNUSED_AT_END, layer_of(s, y), s.copies[y]["bytes"])
