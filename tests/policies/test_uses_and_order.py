"""Data on residents that engines keep for policies: the order of entering a pool, and uses since residence began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, tokens

WHERE = machine(dense_ns=20, expert_ns=2)


def victims(outcome: Outcome) -> list[tuple[int, int, int]]:
    """(pass, layer, expert) of what left."""
    return [(event.step_pass, event.layer, event.expert) for event in outcome.events if event.kind == "evict"]


def named(named: int, first: Sequence[int], second: Sequence[int]) -> Token:
    """A token of two layers; the gate of the first names one of the second's four experts."""
    return [Cell(first, look=[naming(4, [named])]), Cell(second, look=[naming(4, [0])])]


def test_fifo_goes_by_the_entry_into_the_cache_and_not_into_a_side_buffer() -> None:
    # Two slots hold 1.1 and 1.2. Pass 0 brings 1.0 into the buffer; its gate demands all three, so there is no room
    # for it in the cache and it is used from the buffer. Pass 1: 0.0 evicts 1.1 and arrives; the gate of layer 1 then
    # moves 1.0 into the cache, over 1.2. Pass 2: of 0.0 and 1.0 it is 0.0 that has been in the cache for longer
    source = ListSource(
        sizes(2, 4, 3), [Prompted([named(0, [-1], [0, 1, 2]), named(0, [0], [0]), named(0, [1], [-1])])]
    )
    outcome = replay_lists(
        source, 2, WHERE, eviction="fifo", prefetch="side_buffer:buffers=1:fetch=1", warm=((1, 1), (1, 2))
    )
    assert [(e.step_pass, e.layer, e.expert) for e in outcome.events if e.kind == "promote"] == [(1, 1, 0)]
    assert victims(outcome) == [(1, 1, 1), (1, 1, 2), (2, 0, 0)]


def test_streaming_leaves_no_uses_behind() -> None:
    # Three slots, 0 is pinned. While 1 and 3 are demanded beside it, 2 would have to push out 0: it is streamed, in
    # five passes. Then 2 and 4 take the places of 1 and 3. 4 is used once more, so 2, used once since it came in, is
    # the least used and is evicted for 1; its streamed uses were none of a resident
    together, third = [[1, 3, 2]], [[2, 4]]
    rows = tokens([[0, 1]], [[1, 3]], *[together] * 5, third, [[0, 4]], [[1]], [[4]])
    source = ListSource(sizes(1, 5, 3), [Prompted(rows)])
    outcome = replay_lists(source, 3, WHERE, eviction="pinned:profile=given:share=.34:rest=lfu", profile=((0, 0),))
    assert outcome["declined"] == 5
    assert victims(outcome) == [(7, 0, 3), (7, 0, 1), (9, 0, 2)]


def test_a_prefetched_second_precision_goes_on_counting_the_experts_uses() -> None:
    # 8 bits are 8 bytes, 4 bits 4; the pool has 28. Of layer 1 passes 0 to 2 demand 1 at 8 bits and, as the lesser half
    # of the demand, 0 at 4 bits. Pass 3 predicts 0 at 8 bits: it arrives beside the other copy, which has been
    # used three times, and its first use is the expert's fourth. Passes 4 to 6 use 2 three times, so the fewest uses
    # are its own when pass 7 wants 3: 0 and 1 have four each
    passes = [
        *[named(1, [-1], [1, 0])] * 3,
        named(0, [-1], [0, 1]),
        *[named(1, [-1], [2])] * 3,
        named(1, [-1], [3]),
    ]
    source = ListSource(sizes(2, 4, 2, 8, expert_bits=8), [Prompted(passes)])
    settings: dict[str, Any] = {"miss": "cascade:bits=8/4:below=.5", "prefetch": "top_k:factor=.5"}
    outcome = replay_lists(source, 28, WHERE, eviction="lfu", **settings)
    assert outcome.counts("prefetch_started", "prefetch_hits") == (2, 2)
    assert victims(outcome) == [(7, 1, 2)]
