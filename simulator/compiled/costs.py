"""Durations of dense parts and experts, ns, from the platform's tables.

Compute is slower while a link works, if they share memory. Durations are 0 where the caller reports when work ends.
"""

from __future__ import annotations

from moereplay.simulator.compiled.clock import part
from moereplay.simulator.compiled.link import first_piece_arrived, lands_at
from moereplay.simulator.compiled.links import any_link_is_busy
from moereplay.simulator.compiled.state import (
    home_of,
    kind_of,
)
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.rates import MILLION


@fast
def dense_cost(s, index, layer):
    """Return the duration of the dense part of one layer in a pass."""
    row = s.dense_row[s.pass_tokens[index]]
    if s["external"] == 1:
        return 0
    drafted = s["draft_ns"] * s.pass_drafts[index] if s["draft_ns"] > 0 and layer == 0 else 0
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return drafted + s.slow_dense_ns[row, layer] + (s.slow_kv_ns[kv_row(s, index)] if s["reads_kv"] == 1 else 0)
    return drafted + s.dense_ns[row, layer] + (s.kv_ns[kv_row(s, index)] if s["reads_kv"] == 1 else 0)


@fast
def kv_row(s, index):
    """Return the index of a pass in tables of KV-cache reads: by pass, or where requests arrive by context."""
    return s["arrivals"]["context"] if s["arrives"] == 1 else index


@fast
def cost_of(s, turn):
    """Return the compute time of one access over its tokens, ns."""
    access = s.accesses[turn]
    return expert_cost(s, access["y"], access["tokens"])


@fast
def lasts(s, turn):
    """Return how long an access keeps compute busy, ns."""
    return lasting(s, s.accesses[turn]["y"], cost_of(s, turn))


@fast
def expert_cost(s, y, tokens):
    """Return the compute time of a copy in the current layer over `tokens` tokens."""
    if s["external"] == 1:
        return 0
    kind = s.now["layer"] if s["precisions"] == 1 else kind_of(s, y)
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return s.slow_expert_ns[s.cost_row[kind], tokens]
    return s.expert_ns[s.cost_row[kind], tokens]


@fast
def lasting(s, y, spent):
    """Return how long copy y keeps compute busy: longer than `spent` if only its first piece has arrived."""
    if s["has_pieces"] == 1 and first_piece_arrived(s, y):
        return until_the_rest(s, y, spent)
    return spent


@called
def until_the_rest(s, y, spent):
    """Return how long copy y keeps compute busy, given that its remainder must arrive before the rest runs."""
    rest = part(spent, MILLION - s["links"][home_of(s, y)]["first"])
    return max(spent, lands_at(s, y) + rest - s["clock"]["time"])
