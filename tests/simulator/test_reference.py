"""The rules of a step and of the link, each on the smallest case that shows it, worked by hand; times are in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every

CONTRACTS = every("contract", ["atomic", "sequential"])
#: Every expert is one byte: 5 ns on the link, 2 ns of compute, after 1 ns of dense part.
SLOW = machine(bytes_per_ns=0.2, dense_ns=1, expert_ns=2)


def decode(*rows: Sequence[Sequence[int]], experts: int = 6) -> ListSource:
    """Decode passes: rows[t][layer] are the chosen experts; k is the longest choice."""
    k = max(len(ids) for row in rows for ids in row)
    return ListSource(sizes(len(rows[0]), experts, k), [Prompted(tokens(*rows))])


def foreseen(*layers: tuple[list[int], list[list[int]]], experts: int = 4) -> ListSource:
    """One decode pass; each layer is its chosen experts and, per depth, the ones its look-ahead ranks first."""
    cells: Token = [Cell(ids, look=[naming(experts, best) for best in look]) for ids, look in layers]
    return ListSource(sizes(len(layers), experts, 1), [Prompted([cells])])


def victims(outcome: Outcome) -> list[tuple[int, int, int]]:
    return [(t, layer, expert) for t, _, layer, expert in outcome.spans("evict")]


# ---------------------------------------------------------------- the link


@every(
    "depth, done",
    [
        (1, [15, 29, 43]),  # issued at 1, 15, 29: 10 ns latency and 4 on the wire each
        (2, [15, 19, 29]),  # the second waits for the wire only; the third is issued at 15: max(25, 19) + 4
        (3, [15, 19, 23]),
    ],
)
def test_transfers_issued_together_share_their_latency(depth: int, done: list[int]) -> None:
    source = ListSource(sizes(1, 3, 3, expert_bytes=4), [Prompted(tokens([[0, 1, 2]]))])
    outcome = replay_lists(source, 12, machine(latency_ns=10, depth=depth, dense_ns=1))
    assert [t1 for _, t1, _, _ in outcome.spans("transfer")] == done
    assert outcome["link_busy_ns"] == done[-1] - 1


def test_a_transfer_issued_early_claims_its_bytes_at_once() -> None:
    # two at once into a pool of two: both 4 and 5 are evicted at the gate, before anything has arrived
    outcome = replay_lists(
        decode([[4, 5]], [[0, 1]]), 2, machine(bytes_per_ns=0.2, depth=2, dense_ns=1), warm=((0, 4), (0, 5))
    )
    assert victims(outcome) == [(2, 0, 4), (2, 0, 5)]


def test_the_wire_rounds_up_and_latency_comes_on_top() -> None:
    source = ListSource(sizes(1, 1, 1, expert_bytes=7), [Prompted(tokens([[0]]))])
    assert replay_lists(source, 7, machine(bytes_per_ns=2, latency_ns=3)).spans("transfer") == [(0, 3 + 4, 0, 0)]


def test_a_demand_without_room_waits_and_holds_the_link() -> None:
    # one slot. 0 arrives at 6 and computes until 8; only then may 1 evict it; the prefetch of (1, 0) never overtakes.
    # 1 arrives at 13 and is in compute: nothing may be evicted for a prefetch, which is dropped
    source = foreseen(([0, 1], [[0]]), ([0], []))
    outcome = replay_lists(source, 1, SLOW, prefetch="top_k")
    assert outcome.spans("transfer", "demand")[:2] == [(1, 6, 0, 0), (8, 13, 0, 1)]
    assert outcome.spans("drop") == [(13, 13, 1, 0)]
    assert outcome.counts("prefetch_dropped", "prefetch_started", "misses") == (1, 0, 3)


def test_a_demand_larger_than_what_is_left_takes_the_others_first_and_then_the_computed() -> None:
    # two slots hold 4 and 5, gate at 6. 0 evicts 4, at 11 1 evicts 5, and at 16 2 evicts 0, which computed at 11-13
    outcome = replay_lists(decode([[4, 5]], [[0, 1, 2]]), 2, SLOW, warm=((0, 4), (0, 5)))
    assert victims(outcome) == [(6, 0, 4), (11, 0, 5), (16, 0, 0)]


def test_an_arrival_in_the_ns_of_the_gate_is_a_hit_and_one_ns_later_is_late() -> None:
    # gate at d, where warm 0 hits and the prefetch starts: it lands at d + 5; the second gate comes at d + 2 + d
    def replayed(dense_ns: int) -> Outcome:
        where = machine(bytes_per_ns=0.2, dense_ns=dense_ns, expert_ns=2)
        return replay_lists(foreseen(([0], [[0]]), ([0], [])), 2, where, prefetch="top_k", warm=((0, 0),))

    assert replayed(3).counts("hits", "prefetch_hits", "late") == (2, 1, 0)
    assert replayed(2).counts("hits", "prefetch_used", "late") == (1, 1, 1)


def test_what_is_on_the_link_when_the_run_ends_is_abandoned() -> None:
    # both demands are warm, so the run ends at 6; the prefetch of (1, 3) started at 1 and would land at 11
    source = foreseen(([0], [[3]]), ([1], []))
    where = machine(bytes_per_ns=0.1, dense_ns=1, expert_ns=2)
    outcome = replay_lists(source, 3, where, prefetch="top_k", warm=((0, 0), (1, 1)))
    assert outcome.counts("prefetch_started", "bytes_prefetch", "insertions", "time_ns") == (1, 1, 0, 6)
    assert outcome.counts("bytes_unused_at_end", "bytes_wasted") == (0, 0)


# ---------------------------------------------------------------- prefetches


def test_depth_two_queues_the_nearest_layer_first() -> None:
    # the first gate predicts (1, 0) and (2, 1); 0 itself goes ahead of both
    where = machine(bytes_per_ns=0.2, dense_ns=20, expert_ns=2)
    source = foreseen(([0], [[0], [1]]), ([0], [[1]]), ([1], []))
    outcome = replay_lists(source, 9, where, prefetch="top_k:depth=2")
    assert outcome.spans("transfer") == [(20, 25, 0, 0), (25, 30, 1, 0), (30, 35, 2, 1)]
    # (2, 1) is predicted again by the second gate: it counts as predicted, but is resident and not queued
    assert outcome.counts("predicted", "predicted_demanded", "prefetch_issued", "prefetch_hits") == (3, 3, 2, 2)


def test_prefetching_after_the_demand_starts_at_the_end_of_the_step() -> None:
    # gate 1, transfer 1-6, compute 6-8: only then is (1, 0) predicted; its gate comes at 9 and finds it in flight
    source = foreseen(([0], [[0]]), ([0], []))
    outcome = replay_lists(source, 2, SLOW, prefetch="top_k", prefetch_at="after_demand")
    assert outcome.spans("transfer", "prefetch") == [(8, 13, 1, 0)]
    assert outcome.counts("late", "prefetch_used", "time_ns") == (1, 1, 15)


@every("slots, started", [(1, 0), (2, 1)])
def test_free_only_prefetches_never_evict(slots: int, started: int) -> None:
    source = foreseen(([0], [[0]]), ([0], []))
    settings: dict[str, Any] = {"prefetch": "top_k", "prefetch_admission": "free_only", "prefetch_at": "after_demand"}
    outcome = replay_lists(source, slots, SLOW, **settings)
    assert outcome.counts("prefetch_started", "prefetch_dropped") == (started, 1 - started)


@CONTRACTS
def test_a_prefetch_named_by_a_step_without_demand_starts_at_its_end(contract: str) -> None:
    # layer 0 routes no token; its gate at 1 predicts (1, 0), which lands at 6 and is late for its gate at 2
    source = foreseen(([-1], [[0]]), ([0], []))
    outcome = replay_lists(source, 2, SLOW, prefetch="top_k", contract=contract)
    assert outcome.spans("transfer") == [(1, 6, 1, 0)]
    assert outcome.counts("accesses", "late", "time_ns") == (1, 1, 8)


@CONTRACTS
def test_a_step_without_demand_cancels_the_prefetches_aimed_at_it(contract: str) -> None:
    # (1, 0) and (1, 1) are predicted at 1; 0 holds the link until 6, (1, 0) until 11; the gate of layer 1 comes at 9
    source = foreseen(([0], [[0, 1]]), ([-1], []))
    outcome = replay_lists(source, 4, SLOW, prefetch="top_k:factor=2", contract=contract)
    assert outcome.counts("prefetch_started", "prefetch_cancelled", "accesses", "time_ns") == (1, 1, 1, 9)


# ---------------------------------------------------------------- the side buffer


@pytest.mark.slow
def test_the_side_buffer_holds_what_no_gate_has_judged_yet() -> None:
    # one buffer: (1, 0) takes it, (1, 1) is refused until the gate of layer 1 has passed
    where = machine(bytes_per_ns=0.2, dense_ns=20, expert_ns=2)
    source = foreseen(([0], [[0, 1]]), ([2], [[3]]), ([2], []))
    outcome = replay_lists(source, 3, where, prefetch="side_buffer:buffers=1:fetch=2")
    assert outcome.spans("transfer", "prefetch") == [(25, 30, 1, 0), (52, 57, 2, 3)]
    assert victims(outcome) == [(52, 1, 0)]
    assert outcome.counts("prefetch_dropped", "bytes_wasted", "bytes_unused_at_end") == (2, 1, 1)


def test_a_side_buffered_hit_moves_into_the_cache_without_bytes() -> None:
    # one slot: the move of (1, 0) at its gate evicts 0; the buffer is free again for (2, 3)
    where = machine(bytes_per_ns=0.2, dense_ns=20, expert_ns=2)
    source = foreseen(([0], [[0]]), ([0], [[3]]), ([3], []))
    outcome = replay_lists(source, 1, where, prefetch="side_buffer:buffers=1:fetch=1")
    assert victims(outcome) == [(47, 0, 0), (69, 1, 0)]
    assert outcome.counts("bytes_demand", "bytes_prefetch", "prefetch_hits") == (1, 2, 2)


def test_a_side_buffered_expert_never_evicts_before_its_gate() -> None:
    # layer 1 demands another expert than the one foreseen: the cache loses 0 only to that demand
    where = machine(bytes_per_ns=0.2, dense_ns=20, expert_ns=2)
    source = foreseen(([0], [[0]]), ([1], []))
    outcome = replay_lists(source, 1, where, prefetch="side_buffer:buffers=1:fetch=1")
    assert victims(outcome) == [(47, 0, 0)]
    assert outcome.counts("misses", "bytes_unused_at_end") == (2, 1)


def test_a_late_side_buffered_expert_lands_in_the_cache() -> None:
    # 0: 1-6; (1, 0): 6-11, its gate at 9: late, it lands in the one slot of the cache and 0 is evicted at 11
    outcome = replay_lists(foreseen(([0], [[0]]), ([0], [])), 1, SLOW, prefetch="side_buffer:buffers=1:fetch=1")
    assert victims(outcome) == [(11, 0, 0)]
    assert outcome.counts("late", "prefetch_used", "insertions", "time_ns") == (1, 1, 2, 13)


def test_a_side_buffered_expert_that_found_no_room_holds_none() -> None:
    # the one slot holds (1, 1), demanded too, so (1, 0) is computed in its buffer, 20-22. That frees nothing in the
    # cache: (1, 2) waits until (1, 1) has been computed as well, 22-24
    where = machine(bytes_per_ns=0.2, dense_ns=10, expert_ns=2)
    source = foreseen(([-1], [[0]]), ([0, 1, 2], []))
    outcome = replay_lists(source, 1, where, prefetch="side_buffer:buffers=1:fetch=1", warm=((1, 1),))
    assert victims(outcome) == [(24, 1, 1)]
    assert outcome.spans("transfer", "demand") == [(24, 29, 1, 2)]


# ---------------------------------------------------------------- declining


def test_a_second_declined_demand_waits_for_the_staging_buffer() -> None:
    # 0 and 1 come back, 2 and 3 never: both are streamed. 2: 14-19, computed 19-21; only then 3: 21-26, 26-28
    outcome = replay_lists(decode([[0, 1]], [[2, 3]], [[0, 1]]), 2, SLOW, eviction="belady:bypass=true")
    assert outcome.spans("transfer")[2:] == [(14, 19, 0, 2), (21, 26, 0, 3)]
    assert outcome.counts("declined", "hits", "evictions", "insertions", "time_ns") == (2, 2, 0, 2, 33)


def test_streaming_is_no_residence() -> None:
    # 2 and 3 are streamed in the second pass, so their second demand is compulsory again, and now admitted
    rows = ([[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]])
    outcome = replay_lists(decode(*rows), 2, SLOW, eviction="belady:bypass=true")
    assert outcome.counts("declined", "misses", "compulsory", "insertions") == (2, 6, 6, 4)


def test_a_declined_prefetch_is_dropped() -> None:
    # one slot: 0 is demanded again by the next pass, before (1, 0) is
    first: Token = [Cell([0], look=[naming(4, [0])]), Cell([-1])]
    rest: list[Token] = [[Cell([0], look=[naming(4, [1])]), Cell([0])]]
    source = ListSource(sizes(2, 4, 1), [Prompted([first, *rest])])
    settings: dict[str, Any] = {"prefetch": "top_k", "prefetch_at": "after_demand", "eviction": "belady:bypass=true"}
    outcome = replay_lists(source, 1, SLOW, **settings)
    assert outcome.spans("drop")[0] == (8, 8, 1, 0)
    assert outcome.counts("hits", "prefetch_dropped", "declined") == (1, 1, 0)


# ---------------------------------------------------------------- start, reset, schedule


def test_warm_experts_are_resident_unused_and_never_counted() -> None:
    # two slots hold 0 and 1; 0 hits, 2 evicts 1, which has never been used
    outcome = replay_lists(decode([[0]], [[2]]), 2, SLOW, warm=((0, 0), (0, 1)))
    assert outcome.counts("hits", "prefetch_hits", "insertions", "bytes_demand") == (1, 0, 1, 1)
    assert outcome.counts("bytes_wasted", "bytes_unused_at_end") == (0, 0)
    assert victims(outcome) == [(4, 0, 1)]


def test_a_reset_every_two_tokens_forgets_every_two_tokens() -> None:
    # tokens 0, 2 and 4 find an empty cache, whose history is empty too
    outcome = replay_lists(decode(*[[[0]]] * 5), 1, SLOW, reset="2")
    assert outcome.counts("misses", "compulsory", "hits") == (3, 3, 2)


def test_a_reset_waits_for_the_end_of_a_pass() -> None:
    # a prompt of three tokens in one pass, then three decoded ones: resets before the first and the third of these
    source = ListSource(sizes(1, 2, 1), [Prompted(tokens(*[[[0]]] * 6), prompt=3)])
    assert replay_lists(source, 1, SLOW, reset="2").counts("misses", "hits") == (3, 1)


def test_a_reset_does_not_bring_the_warm_content_back() -> None:
    outcome = replay_lists(decode([[0]], [[0]]), 1, SLOW, warm=((0, 0),), reset="1")
    assert outcome.counts("hits", "misses") == (1, 1)


def test_chunks_cut_the_prompt_and_leave_decoding_alone() -> None:
    # 5 prompt tokens in chunks of 2: passes of 2, 2 and 1, each the union {0, 1}, {2, 3}, {4}; then two decode passes
    rows = tokens(*([[e]] for e in (0, 1, 2, 3, 4, 0, 1)))
    source = ListSource(sizes(1, 5, 1), [Prompted(rows, prompt=5)], "chunk:2")
    outcome = replay_lists(source, 5, machine(dense_ns=10))
    assert [t for t, _, _, _ in outcome.spans("dense")] == [0, 12, 24, 35, 45]
    assert [row["accesses"] for row in outcome.layers] == [5, 2]
    assert [outcome.requests[0][name] for name in ("ttft_ns", "decode_ns", "decode_passes")] == [35, 20, 2]


def test_text_of_one_pass_counts_as_decoded_from_a_position_on() -> None:
    # 5 prompt tokens, the last 3 of which are decoded one per pass, as the two that were recorded as decoded
    rows = tokens(*([[e]] for e in (0, 1, 2, 3, 4, 0, 1)))
    source = ListSource(sizes(1, 5, 1), [Prompted(rows, prompt=5)], "decode:2")
    outcome = replay_lists(source, 5, machine(dense_ns=10))
    assert [row["accesses"] for row in outcome.layers] == [2, 5]
    assert [outcome.requests[0][name] for name in ("ttft_ns", "decode_ns", "decode_passes")] == [12, 53, 5]


@CONTRACTS
def test_a_pass_that_routes_nothing_spends_its_dense_part_only(contract: str) -> None:
    outcome = replay_lists(decode([[-1, -1], [-1, -1]]), 2, SLOW, contract=contract)
    assert outcome.counts("accesses", "assignments", "time_ns", "stall_ns") == (0, 0, 2, 0)


# ---------------------------------------------------------------- counters


def test_lifetimes_count_steps_in_powers_of_two() -> None:
    # one slot: 0 enters in step 0 and leaves in step 3 (bucket 2: 2 or 3 steps); 1 is evicted one step later (bucket 1)
    outcome = replay_lists(decode([[0]], [[0]], [[0]], [[1]], [[2]]), 1, SLOW)
    assert outcome.totals["lifetime"][:4] == [0, 1, 1, 0]


def test_an_expert_that_leaves_in_its_own_step_lived_no_step() -> None:
    outcome = replay_lists(decode([[0, 1]]), 1, SLOW)
    assert outcome.totals["lifetime"][:2] == [1, 0]


def test_waste_is_charged_to_the_victim_and_evictions_to_the_newcomer() -> None:
    # the prefetch of (1, 0) evicts 0 at 8 and leaves unused for the demanded (1, 1) at 13, which (2, 0) evicts at 20
    source = foreseen(([0], [[0]]), ([1], [[0]]), ([0], []))
    outcome = replay_lists(source, 1, SLOW, prefetch="top_k", prefetch_at="after_demand")
    assert [row["bytes_wasted"] for row in outcome.layers] == [0, 1, 0]
    assert [row["evictions"] for row in outcome.layers] == [0, 2, 1]


def test_times_of_a_request_begin_with_its_first_pass() -> None:
    # two requests of a prompt pass (1 + 5 + 2 ns, then hits of 1 + 2) and a decode pass (3 ns)
    rows = tokens([[0]], [[0]])
    source = ListSource(sizes(1, 1, 1), [Prompted(rows, prompt=1)] * 2)
    first, second = replay_lists(source, 1, SLOW).requests
    assert [first[name] for name in ("start_ns", "ttft_ns", "decode_ns", "end_ns")] == [0, 8, 3, 11]
    assert [second[name] for name in ("start_ns", "ttft_ns", "decode_ns", "end_ns")] == [11, 3, 3, 17]
