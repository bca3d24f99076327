"""The order of what happens in one nanosecond, and other sentences of the semantics, each in the smallest scenario.

Every case has a second reading that would give another result; the comment works out the first in nanoseconds.
"""

from __future__ import annotations

from typing import Any

from moereplay.simulator.platform import Link, LowerTier
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every


def step(demand: list[int], pool: int, where: Any, **settings: Any) -> Outcome:
    """One token that demands these of 4 experts of 10 bytes."""
    source = ListSource(sizes(1, 4, len(demand), expert_bytes=10), [Prompted(tokens([demand]))])
    return replay_lists(source, pool, where, **settings)


# ---------------------------------------------------------------- what is woken, and when


def test_compute_that_is_woken_acts_after_all_that_lands_in_that_nanosecond() -> None:
    # 0 and 2 lie behind two links of 1 byte/ns and both land at 10. Compute acts after both: nothing is in flight, so
    # the first takes its 10 ns at the full rate, to 20, and not 20 ns at half of it
    where = machine(expert_ns=10, more=[Link(bytes_per_s=1e9)], prices={"contention": {"compute": 0.5}})
    outcome = step([0, 2], 40, where)
    assert outcome.spans("transfer") == [(0, 10, 0, 0), (0, 10, 0, 2)]
    assert outcome.spans("expert") == [(10, 20, 0, 0), (20, 30, 0, 2)]


def test_links_are_woken_before_the_first_hit_and_after_every_other_action() -> None:
    # the gate at 2: the miss starts before the hit begins, so the hit is contended and takes 20 ns, 2-22. At 22 compute
    # acts first, and the miss has long landed: 22-32
    where = machine(dense_ns=2, expert_ns=10, prices={"contention": {"compute": 0.5}})
    outcome = step([0, 1], 40, where, warm=((0, 0),))
    assert outcome.spans("transfer") == [(2, 12, 0, 1)]
    assert outcome.spans("expert") == [(2, 22, 0, 0), (22, 32, 0, 1)]


def test_a_demand_that_waits_for_room_starts_when_compute_has_acted() -> None:
    # a pool of one. 0 lands at 10 and runs 10-13. In that event compute takes its next action, which is to wait for 1,
    # then links are woken: 1 evicts 0 at 13
    outcome = step([0, 1], 10, machine(expert_ns=3))
    assert outcome.spans("transfer") == [(0, 10, 0, 0), (13, 23, 0, 1)]
    assert outcome["time_ns"] == 26


@every("contract", ["sequential", "atomic"])
def test_the_first_demand_of_a_gate_is_queued_before_its_prefetches_start(contract: str) -> None:
    # the gate at 1 suggests (1, 2) and demands 0: the demand moves 1-11, the prefetch after it, though the policy is
    # asked before the first look-up under `sequential`
    token = [Cell([0], look=[naming(4, [2])]), Cell([3])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    outcome = replay_lists(source, 80, machine(dense_ns=1, expert_ns=2), prefetch="top_k", contract=contract)
    assert outcome.spans("transfer", "demand")[0] == (1, 11, 0, 0)
    assert outcome.spans("transfer", "prefetch") == [(11, 21, 1, 2)]


def test_without_overlap_links_are_woken_after_each_expert_of_a_round() -> None:
    # a pool of two: 0 and 1 have landed at 20, then nothing moves. 0 runs 20-30; at 30 its room lets 2 move, 30-40,
    # while 1 runs 30-40. What lands meanwhile waits for the next round: 2 runs 40-50. Woken once after the round it
    # would move 40-50
    outcome = step([0, 1, 2], 20, machine(expert_ns=10, prices={"overlap": "none"}))
    assert outcome.spans("transfer") == [(0, 10, 0, 0), (10, 20, 0, 1), (30, 40, 0, 2)]
    assert outcome.spans("expert") == [(20, 30, 0, 0), (30, 40, 0, 1), (40, 50, 0, 2)]


# ---------------------------------------------------------------- links and their time


def test_a_transfers_time_begins_where_the_one_before_it_ended() -> None:
    # two at once, 5 ns of latency and 10 on the wire: 0-15 and 0-25. The second is charged 25 - 15
    outcome = step([0, 1], 40, machine(latency_ns=5, depth=2))
    assert outcome.spans("transfer") == [(0, 15, 0, 0), (0, 25, 0, 1)]
    assert outcome["link_busy_ns"] == 15 + 10


def test_contention_divides_and_rounds_up_each_measured_figure() -> None:
    # at .3 of the rate 2 ns of pass become 7 and 1 ns of dense part 4, each by itself, and the gate's 5 ns stay: the
    # second layer's dense part begins at 18 + 2 while (1, 2) moves
    where = machine(
        dense_ns=1, pass_ns=2, expert_ns=2, prices={"contention": {"compute": 0.3}, "loading": {"gate_ns": 5}}
    )
    token = [Cell([0], look=[naming(4, [2])]), Cell([2])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    outcome = replay_lists(source, 80, where, prefetch="top_k")
    # pass, dense and gate: 0-8. 0 moves 8-18 and (1, 2) 18-28. 0 runs beside it: ceil(2 / .3) = 7, 18-25. Dense: 4 + 5
    assert outcome.spans("expert") == [(18, 25, 0, 0), (34, 36, 1, 2)]
    assert outcome.spans("dense") == [(0, 8, 0, -1), (25, 34, 1, -1)]


def test_lower_tiers_are_one_pool_under_any_scope() -> None:
    # a tier of two experts below pools of one per layer. (0, 0) and (1, 0) fill it in the first pass; in the second
    # (0, 1) evicts what was read longest ago there, (0, 0), of another layer's pool or not: (1, 0) is read from it
    tier = LowerTier(name="RAM", capacity="20B", bytes_per_s=1e9)
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted(tokens([[0], [0]], [[1], [1]], [[1], [0]]))])
    outcome = replay_lists(source, (10, 10), machine(tiers=[tier]))
    fills = [(layer, expert) for _, _, layer, expert in outcome.spans("fill")]
    assert fills == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 0)]
    assert outcome["bytes_lower"] == 50


def test_free_only_prefetches_still_evict_in_lower_tiers() -> None:
    # a tier of two. 0 comes into it 40-50 and goes up 50-60, and (1, 2) into it 50-60. Then 0 may be evicted there,
    # and is, for (1, 1), 60-70. There is free room above for both
    tier = LowerTier(name="RAM", capacity="20B", bytes_per_s=1e9)
    token = [Cell([0], look=[naming(4, [2, 1])]), Cell([3])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    where = machine(tiers=[tier], dense_ns=40)
    outcome = replay_lists(source, 30, where, prefetch="top_k:factor=2", prefetch_admission="free_only")
    assert outcome.spans("fill", "prefetch") == [(50, 60, 1, 2), (60, 70, 1, 1)]
    assert outcome.counts("prefetch_started", "prefetch_dropped") == (2, 0)


# ---------------------------------------------------------------- start, reset, end


def test_what_a_prefetch_brought_counts_as_unused_only_where_it_is_resident_at_the_end() -> None:
    # (1, 2) lands at 21 and is never used; the prefetch of the last gate's layer cannot exist. With a reset between
    # the requests the first one is cleared, and is in neither counter
    token = [Cell([0], look=[naming(4, [2])]), Cell([3])]
    requests = [Prompted([token]), Prompted([token])]
    where = machine(dense_ns=1, expert_ns=30)
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), requests)
    counters = ("bytes_prefetch", "bytes_unused_at_end", "bytes_wasted")
    assert replay_lists(source, 80, where, prefetch="top_k").counts(*counters) == (10, 10, 0)
    assert replay_lists(source, 80, where, prefetch="top_k", reset="request").counts(*counters) == (20, 10, 0)


def test_a_prefetch_in_flight_at_the_end_is_neither_unused_nor_wasted() -> None:
    # at 0.1 byte/ns (1, 2) starts at 101 and would land at 201; the run ends before
    token = [Cell([0], look=[naming(4, [2])]), Cell([-1])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    outcome = replay_lists(source, 80, machine(bytes_per_ns=0.1, dense_ns=1), prefetch="top_k")
    assert outcome.counts("bytes_prefetch", "bytes_unused_at_end", "bytes_wasted") == (10, 0, 0)


@every("eviction, victim", [("fifo", 3), ("lru", 1)])
def test_warm_experts_arrive_in_the_order_of_the_file_at_timestamp_zero(eviction: str, victim: int) -> None:
    # 3, then 1 are there from the start: fifo evicts 3, the first of the file; lru, for which both are as old, 1
    outcome = step([0], 20, machine(), eviction=eviction, warm=((0, 3), (0, 1)))
    assert [expert for _, _, _, expert in outcome.spans("evict")] == [victim]


# ---------------------------------------------------------------- policies


@every("order, victim", [("c", 0), ("b", 1)])
def test_least_stale_evicts_what_the_gate_of_the_executing_layer_did_not_choose(order: str, victim: int) -> None:
    # all warm experts but 2 are stale in the second pass, which demands 2 and 3. Under order=c those that its gate did
    # not choose are alike, and the oldest timestamp leaves: 0, or under order=b, where 0 is not there, 1
    source = ListSource(sizes(1, 4, 2, expert_bytes=10), [Prompted(tokens([[1, 2]], [[2, 3]]))])
    warm = ((0, 0), (0, 1), (0, 2)) if order == "c" else ((0, 1), (0, 2))
    pool = 10 * len(warm)
    outcome = replay_lists(source, pool, machine(), eviction=f"least_stale:order={order}", warm=warm)
    assert [expert for _, _, _, expert in outcome.spans("evict")] == [victim]


def test_least_stale_keeps_the_next_layer_longer_than_the_executing_one() -> None:
    # L = 2. Pass 2, layer 0: stale are (0, 0), not demanded at this gate, key -2, and (1, 0), d = 1, key -1:
    # (0, 0) leaves. With the key +L it would be (1, 0)
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted(tokens([[0], [0]], [[1], [0]]))])
    outcome = replay_lists(source, 20, machine(), eviction="least_stale")
    assert [at[2:] for at in outcome.spans("evict")] == [(0, 0)]


def test_least_stale_may_keep_prefetches_from_evicting_what_is_current() -> None:
    # the pool of one holds 0, used in this pass and computed, when (1, 2) comes: dropped, or 0 leaves
    token = [Cell([0], look=[naming(4, [2])]), Cell([-1])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    settings: dict[str, Any] = {"prefetch": "top_k", "prefetch_at": "after_demand"}
    for text, dropped in (("false", 1), ("true", 0)):
        eviction = f"least_stale:prefetch_evicts_current={text}"
        outcome = replay_lists(source, 10, machine(dense_ns=1), eviction=eviction, **settings)
        assert outcome["prefetch_dropped"] == dropped


def test_top_k_orders_the_union_by_the_largest_score_that_any_token_gives() -> None:
    # k = 1. The three tokens have 1 (at 8), 2 (at 5) and 3 (at 6) as their best. The first gives 2 a 7, though it does
    # not have it among its best: so the order is 1, 2, 3, and not 1, 3, 2
    looks = [[0, 8, 7, 0], [0, 1, 5, 0], [0, 0, 0, 6]]
    rows = [[Cell([0], look=[look]), Cell([1])] for look in looks]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted(rows, prompt=3)])
    outcome = replay_lists(source, 80, machine(dense_ns=1, expert_ns=100), prefetch="top_k")
    assert [at[3] for at in outcome.spans("transfer", "prefetch")] == [1, 2, 3]


def test_split_rounds_halves_up() -> None:
    # half of 3 misses is 1.5: two are fetched, one runs on the CPU
    outcome = step([0, 1, 2], 40, machine(cpu_ns=1), miss="split:q=.5")
    assert outcome.counts("cpu_executed", "bytes_demand") == (1, 20)


# ---------------------------------------------------------------- the log


def test_the_log_has_the_cpus_lines_at_the_gate_with_times_to_come() -> None:
    # the CPU takes 5 ns for each of two: both lines stand before the end of the first
    outcome = step([0, 1], 40, machine(dense_ns=2, cpu_ns=5), miss="cpu")
    lines = [(event.kind, event.t0, event.t1) for event in outcome.events if event.kind == "cpu"]
    assert lines == [("cpu", 2, 7), ("cpu", 7, 12)]
    kinds = [event.kind for event in outcome.events]
    assert kinds[kinds.index("cpu") + 1] == "cpu"


def test_a_reset_has_the_pass_and_layer_of_the_step_that_ended() -> None:
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted(tokens([[0], [0]])), Prompted(tokens([[1], [1]]))])
    outcome = replay_lists(source, 40, machine(), reset="request")
    assert [(e.step_pass, e.layer) for e in outcome.events if e.kind == "reset"] == [(0, 1)]


def test_an_eviction_has_the_victims_layer_and_names_the_copy_that_comes_in() -> None:
    # a pool of one: (1, 3) evicts (0, 0). Copies are numbered through the model: 1 * 4 + 3
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted(tokens([[0], [3]]))])
    outcome = replay_lists(source, 10, machine())
    assert [(e.layer, e.expert, e.cause) for e in outcome.events if e.kind == "evict"] == [(0, 0, "for 7")]


def test_queues_are_cancelled_before_what_is_under_way_into_a_lower_tier() -> None:
    # (1, 2) is under way into the tier and (1, 1) queued for it when the gate of layer 1 comes: the queue first
    tier = LowerTier(name="RAM", capacity="40B", bytes_per_s=0.1e9)
    token = [Cell([0], look=[naming(4, [2, 1])]), Cell([3])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=10), [Prompted([token])])
    outcome = replay_lists(source, 80, machine(tiers=[tier], dense_ns=1), prefetch="top_k:factor=2")
    assert [at[3] for at in outcome.spans("cancel")] == [1, 2]
