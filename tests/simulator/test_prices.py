"""Prices of real machines, to the nanosecond: worked examples on both engines, closed forms, and which kernel runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.compiled.engine import fastest_kernel
from moereplay.simulator.compiled.fast_path import fast_path, priced_path
from moereplay.simulator.compiled.initial import initial_state
from moereplay.simulator.compiled.inputs import costs_of, inputs_from
from moereplay.simulator.compiled.kernel import priced_kernel
from moereplay.simulator.config import configure
from moereplay.simulator.interface import oracle_of
from moereplay.simulator.platform import Link, Roofline
from moereplay.simulator.rates import part
from moereplay.simulator.replay import plan, replay
from moereplay.traces.geometry import known
from moereplay.traces.schema import Header, Provenance, Request, memory_trace
from moereplay.traces.store import open_trace
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, spec_of
from tests.kit.cases import tokens as rows_of
from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, stored_trace


def step(demand: list[int], prices: dict[str, Any], pool: int = 64, **settings: Any) -> Outcome:
    """One token that demands these of 4 experts of 4 bytes, at 1 byte/ns. Dense 2 ns: the gate is at 2; an expert 3."""
    source = ListSource(sizes(1, 4, len(demand), expert_bytes=4), [Prompted(rows_of([demand]))])
    return replay_lists(source, pool, machine(dense_ns=2, expert_ns=3, prices=prices), **settings)


def scattered(seed: int = 7) -> ListSource:
    """A request of 9 tokens that demand 2 of 6 experts of 4 bytes in each of 3 layers."""
    draw = random.Random(seed)
    rows = [[draw.sample(range(6), 2) for _ in range(3)] for _ in range(9)]
    return ListSource(sizes(3, 6, 2, expert_bytes=4), [Prompted(rows_of(*rows))])


# ---------------------------------------------------------------- loading

LOADING = {"loading": {"ns_per_expert": 1, "ns_per_mib": 1 << 20}}  # 1 ns and 1 ns per byte: 5 ns for an expert


def test_compute_loads_each_demand_before_it_is_fetched() -> None:
    # the gate at 2. 0 is loaded 2-7 and moves 7-11, 1 is loaded 7-12 and moves 12-16; only then the hit, 2: 12-15,
    # 0, which has come at 11: 15-18, and 1, which has come at 16: 18-21. Compute has waited for nothing
    outcome = step([0, 1, 2], LOADING, warm=((0, 2),))
    assert outcome.spans("load") == [(2, 7, 0, 0), (7, 12, 0, 1)]
    assert outcome.spans("transfer") == [(7, 11, 0, 0), (12, 16, 0, 1)]
    assert outcome.spans("expert") == [(12, 15, 0, 2), (15, 18, 0, 0), (18, 21, 0, 1)]
    assert outcome.counts("loading_ns", "stall_ns", "time_ns") == (10, 0, 21)


def test_prefetches_are_suggested_when_the_last_demand_is_queued() -> None:
    # gate at 1; loads 1-6 and 6-11. At 11 demand 1 is queued, then (1, 2) predicted: 1 moves 11-15, (1, 2) 15-19.
    # compute: 0 at 11-13, 1 at 15-17, dense 17-18, late for (1, 2): 19-21. Waits: 17 - 1 - 4 - 10, and 19 - 18
    token = [Cell([0, 1], look=[naming(4, [2])]), Cell([2, -1])]
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted([token])])
    where = machine(dense_ns=1, expert_ns=2, prices=LOADING)
    outcome = replay_lists(source, 64, where, prefetch="top_k:factor=.5")
    assert outcome.spans("transfer") == [(6, 10, 0, 0), (11, 15, 0, 1), (15, 19, 1, 2)]
    assert outcome.counts("late", "loading_ns", "stall_ns", "time_ns") == (1, 10, 2 + 1, 21)


def test_sequentially_each_expert_is_loaded_in_its_turn() -> None:
    # 0: loaded 2-7, moved 7-11, computed 11-14; 1: loaded 14-19, moved 19-23, computed 23-26
    outcome = step([0, 1], LOADING, contract="sequential")
    assert outcome.spans("load") == [(2, 7, 0, 0), (14, 19, 0, 1)]
    assert outcome.spans("expert") == [(11, 14, 0, 0), (23, 26, 0, 1)]
    assert outcome.counts("loading_ns", "stall_ns", "time_ns") == (10, 8, 26)


def test_loading_is_so_much_for_every_demand_that_moves() -> None:
    outcome = replay_lists(scattered(), 40, machine(float("inf"), dense_ns=2, expert_ns=3, prices=LOADING))
    assert outcome["loading_ns"] == outcome["misses"] * 5 == outcome["bytes_demand"] // 4 * 5 > 0
    assert outcome["stall_ns"] == 0  # experts arrive in no time, while the next is loaded
    assert outcome["time_ns"] == sum(outcome.counts("dense_ns", "expert_ns", "loading_ns"))
    assert sum(row["loading_ns"] for row in outcome.requests) == outcome["loading_ns"]


# ---------------------------------------------------------------- overlap

NO_OVERLAP = {"overlap": "none"}


def test_without_overlap_a_step_reads_all_and_then_computes_in_demand_order() -> None:
    # 0 moves 2-6, 1 moves 6-10; then 0, 1 and the hit 2: 10-13-16-19
    outcome = step([0, 1, 2], NO_OVERLAP, warm=((0, 2),))
    assert outcome.spans("expert") == [(10, 13, 0, 0), (13, 16, 0, 1), (16, 19, 0, 2)]
    assert outcome.counts("stall_ns", "time_ns") == (8, 19)


def test_without_overlap_nothing_is_read_before_the_last_demand_is_loaded() -> None:
    # the gate at 2; loaded 2-7 and 7-12, moved 12-16 and 16-20; then 0, 1 and the hit 2: 20-23-26-29
    outcome = step([0, 1, 2], NO_OVERLAP | LOADING, warm=((0, 2),))
    assert outcome.spans("load") == [(2, 7, 0, 0), (7, 12, 0, 1)]
    assert outcome.spans("transfer") == [(12, 16, 0, 0), (16, 20, 0, 1)]
    assert outcome.spans("expert") == [(20, 23, 0, 0), (23, 26, 0, 1), (26, 29, 0, 2)]
    assert outcome.counts("loading_ns", "stall_ns", "time_ns") == (10, 8, 29)


def test_without_overlap_prefetches_are_suggested_behind_all_demands() -> None:
    # gate at 1; loads 1-6 and 6-11. At 11 demands 0 and 1 are queued, then (1, 2) predicted: they move 11-15-19-23.
    # compute: 0 and 1 at 19-21-23, dense 23-24, a hit on (1, 2): 24-26
    token = [Cell([0, 1], look=[naming(4, [2])]), Cell([2, -1])]
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted([token])])
    where = machine(dense_ns=1, expert_ns=2, prices=NO_OVERLAP | LOADING)
    outcome = replay_lists(source, 64, where, prefetch="top_k:factor=.5")
    assert outcome.spans("transfer") == [(11, 15, 0, 0), (15, 19, 0, 1), (19, 23, 1, 2)]
    assert outcome.counts("hits", "late", "loading_ns", "stall_ns", "time_ns") == (1, 0, 10, 8, 26)


def test_without_overlap_a_step_that_does_not_fit_computes_what_is_there() -> None:
    # a pool of two: 0 moves 2-6, 1 moves 6-10, 2 finds no room and nothing moves. So 0 is computed 10-13 and 1 13-16;
    # 2 takes the place of 0 at 13, is there at 17 and computed 17-20
    outcome = step([0, 1, 2], NO_OVERLAP, pool=8)
    assert outcome.spans("transfer") == [(2, 6, 0, 0), (6, 10, 0, 1), (13, 17, 0, 2)]
    assert outcome.spans("expert") == [(10, 13, 0, 0), (13, 16, 0, 1), (17, 20, 0, 2)]
    assert outcome["time_ns"] == 20


@every("prices", [NO_OVERLAP, NO_OVERLAP | LOADING])
def test_without_overlap_and_prefetch_everything_takes_turns(prices: dict[str, Any]) -> None:
    # a pool of three experts always holds the two of a step, so nothing moves while anything is loaded or computed
    outcome = replay_lists(scattered(), 12, machine(0.5, latency_ns=3, dense_ns=2, expert_ns=3, prices=prices))
    assert outcome["time_ns"] == sum(outcome.counts("dense_ns", "expert_ns", "loading_ns", "link_busy_ns"))
    assert outcome["stall_ns"] == outcome["link_busy_ns"] > 0


@pytest.mark.slow
def test_sequentially_there_is_nothing_to_overlap() -> None:
    settings: dict[str, Any] = {"contract": "sequential", "prefetch": "frequent"}
    plain, priced = (replay_lists(scattered(), 12, machine(dense_ns=2, expert_ns=3, prices=each), **settings)
                     for each in ({}, NO_OVERLAP))  # fmt: skip
    assert priced == plain


# ---------------------------------------------------------------- a link's start


def test_the_first_transfer_on_an_idle_wire_starts_later() -> None:
    # latency 1, start 5, two at once. Gate at 2: 0 has its bytes from 8 to 12, 1 its own from 12 to 16, as the wire was
    # not idle when it was issued. Gate of layer 1 at 21: idle again, bytes from 27 to 31
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted(rows_of([[0, 1], [2, -1]]))])
    where = machine(latency_ns=1, depth=2, dense_ns=2, expert_ns=3, prices={"link": {"start_ns": 5}})
    outcome = replay_lists(source, 64, where)
    assert outcome.spans("transfer") == [(2, 12, 0, 0), (2, 16, 0, 1), (21, 31, 1, 2)]
    assert outcome.counts("link_busy_ns", "time_ns") == (10 + 4 + 10, 34)


def test_a_start_is_so_much_per_mib_of_the_first_read() -> None:
    # 1.25 ns a byte. Of 4 bytes in one read 5 ns, and 1 more: bytes from 2 + 6 to 12. In three reads the first has 2
    # bytes, 2.5 ns rounded up: bytes from 2 + 4 to 10
    prices = {"start_ns": 1, "start_ns_per_mib": 1.25 * (1 << 20)}
    assert step([0], {"link": prices}).spans("transfer") == [(2, 12, 0, 0)]
    assert step([0], {"link": prices | {"reads": 3}}).spans("transfer") == [(2, 10, 0, 0)]


def test_a_larger_expert_starts_later() -> None:
    # half a nanosecond a byte: 4 bytes start 2 later, at 4 to 8. Layer 1, gate at 13, has 8 bytes: from 17 to 25
    source = ListSource(sizes(2, 4, 1, expert_bytes=(4, 8)), [Prompted(rows_of([[0], [0]]))])
    where = machine(dense_ns=2, expert_ns=3, prices={"link": {"start_ns_per_mib": 1 << 19}})
    assert replay_lists(source, 64, where).spans("transfer") == [(2, 8, 0, 0), (13, 25, 1, 0)]


def test_a_wire_that_is_free_in_this_nanosecond_is_not_idle() -> None:
    # one at once: 1 starts at 12, when 0 is complete, and pays the latency alone
    outcome = step([0, 1], {"link": {"start_ns": 6}})
    assert outcome.spans("transfer") == [(2, 12, 0, 0), (12, 16, 0, 1)]


def test_a_start_costs_as_much_as_there_are_steps_that_miss() -> None:
    def time(start_ns: int) -> Outcome:
        prices = NO_OVERLAP | {"link": {"start_ns": start_ns}}
        return replay_lists(scattered(), 12, machine(0.5, dense_ns=2, expert_ns=3, prices=prices))

    free, priced = time(0), time(100)
    missed = {(event.step_pass, event.layer) for event in free.events if event.kind == "transfer"}
    assert priced["time_ns"] - free["time_ns"] == 100 * len(missed) > 0


# ---------------------------------------------------------------- compute beside a link


def test_what_begins_while_a_link_works_is_slower_to_its_end() -> None:
    # gate at 2: 0 moves 2-6. The hit 2 begins at 2, at half the rate: 2-8. 0 begins at 8, alone: 8-11
    outcome = step([0, 2], {"contention": {"compute": 0.5}}, warm=((0, 2),))
    assert outcome.spans("expert") == [(2, 8, 0, 2), (8, 11, 0, 0)]
    assert outcome.counts("expert_ns", "stall_ns", "time_ns") == (9, 0, 11)


def test_a_dense_part_that_begins_beside_a_prefetch_is_slower_too() -> None:
    # gate at 2: the hit 0 is computed 2-5, slower as the prefetch of (1, 2) has begun: 2-8. It moves 2-42, so the dense
    # part of layer 1 takes 4: 8-12. Late: 42-45
    token = [Cell([0], look=[naming(4, [2])]), Cell([2])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=40), [Prompted([token])])
    where = machine(dense_ns=2, expert_ns=3, prices={"contention": {"compute": 0.5}})
    outcome = replay_lists(source, 400, where, prefetch="top_k", warm=((0, 0),))
    assert outcome.spans("dense") == [(0, 2, 0, -1), (8, 12, 1, -1)]
    assert outcome.spans("expert") == [(2, 8, 0, 0), (42, 45, 1, 2)]


# ---------------------------------------------------------------- the KV cache

KV = {"compute": {"kv_bytes_per_s": 1e9}}  # 1 byte/ns


def cached(requests: list[Prompted], passes: str) -> Outcome:
    """2 layers, 2 bytes per position: a layer reads a byte of each, 1 ns. Dense 10 ns."""
    source = ListSource(sizes(2, 4, 1, kv_bytes=2), requests, passes)
    return replay_lists(source, 64, machine(dense_ns=10, prices=KV))


def request(prompt: int, decoded: int) -> Prompted:
    rows: list[Token] = [[Cell([0]), Cell([1])] for _ in range(prompt + decoded)]
    return Prompted(rows, prompt)


def test_every_pass_reads_the_positions_before_it_and_its_own() -> None:
    # a prompt of 2 looks at 2 positions, the tokens after it at 3 and at 4
    outcome = cached([request(2, 2)], "recorded")
    assert [end - begin for begin, end, layer, _ in outcome.spans("dense") if layer == 0] == [12, 13, 14]
    assert outcome["dense_ns"] == 2 * (12 + 13 + 14)


def test_a_pass_of_several_requests_reads_those_of_all() -> None:
    # 2 and 1 rows: 2 + 1 positions; a row of each: 3 + 2; the last of the second: 3
    outcome = cached([request(2, 1), request(1, 2)], "batch:2")
    assert [end - begin for begin, end, layer, _ in outcome.spans("dense") if layer == 1] == [13, 15, 13]


def test_token_by_token_the_positions_are_a_triangle() -> None:
    outcome = cached([request(0, 20), request(0, 10)], "token")
    assert outcome["dense_ns"] == 2 * (30 * 10 + 20 * 21 // 2 + 10 * 11 // 2)


# ---------------------------------------------------------------- an expert in pieces

HALVES = {"link": {"first_piece": 0.5}}


@every(
    "expert_ns, ends",
    [
        (3, 9),  # 5 + 3 is before the landing; what is left of 1.5 ns, rounded up, begins then: 7 + 2
        (10, 15),  # 5 + 10: the rest has landed long before it is needed
        (0, 7),  # nothing takes no time, but not before the landing
    ],
)
def test_compute_begins_with_the_first_piece(expert_ns: int, ends: int) -> None:
    # issued at 2, latency 1: bytes from 3 to 7, half of them by 5
    source = ListSource(sizes(1, 4, 1, expert_bytes=4), [Prompted(rows_of([[0]]))])
    outcome = replay_lists(source, 64, machine(latency_ns=1, dense_ns=2, expert_ns=expert_ns, prices=HALVES))
    assert outcome.spans("transfer") == [(2, 7, 0, 0)]
    assert outcome.spans("expert") == [(5, ends, 0, 0)]
    assert outcome.counts("expert_ns", "stall_ns", "time_ns") == (expert_ns, ends - 2 - expert_ns, ends)


def test_pieces_arrive_one_transfer_after_the_other() -> None:
    # 0 moves 2-6, its half at 4, computed 4-8 (6 + 1.5 rounded up); 1 moves 6-10, its half at 8, computed 8-12
    outcome = step([0, 1], HALVES)
    assert outcome.spans("expert") == [(4, 8, 0, 0), (8, 12, 0, 1)]


def test_a_delayed_hit_whose_first_piece_is_there_is_computed_at_once() -> None:
    # gate at 4: the prefetch of (1, 2) moves 4-12, its half at 8 when nobody waits for it. Gate of layer 1 at 9: it
    # begins then, and ends with the rest of its nanosecond after 12
    token = [Cell([0], look=[naming(4, [2])]), Cell([2])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=8), [Prompted([token])])
    where = machine(dense_ns=4, expert_ns=1, prices=HALVES)
    outcome = replay_lists(source, 64, where, prefetch="top_k", warm=((0, 0),))
    assert outcome.spans("expert") == [(4, 5, 0, 0), (9, 13, 1, 2)]
    assert outcome.counts("late", "prefetch_used", "insertions") == (1, 1, 1)


def test_without_overlap_a_first_piece_is_of_no_use() -> None:
    assert step([0, 1], HALVES | NO_OVERLAP).events == step([0, 1], NO_OVERLAP).events


def test_parts_of_times_are_exact_and_rounded_up() -> None:
    assert [part(*each) for each in ((3, 500_000), (10**15, 333_333), (0, 1), (1, 1))] == [2, 333_333 * 10**9, 0, 1]


# ---------------------------------------------------------------- which kernel runs


@every(
    "prices, way",
    [
        ({}, fast_path),
        ({"loading": {"gate_ns": 7}, "link": {"reads": 2, "by_size": ((1, 1e9),)}}, fast_path),
        (KV, fast_path),  # of a model that has none
        (LOADING, priced_kernel),
        (NO_OVERLAP, priced_kernel),
        ({"link": {"start_ns": 1}}, priced_path),
        ({"link": {"start_ns_per_mib": 0.5}}, priced_path),
        (HALVES, priced_path),
        ({"contention": {"compute": 0.9}}, priced_path),
        ({"decisions": {"ns_per_victim": 5}}, priced_path),
    ],
)
def test_prices_that_are_numbers_known_in_advance_stay_on_a_fast_path(prices: dict[str, Any], way: Callable) -> None:
    source = scattered()
    spec = spec_of(source.geometry, 12, machine(prices=prices), log=False)
    oracle = oracle_of(source, spec.config, spec.config.policy_set().eviction)
    assert fastest_kernel(initial_state(inputs_from(source), oracle, spec)) is way


def test_experts_of_equal_bytes_in_two_formats_have_two_rows_of_times() -> None:
    # at 8 of 16 bits an expert of layer 1 has the bytes that one of layer 0 has as it is stored, and no known format
    of = sizes(2, 4, 1, expert_bytes=(8, 16), weight_format="Q8_0")
    roofline = Roofline(flops=1e18, memory_bytes_per_s=1e9, formats={"Q8_0": 0.5e9})
    where = machine().model_copy(update={"compute": roofline})
    spec = spec_of(of, 64, where, log=False, miss="cascade:bits=16/8:below=.5")
    costs = costs_of(inputs_from(ListSource(of, [Prompted(rows_of([[0], [1]]))])), spec)
    kinds = [(layer, p) for layer in (0, 1) for p in (0, 1)]
    assert [spec.times.expert_ns(*kind, 1) for kind in kinds] == [16, 4, 32, 8]
    assert [costs["expert_ns"][row, 1] for row in costs["cost_row"]] == [16, 4, 32, 8]


def test_links_after_the_first_have_prices_of_their_own() -> None:
    # 0 lies behind link 0: 2-6; 2 behind link 1, which starts 5 later: bytes 7-11, half of them by 9
    where = machine(dense_ns=2, expert_ns=3, more=(Link(bytes_per_s=1e9, start_ns=5, first_piece=0.5),))
    source = ListSource(sizes(1, 4, 2, expert_bytes=4), [Prompted(rows_of([[0, 2]]))])
    outcome = replay_lists(source, 64, where)
    assert outcome.spans("transfer") == [(2, 6, 0, 0), (2, 11, 0, 2)]
    assert outcome.spans("expert") == [(6, 9, 0, 0), (9, 13, 0, 2)]


# ---------------------------------------------------------------- what a replay says of its machine

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"


def warning(platform: str, prefetch: str = "none") -> str | None:
    """Return the only remark on a replay of the sample in a cache of half of all experts."""
    return plan(open_trace(SAMPLE), configure(capacity="50%", platform=platform, prefetch=prefetch)).warning


def test_more_than_the_memory_holds_is_said() -> None:
    # all that is always there: half of the experts, two buffers of one expert, and the dense weights at 16 bits
    of = open_trace(SAMPLE).geometry
    cache, buffers = of.experts * sum(of.expert_bytes) // 2, 2 * max(of.expert_bytes)
    dense = 2 * ((of.dense_params or 0) * of.layers + (of.head_params or 0))
    name, side = "phone-ufs4:memory_bytes={}", "side_buffer:buffers=2:fetch=2"
    assert warning(name.format(cache + buffers + dense), side) is None
    said = warning(name.format(cache + buffers + dense - 1), side)
    assert said and "of side buffers" in said and "a real machine would fault pages" in said
    assert warning("phone-ufs4") is None


def test_the_table_warns_of_the_one_platform_that_is_too_small(tmp_path: Path) -> None:
    names, small = "phone-ufs4:memory_bytes=5,phone-ufs4", stored_trace(tmp_path / "small.zarr", Sizes())
    words = ("--capacity", "50%", "--platform", names, "--engine", "reference", "--workers", 1)
    shown, said = unfolded(moereplay_here("replay", small, *words).stdout), "are more than the memory of"
    assert shown.count(said) == shown.count(f"{said} phone-ufs4:memory_bytes=5") == 1


def test_a_cache_that_is_read_at_a_rate_but_has_no_known_bytes_is_said() -> None:
    said = warning("phone-ufs4:compute.kv_bytes_per_s=20e9")
    assert said == "reading the KV cache takes no time: neither the trace nor its model's name gives its bytes"


def test_what_a_trace_does_not_say_is_its_models() -> None:
    geometry = known("olmoe-1b-7b").geometry
    ids = np.tile(np.arange(8, dtype=np.int16), (3, 16, 1))
    header = Header(geometry=geometry, provenance=Provenance(model="allenai/OLMoE-1B-7B-0924"))
    trace = memory_trace(header, [Request(ids, prompt_length=3)])

    def dense_ns(platform: str) -> int:
        return replay(trace, configure(platform=platform), engine="reference").totals["dense_ns"]

    # 3 positions of 16 layers x 16 heads x 128 x 2 numbers of 2 bytes, at 1 byte/ns
    assert dense_ns("phone-ufs4:compute.kv_bytes_per_s=1e9") - dense_ns("phone-ufs4") == 3 * 16 * 16 * 128 * 2 * 2


UNSEALED = "mine, figures unverified (no digest)"  #: a calibration that was written before there were digests


def test_seconds_without_the_dense_part_are_said_to_be_so_and_never_calibrated(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nbase = "phone-ufs4"\n[calibration]\ndevice = "mine"\n')

    def about(dense: int | None, change: str = "") -> dict[str, Any]:
        header = Header(geometry=sizes(2, 4, 2, dense_params=dense), provenance=Provenance(importer="test"))
        trace = memory_trace(header, [Request(np.array([[[0, 1], [2, 3]]], np.int16), prompt_length=0)])
        config = configure(capacity="75%", platform=f"{tmp_path / 'mine.toml'}{change}")
        return replay(trace, config, engine="reference").about

    unknown, whole = about(None), about(5)
    assert (unknown["seconds"], unknown["calibration"]) == ("estimated", None)
    assert unknown["warning"].endswith("pass --dense 1.2GB, or import it with --model")
    assert (whole["seconds"], whole["calibration"], whole["warning"]) == ("calibrated", UNSEALED, None)
    assert about(5, ":compute.launch_ns=1")["seconds"] == "estimated"  # no longer the figures that were measured
