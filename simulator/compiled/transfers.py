"""Transfers as the cache sees them: bytes are claimed when one starts, and a copy is resident when it has landed."""

from __future__ import annotations

from moereplay.simulator.compiled import listeners
from moereplay.simulator.compiled.cache import bypass, enter, join_pool, occupy
from moereplay.simulator.compiled.counters import DECLINED, count
from moereplay.simulator.compiled.side_buffer import claim_side, promote
from moereplay.simulator.compiled.space import BYPASSED, GRANTED, make_space
from moereplay.simulator.compiled.state import layer_of, owned
from moereplay.simulator.jit.marks import fast

on_insert = listeners.notifier("on_insert")


@fast
def claim(s, hooks, y):
    """Take the bytes of a transfer that is about to start, evicting what must leave."""
    is_prefetch = owned(s)[y]["prefetch"]
    if is_prefetch == 1 and s["side_slots"] > 0:
        return claim_side(s, y)
    claimed = make_space(s, hooks, y, is_prefetch)
    if claimed == GRANTED:
        occupy(s, y)
    elif s["has_admit"] == 1 and claimed == BYPASSED:
        bypass(s, y)
        count(s, DECLINED, layer_of(s, y), 1)
    return claimed


@fast
def land(s, hooks, y):
    """A transfer is complete: resident, unless it bypasses the cache."""
    mine = owned(s)[y]
    if s["has_admit"] == 1 and mine["bypasses"] == 1:
        return
    unused = 1 if mine["prefetch"] == 1 and mine["awaited"] == 0 else 0
    enter(s, y, unused)
    if s["side_slots"] > 0 and mine["side"] == 1:
        if mine["awaited"] == 1:
            promote(s, hooks, y)
        return
    join_pool(s, y)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, unused)
