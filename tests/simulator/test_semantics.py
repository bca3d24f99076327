"""The laws that every engine obeys: two toys worked by hand, closed forms, and the limits of time and space."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from moereplay.simulator.platform import Platform
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every

CONTRACTS = every("contract", ["atomic", "sequential"])
REASONS = ("compulsory", "capacity", "collisions")


# ---------------------------------------------------------------- the toy: residency alone


def toy() -> ListSource:
    demands = [[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]]
    return ListSource(sizes(3, 4), [Prompted(tokens(*([demand] * 3 for demand in demands)))])


def test_the_toy_counts_as_worked_by_hand() -> None:
    # per layer of 2 slots: 0 and 1 compulsory; 0 hit, 2 compulsory (evicts 1); 0 hit, 1 capacity (evicts 2);
    # 0 hit, 3 compulsory (evicts 1); 0 hit, 1 capacity (evicts 3). The same in each of the 3 layers
    outcome = replay_lists(toy(), (2, 2, 2), machine())
    assert outcome.counts("accesses", "hits", "late", "misses") == (30, 12, 0, 18)
    assert outcome.counts(*REASONS) == (12, 6, 0)
    assert outcome.counts("insertions", "evictions") == (18, 12)


def test_the_toy_evicts_the_same_experts_in_every_layer() -> None:
    outcome = replay_lists(toy(), (2, 2, 2), machine())
    victims = [[expert for _, _, layer, expert in outcome.spans("evict") if layer == at] for at in range(3)]
    assert victims == [[1, 2, 1, 3]] * 3


# ---------------------------------------------------------------- the timed toy: link, prefetch and compute together


def timed_toy(contract: str) -> Outcome:
    """2 layers of 4 experts, 3 slots in all; every expert is one byte that takes 5 ns."""
    first: Token = [Cell([0, 1], look=[naming(4, [0, 2])]), Cell([0, 1])]
    second: Token = [Cell([1, 2], look=[naming(4, [1, 3])]), Cell([1, 3])]
    where = machine(bytes_per_ns=0.2, dense_ns=3, expert_ns=2)
    return replay_lists(
        ListSource(sizes(2, 4), [Prompted([first, second])]), 3, where, prefetch="top_k", contract=contract
    )


@CONTRACTS
def test_the_timed_toy_counts_as_worked_by_hand(contract: str) -> None:
    outcome = timed_toy(contract)
    assert outcome.counts("hits", "prefetch_hits", "late", "misses") == (2, 2, 0, 6)
    assert outcome.counts(*REASONS) == (4, 1, 1)
    assert outcome.counts("prefetch_issued", "prefetch_started", "prefetch_cancelled") == (3, 3, 0)
    assert outcome.counts("evictions", "bytes_demand", "bytes_prefetch", "bytes_wasted") == (6, 6, 3, 1)
    assert outcome["link_busy_ns"] == 45


def test_the_timed_toy_atomic_moves_as_worked_by_hand() -> None:
    # experts are (layer, id). Gate at 3: demands 0 and 1 go first, then the prefetch of (1, 0), which fills the pool.
    # 18: its arrival starts the prefetch of (1, 2), which evicts (0, 0); the gate of the same ns comes later.
    # 23: (1, 2) is there, (1, 1) evicts (0, 1). Gate at 33: (0, 1) evicts (1, 0), the least recent; 38: (0, 2)
    # evicts (1, 1), used at 18, before the prefetch (1, 2) arrived. 43: prefetch (1, 3) evicts the unused (1, 2).
    # Gate at 48: (1, 1) evicts (0, 1).
    outcome = timed_toy("atomic")
    demands = [(3, 8, 0, 0), (8, 13, 0, 1), (23, 28, 1, 1), (33, 38, 0, 1), (38, 43, 0, 2), (48, 53, 1, 1)]
    assert outcome.spans("transfer", "demand") == demands
    assert outcome.spans("transfer", "prefetch") == [(13, 18, 1, 0), (18, 23, 1, 2), (43, 48, 1, 3)]
    evicted = [(18, 0, 0), (23, 0, 1), (33, 1, 0), (38, 1, 1), (43, 1, 2), (48, 0, 1)]
    assert [(t, layer, expert) for t, _, layer, expert in outcome.spans("evict")] == evicted


def test_the_timed_toy_atomic_computes_when_worked_by_hand() -> None:
    # arrivals at 8 and 13 are computed at once; (1, 0) hits at 18; (1, 1) arrives at 28; the second pass alike
    outcome = timed_toy("atomic")
    assert outcome.spans("dense") == [(0, 3, 0, -1), (15, 18, 1, -1), (30, 33, 0, -1), (45, 48, 1, -1)]
    computed = [(8, 10, 0, 0), (13, 15, 0, 1), (18, 20, 1, 0), (28, 30, 1, 1)]
    assert outcome.spans("expert") == [*computed, (38, 40, 0, 1), (43, 45, 0, 2), (48, 50, 1, 3), (53, 55, 1, 1)]
    # stalls: 8 - 3 and 13 - 10; 28 - 20; 38 - 33 and 43 - 40; 53 - 50
    assert outcome.counts("stall_ns", "time_ns") == (5 + 3 + 8 + 5 + 3 + 3, 55)


def test_the_timed_toy_sequential_moves_as_worked_by_hand() -> None:
    # gate at 3: only (0, 0) is looked up; behind it the prefetch of (1, 0) starts at 8. At 10 (0, 1) is looked up and
    # goes ahead of the prefetch of (1, 2), which starts at 18 and evicts (0, 0). Gate at 23: (1, 0) hits; at 25 (1, 1)
    # evicts (0, 1), the least recent. Gate at 35: (0, 1) evicts (1, 2), unused since 23. At 40 the prefetch of (1, 3)
    # is first, as (0, 2) is looked up at 42 only; it evicts (1, 0), and at 45 (0, 2) evicts (1, 1). Gate at 55: (1, 1)
    # evicts (0, 1)
    outcome = timed_toy("sequential")
    demands = [(3, 8, 0, 0), (13, 18, 0, 1), (25, 30, 1, 1), (35, 40, 0, 1), (45, 50, 0, 2), (55, 60, 1, 1)]
    assert outcome.spans("transfer", "demand") == demands
    assert outcome.spans("transfer", "prefetch") == [(8, 13, 1, 0), (18, 23, 1, 2), (40, 45, 1, 3)]
    evicted = [(18, 0, 0), (25, 0, 1), (35, 1, 2), (40, 1, 0), (45, 1, 1), (55, 0, 1)]
    assert [(t, layer, expert) for t, _, layer, expert in outcome.spans("evict")] == evicted


def test_the_timed_toy_sequential_computes_when_worked_by_hand() -> None:
    # one by one: (0, 0) at 8, (0, 1) at 18, (1, 0) hits at 23, (1, 1) at 30; then 40, 50, 60 and the hit at 62
    outcome = timed_toy("sequential")
    assert outcome.spans("dense") == [(0, 3, 0, -1), (20, 23, 1, -1), (32, 35, 0, -1), (52, 55, 1, -1)]
    computed = [(8, 10, 0, 0), (18, 20, 0, 1), (23, 25, 1, 0), (30, 32, 1, 1)]
    assert outcome.spans("expert") == [*computed, (40, 42, 0, 1), (50, 52, 0, 2), (60, 62, 1, 1), (62, 64, 1, 3)]
    # stalls: 8 - 3 and 18 - 10; 30 - 25; 40 - 35 and 50 - 42; 60 - 55
    assert outcome.counts("stall_ns", "time_ns") == (5 + 8 + 5 + 5 + 8 + 5, 64)


# ---------------------------------------------------------------- limits of space


def scattered(layers: int, experts: int, k: int, passes: int) -> ListSource:
    """Decode passes of k random experts per layer."""
    draw = random.Random(7)
    rows = [[draw.sample(range(experts), k) for _ in range(layers)] for _ in range(passes)]
    return ListSource(sizes(layers, experts, k), [Prompted(tokens(*rows))])


def repeating(layers: int, ids: list[int], passes: int) -> ListSource:
    """Decode passes that demand the same experts in every layer."""
    return ListSource(sizes(layers, 4, len(ids)), [Prompted(tokens(*[[ids] * layers] * passes))])


@pytest.mark.slow
@CONTRACTS
@every("slots", [2, 4, 6])
def test_below_the_cliff_a_global_lru_never_hits(contract: str, slots: int) -> None:
    # between two uses of an expert lie the (L - 1) k = 6 experts of the other layers
    assert replay_lists(scattered(4, 5, 2, 40), slots, machine(), contract=contract)["hits"] == 0


@CONTRACTS
def test_one_slot_above_the_cliff_a_global_lru_can_hit(contract: str) -> None:
    assert replay_lists(scattered(4, 5, 2, 40), 7, machine(), contract=contract)["hits"] > 0


@CONTRACTS
def test_at_a_token_cycle_a_repeating_token_hits_after_the_first_pass(contract: str) -> None:
    # L k = 6 experts fit: 6 compulsory misses, then 9 passes of 6 hits; one slot less, and nothing hits
    assert replay_lists(repeating(3, [0, 2], 10), 6, machine(), contract=contract)["hits"] == 54
    assert replay_lists(repeating(3, [0, 2], 10), 4, machine(), contract=contract)["hits"] == 0


@CONTRACTS
@every("eviction", ["lru", "fifo", "lfu", "arc", "belady"])
def test_an_infinite_cache_misses_each_distinct_expert_once(contract: str, eviction: str) -> None:
    source = scattered(3, 8, 2, 30)
    outcome = replay_lists(source, 24, machine(), contract=contract, eviction=eviction)
    distinct = {(event.layer, event.expert) for event in outcome.events if event.kind == "expert"}
    assert outcome.counts("misses", "compulsory", "evictions") == (len(distinct), len(distinct), 0)


@CONTRACTS
@every("eviction", ["lru", "fifo", "lfu", "random", "arc", "farthest_layer", "belady"])
def test_one_slot_hits_repeats_only_whatever_leaves(contract: str, eviction: str) -> None:
    # 3 3 1 1 1 2: three repeats; every step takes 4 + 2 ns, every miss 5 ns more
    source = ListSource(sizes(1, 4, 1), [Prompted(tokens(*([[e]] for e in (3, 3, 1, 1, 1, 2))))])
    where = machine(bytes_per_ns=0.2, dense_ns=4, expert_ns=2)
    outcome = replay_lists(source, 1, where, contract=contract, eviction=eviction)
    assert outcome.counts("hits", "misses", "evictions", "time_ns") == (3, 3, 2, 6 * 6 + 3 * 5)


@CONTRACTS
def test_one_slot_streams_a_larger_demand_through_itself(contract: str) -> None:
    # 2 experts per step, never the same in a row: each is fetched after the one before it was computed, 5 + 2 ns
    source = ListSource(sizes(1, 4), [Prompted(tokens([[0, 1]], [[2, 3]], [[0, 1]]))])
    outcome = replay_lists(source, 1, machine(bytes_per_ns=0.2, dense_ns=4, expert_ns=2), contract=contract)
    assert outcome.counts("hits", "misses", "time_ns") == (0, 6, 3 * (4 + 2 * (5 + 2)))


# ---------------------------------------------------------------- limits of time


@CONTRACTS
@every("slots", [1, 3, 6])
def test_an_infinitely_fast_link_never_stalls(contract: str, slots: int) -> None:
    where = machine(bytes_per_ns=inf, dense_ns=3, expert_ns=2)
    outcome = replay_lists(scattered(3, 5, 2, 20), slots, where, contract=contract)
    assert outcome.counts("stall_ns", "link_busy_ns", "time_ns") == (0, 0, 20 * 3 * (3 + 2 * 2))


ONE_AT_A_TIME = [
    machine(),
    machine(bytes_per_ns=inf),
    machine(bytes_per_ns=0.1, dense_ns=1, expert_ns=30),
    machine(latency_ns=9, dense_ns=50, expert_ns=1, pass_ns=5),
]
SEVERAL = machine(bytes_per_ns=0.5, latency_ns=4, depth=3, expert_ns=2)


def counted(where: Platform, **settings: Any) -> tuple[int, ...]:
    outcome = replay_lists(scattered(3, 6, 2, 30), 5, where, **settings)
    return outcome.counts("hits", "misses", *REASONS, "insertions", "evictions", "bytes_demand")


@pytest.mark.slow
@CONTRACTS
@every("eviction", ["lru", "fifo", "lfu", "least_stale", "belady", "belady:bypass=true"])
def test_without_prefetch_no_rate_changes_what_hits(contract: str, eviction: str) -> None:
    assert len({counted(where, contract=contract, eviction=eviction) for where in [*ONE_AT_A_TIME, SEVERAL]}) == 1


@CONTRACTS
def test_arc_which_learns_at_arrivals_needs_one_transfer_at_a_time_for_that(contract: str) -> None:
    # with depth > 1 a second victim is chosen before the first newcomer is in ARC's lists
    assert len({counted(where, contract=contract, eviction="arc") for where in ONE_AT_A_TIME}) == 1
