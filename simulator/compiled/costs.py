"""What compute's activities take, ns: of the platform's tables, slower while a link works if they share a memory.

Where the caller says when something ends, nothing is known when it begins.
"""

from __future__ import annotations

from moereplay.simulator.compiled.channel import MILLION, part
from moereplay.simulator.compiled.link import its_piece_is_here, lands_at
from moereplay.simulator.compiled.links import any_link_is_busy
from moereplay.simulator.compiled.state import (
    accesses,
    cost_row,
    dense_ns,
    dense_row,
    expert_ns,
    home_of,
    kind_of,
    kv_ns,
    now,
    pass_tokens,
    slow_dense_ns,
    slow_expert_ns,
    slow_kv_ns,
)
from moereplay.simulator.jit.marks import called, fast


@fast
def dense_cost(s, index, layer):
    """The dense part of one layer in a pass."""
    row = dense_row(s)[pass_tokens(s)[index]]
    if s["external"] == 1:
        return 0
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return slow_dense_ns(s)[row, layer] + (slow_kv_ns(s)[index] if s["reads_kv"] == 1 else 0)
    return dense_ns(s)[row, layer] + (kv_ns(s)[index] if s["reads_kv"] == 1 else 0)


@fast
def cost_of(s, turn):
    """What computing one expert over its tokens takes, ns."""
    access = accesses(s)[turn]
    return expert_cost(s, access["y"], access["tokens"])


@fast
def lasts(s, turn):
    """For how long compute is busy with it, ns."""
    return lasting(s, accesses(s)[turn]["y"], cost_of(s, turn))


@fast
def expert_cost(s, y, tokens):
    """One copy of the layer in progress over so many tokens."""
    if s["external"] == 1:
        return 0
    kind = now(s)["layer"] if s["precisions"] == 1 else kind_of(s, y)
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return slow_expert_ns(s)[cost_row(s)[kind], tokens]
    return expert_ns(s)[cost_row(s)[kind], tokens]


@fast
def lasting(s, y, spent):
    """For how long compute is busy with a copy that takes it `spent`: longer if only a first piece is there."""
    if s["has_pieces"] == 1 and its_piece_is_here(s, y):
        return until_the_rest(s, y, spent)
    return spent


@called
def until_the_rest(s, y, spent):
    """The rest of its compute cannot begin before it is complete."""
    rest = part(spent, MILLION - s["links"][home_of(s, y)]["first"])
    return max(spent, lands_at(s, y) + rest - s["clock"]["time"])
