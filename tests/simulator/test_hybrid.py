"""VRAM, RAM and SSD at once with a CPU that computes: worked examples in nanoseconds, and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.capacity import of_layers, residents
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import LowerTier, Measured, Platform, Roofline
from moereplay.simulator.replay import replay
from moereplay.simulator.times import Times
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.cases import ListSource, Outcome, Prompted, at_rate, machine, replay_lists, sizes, spec_of, tokens
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, geometry_of
from tests.kit.search import searched

FREE = float("inf")


def ram(experts: int, bytes_per_ns: float = 0.5, **more: Any) -> LowerTier:
    """A tier of so many experts of one byte, filled at 2 ns each."""
    return at_rate(LowerTier(name="RAM", capacity=f"{experts}B", bytes_per_s=1, **more), bytes_per_ns * 1e9)


def hybrid(experts: int = 4, **more: Any) -> Platform:
    """1 ns over the link into the fast tier, 2 ns into RAM, 3 ns on the CPU, a dense part of 1 ns."""
    spent = {"cpu_ns": 3, "dense_ns": 1, "expert_ns": 1, "tiers": [ram(experts)], "cpu": {"tier": "RAM"}}
    return machine(**(spent | more))


def replayed(demand: list, pool: int, where: Platform, experts: int = 4, **chosen: Any) -> Outcome:
    """Replay one request of experts of one byte, by both engines."""
    k = max(len(ids) for token in demand for ids in token)
    return replay_lists(
        ListSource(sizes(len(demand[0]), experts, k), [Prompted(tokens(*demand))]), pool, where, **chosen
    )


class TestTheCpuReadsALowerTier:
    def test_what_is_absent_comes_first_and_what_is_there_is_computed_at_once(self) -> None:
        # the gate at 1 finds neither: 0 is in RAM at 3 and on the CPU until 6, 1 there at 5 and computed from 6 to 9.
        # The gate at 10 finds 1: computed until 13; 2 is in RAM at 12 and waits for the CPU: 13 to 16
        outcome = replayed([[[0, 1]], [[1, 2]]], 2, hybrid(), miss="cpu")
        assert outcome.spans("fill", "cpu") == [(1, 3, 0, 0), (3, 5, 0, 1), (10, 12, 0, 2)]
        assert outcome.spans("cpu") == [(3, 6, 0, 0), (6, 9, 0, 1), (10, 13, 0, 1), (13, 16, 0, 2)]
        assert outcome.counts("cpu_executed", "cpu_absent", "cpu_ns", "bytes_lower", "stall_ns") == (4, 3, 12, 3, 14)

    def test_what_the_cpu_reads_is_not_evicted(self) -> None:
        # RAM of one: 0 is there at 3 and read until 6; only then may 1 come: 6 to 8, computed until 11
        outcome = replayed([[[0, 1]]], 2, hybrid(experts=1), miss="cpu")
        assert outcome.spans("fill") == [(1, 3, 0, 0), (6, 8, 0, 1)]
        assert outcome.spans("cpu") == [(3, 6, 0, 0), (8, 11, 0, 1)]

    def test_contention_is_judged_when_landed_work_begins(self) -> None:
        # the CPU takes 2 ns, or 4 beside a link. 0 lands at 3, and 1 starts, 3 to 5, as the CPU idles. So 0 takes 4,
        # until 7; nothing moves then, and 1 takes 2
        outcome = replayed([[[0, 1]]], 2, hybrid(cpu_ns=2, left=0.5), miss="cpu")
        assert outcome.spans("fill") == [(1, 3, 0, 0), (3, 5, 0, 1)]
        assert outcome.spans("cpu") == [(3, 7, 0, 0), (7, 9, 0, 1)]

    def test_handing_over_costs_once_per_step(self) -> None:
        # nothing is queued at the first gate, at 1. The second, at 10, queues both: 2 ns more for the first, 10 to 15
        outcome = replayed([[[0, 1]], [[0, 1]]], 2, hybrid(cpu={"tier": "RAM", "sync_ns": 2}), miss="cpu")
        assert outcome.spans("cpu") == [(3, 6, 0, 0), (6, 9, 0, 1), (10, 15, 0, 0), (15, 18, 0, 1)]
        assert outcome["cpu_ns"] == 14

    def test_a_split_step_fetches_and_computes_beside_each_other(self) -> None:
        # 0 is fetched, 1 computed. The CPU's demand is first: 1 in RAM at 3, computed until 6; 0 in RAM at 5, in
        # the fast tier at 6, computed until 7
        outcome = replayed([[[0, 1]]], 2, hybrid(), miss="split:q=.5")
        assert outcome.spans("fill") == [(1, 3, 0, 1), (3, 5, 0, 0)]
        assert (outcome.spans("cpu"), outcome.spans("expert")) == ([(3, 6, 0, 1)], [(6, 7, 0, 0)])

    def test_fifo_evicts_what_came_first_and_lru_what_was_read_longest_ago(self) -> None:
        # RAM of two: 0, 1, 0, 2, 0. The second 0 is read there; 2 takes the place of 1, or, first in first out, of 0
        stream = [[[e]] for e in (0, 1, 0, 2, 0)]
        for eviction, filled in (("lru", [0, 1, 2]), ("fifo", [0, 1, 2, 0])):
            outcome = replayed(stream, 1, hybrid(tiers=[ram(2, eviction=eviction)]), miss="cpu")
            assert [expert for *_, expert in outcome.spans("fill")] == filled

    def test_below_n_tokens_the_cpu_computes_and_others_are_fetched(self) -> None:
        # a prompt of two tokens is fetched, the token after it is computed
        source = ListSource(sizes(1, 4, 1), [Prompted(tokens([[0]], [[1]], [[2]]), 2)])
        outcome = replay_lists(source, 2, hybrid(), miss="cpu:below=2")
        assert [expert for *_, expert in outcome.spans("transfer")] == [0, 1]
        assert [expert for *_, expert in outcome.spans("cpu")] == [2]


class TestMissesOfThisPassForTheNext:
    def test_an_upload_follows_the_cpus_reading(self) -> None:
        # 0 is in RAM at 3: the CPU computes until 6, and the upload is there at 4. The gate at 7 hits: 7 to 8
        outcome = replayed([[[0]], [[0]]], 2, hybrid(), miss="cpu", prefetch="missed")
        assert outcome.spans("transfer", "prefetch") == [(3, 4, 0, 0)]
        assert (outcome.spans("cpu"), outcome.spans("expert")) == ([(3, 6, 0, 0)], [(7, 8, 0, 0)])
        counts = "prefetch_issued", "prefetch_hits", "predicted", "predicted_demanded", "predictable"
        assert outcome.counts(*counts) == (1, 1, 1, 1, 1)

    def test_a_reset_forgets_what_was_suggested(self) -> None:
        source = ListSource(sizes(1, 4, 1), [Prompted(tokens([[0]])), Prompted(tokens([[0]]))])
        outcome = replay_lists(source, 2, hybrid(), miss="cpu", prefetch="missed", reset="request")
        assert outcome.counts("predicted", "predicted_demanded", "predictable", "misses") == (2, 0, 0, 2)

    def test_top_after_and_per_step_suggest_less(self) -> None:
        # layer 0 misses 0 and 1 in both passes of a fast tier that holds both
        def predicted(text: str) -> int:
            return replayed([[[0, 1]], [[0, 1]], [[0, 1]]], 2, hybrid(), miss="cpu", prefetch=text)["predicted"]

        # all of the first pass hit in the second; one at a time; none before the second miss, then both
        found = [predicted(f"missed{more}") for more in ("", ":top=1", ":per_step=1", ":after=2")]
        assert found == [2, 2, 2, 2]
        stop = [
            replayed([[[0, 1]]], 2, hybrid(), miss="cpu", prefetch=f"missed:{more}") for more in ("top=1", "after=2")
        ]
        assert [each["predicted"] for each in stop] == [1, 0]

    def test_what_is_left_out_is_read_in_the_background(self) -> None:
        # the gate at 1 leaves 0 out; its prefetch is in RAM at 3, in the fast tier at 4, before the third gate
        source = ListSource(sizes(1, 4, 1), [Prompted(tokens([[0]], [[1]], [[0]]))])
        outcome = replay_lists(source, 2, hybrid(dense_ns=4), miss="drop:keep=0", prefetch="missed:of=dropped")
        assert outcome.counts("dropped", "hits") == (2, 1)


class TestResidents:
    def test_they_are_hits_from_the_start_and_outlive_a_reset(self) -> None:
        # layer 0 is resident: 2 of 3 bytes. Layer 1 misses once per request
        requests = [Prompted(tokens([[0], [0]])), Prompted(tokens([[1], [0]]))]
        source = ListSource(sizes(2, 2, 1), requests)
        outcome = replay_lists(source, 3, hybrid(), reset="request", resident=((0, 0), (0, 1)))
        assert outcome.counts("hits", "misses", "compulsory", "evictions") == (2, 2, 2, 0)
        assert {row["layer"]: row["hits"] for row in outcome.layers} == {0: 2, 1: 0}

    def test_they_are_no_victims(self) -> None:
        # one byte is left for four experts that come and go; the resident one is a hit to the end
        stream = [[[e]] for e in (1, 2, 0, 3, 1, 0)]
        outcome = replayed(stream, 2, hybrid(), resident=((0, 0),))
        assert outcome.counts("hits", "misses", "evictions") == (2, 4, 3)

    @every(
        "resident, pool, miss, said",
        [
            (((0, 0), (0, 1)), 1, "cpu", "2 bytes, its capacity is 1"),
            (((0, 0), (0, 1)), 2, "fetch", "leaves 0 of the 2 bytes"),
            (((0, 0), (0, 1)), 2, "cpu:below=2", "leaves 0 of the 2 bytes"),  # fetches for a prompt
            (((0, 9),), 4, "cpu", "expert 9 of layer 0"),
            (((0, 1), (0, -1)), 4, "cpu", "2 times"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, resident: tuple, pool: int, miss: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            replayed([[[0]]], pool, hybrid(), resident=resident, miss=miss)

    def test_layers_are_named_by_ranges(self) -> None:
        assert of_layers("layers:0-2,5") == ((0, -1), (1, -1), (2, -1), (5, -1))
        assert residents(of_layers("all"), geometry_of(Sizes(2, 3, 1))) == tuple(
            (layer, expert) for layer in range(2) for expert in range(3)
        )
        for wrong in ("layers:", "layers:3-1", "layers:x", "layers:1-"):
            with pytest.raises(ConfigError, match="layers:A-B"):
                of_layers(wrong)


# -- closed forms


@st.composite
def _streams(draw: st.DrawFn) -> list[list[list[int]]]:
    """Tokens of two experts in two layers of four."""
    pair = st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True)
    return draw(st.lists(st.lists(pair, min_size=2, max_size=2), min_size=1, max_size=8))


#: What a tier adds by itself, even if it takes no time.
OF_TIERS = {"bytes_lower", "cpu_absent"}
OF_PREFETCH = {"prefetch_issued", "prefetch_dropped", "predicted", "predicted_demanded", "predictable"}


def unlike(one: Outcome, other: Outcome) -> set[str]:
    """Totals that differ."""
    return {name for name, value in one.totals.items() if value != other.totals[name]}


@searched(25)
@given(_streams(), st.sampled_from(("cpu", "fetch")))
def test_a_middle_tier_of_everything_that_is_filled_at_once_equals_two_tiers(stream: list, miss: str) -> None:
    with_ram = replayed(stream, 3, hybrid(tiers=[ram(8, FREE)]), miss=miss)
    assert unlike(with_ram, replayed(stream, 3, hybrid(tiers=(), cpu={}), miss=miss)) <= OF_TIERS


@searched(25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_a_tier_in_which_nothing_is_found_again_equals_a_direct_link(stream: list[int]) -> None:
    """RAM of one expert, which a fast tier of two does not miss again at once, and a link up that takes no time."""
    demand = [[[e]] for e in stream]
    through = replayed(demand, 2, machine(FREE, dense_ns=1, tiers=[ram(1)]))
    assert unlike(through, replayed(demand, 2, machine(0.5, dense_ns=1))) <= OF_TIERS


@searched(25)
@given(_streams())
def test_missed_without_room_equals_the_cpu_alone(stream: list) -> None:
    full = {"resident": ((0, 0), (1, 2)), "miss": "cpu"}
    missed = replayed(stream, 2, hybrid(), prefetch="missed", **full)
    assert unlike(missed, replayed(stream, 2, hybrid(), **full)) <= OF_PREFETCH


@searched(25)
@given(_streams())
def test_if_all_layers_are_resident_nothing_misses(stream: list) -> None:
    outcome = replayed(stream, 8, hybrid(), resident=of_layers("layers:0-1"))
    assert outcome.counts("misses", "link_busy_ns", "stall_ns") == (0, 0, 0)
    assert outcome["time_ns"] == outcome["dense_ns"] + outcome["expert_ns"]


@every("eviction", ["lru", "belady:bypass=false"])
def test_the_bound_counts_residents_as_there_before_the_start(eviction: str) -> None:
    geometry = Geometry(layers=2, experts=6, k=2, expert_bytes=(1, 1))
    trace = synthesise(Synthetic(geometry=geometry, prompt_tokens=0, decode_tokens=60, seed=3))
    config = configure(capacity="6experts", eviction=eviction, resident=((0, 0), (1, 3)), passes="token")
    hits, bound = replay(trace, config, engine="reference").totals["hits"], bound_of(trace, config)
    assert bound is not None
    counted = count(trace, bound)
    assert counted["accesses"] == 60 * 2 * 2
    assert counted["belady_hits"] == hits if eviction != "lru" else counted["belady_hits"] >= hits


# -- what is refused, and the CPU's figures


def test_a_cpu_that_reads_no_row_is_refused() -> None:
    for tiers in ((), (ram(4),)):
        with pytest.raises(ValueError, match="'SSD'"):
            hybrid(tiers=tiers, cpu={"tier": "SSD"})
    with pytest.raises(ValueError, match=r"is valid only in \[cpu\]"):
        machine(prices={"compute": {"tier": "RAM"}})


def test_the_cpus_rate_knows_weight_formats_and_tokens() -> None:
    # 30 bytes at 1 byte/ns take 30 ns, in Q4_K_M at 3 bytes/ns 10 ns; three tokens take 2.5 times what one takes
    geometry = sizes(1, 4, 1, 30).model_copy(update={"weight_format": "Q4_K_M", "expert_params": 1})
    cpu = Roofline(flops=1e18, memory_bytes_per_s=1e9, formats={"Q4_K_M": 3e9}, by_tokens=((1, 1.0), (3, 2.5)))
    where = machine().model_copy(update={"cpu": cpu})
    times = Times(where, geometry, (geometry.expert_bytes,))
    assert where.depends_on_model
    assert (times.cpu_ns(0, 0, 1), times.cpu_ns(0, 0, 3)) == (10, 25)
    measured = machine().model_copy(update={"cpu": Measured(expert_ns=4, expert_by_tokens=((1, 1.0), (2, 1.5)))})
    assert Times(measured, geometry, (geometry.expert_bytes,)).cpu_ns(0, 0, 2) == 6


def test_defaults_do_not_enter_an_identity() -> None:
    assert configure(miss="cpu:below=0").policy_set().miss.text(full=True) == "cpu"
    assert "tier" not in Measured().model_dump() and "eviction" not in ram(1).model_dump()
    assert spec_of(sizes(1, 2), 2, hybrid()).resident == ()
