"""Decisions of policies and loads of prefetches, to the nanosecond, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moereplay.policies.contract import UNIT
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Roofline
from moereplay.simulator.platforms import platform
from moereplay.simulator.rates import Decisions
from moereplay.simulator.replay import plan
from moereplay.traces.store import open_trace
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, machine, naming, replay_lists, sizes
from tests.kit.cases import tokens as rows_of

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"


def named(layers: int, passes: int = 1, prices: dict[str, Any] | None = None, **settings: Any) -> Outcome:
    """Tokens that demand expert 0 everywhere, which every gate predicts two layers ahead. Dense 2 ns, an expert 3."""
    token = [Cell([0], [UNIT], look=[naming(4, [0]), naming(4, [0])])] * layers
    source = ListSource(sizes(layers, 4, 1, expert_bytes=4), [Prompted([token] * passes)])
    return replay_lists(source, 64, machine(dense_ns=2, expert_ns=3, prices=prices or {}), **settings)


def dense(outcome: Outcome) -> list[int]:
    """Return the length of each dense part."""
    return [end - begin for begin, end, _, _ in outcome.spans("dense")]


# ---------------------------------------------------------------- decisions in a step


def test_each_later_gate_that_a_step_evaluates_is_charged() -> None:
    # two layers ahead: layer 0 evaluates the gates of 1 and 2, layer 1 those of 2 and 3, layer 2 that of 3
    prices = {"decisions": {"ns_per_prediction": 10}}
    assert dense(named(4, prices=prices, prefetch="top_k:depth=2")) == [22, 22, 12, 2]
    # one layer ahead; by this layer's own scores, or by what was used before, no gate is evaluated
    assert dense(named(4, prices=prices, prefetch="top_k")) == [12, 12, 12, 2]
    assert dense(named(4, prices=prices, prefetch="previous_token:depth=2")) == [2, 2, 2, 2]
    assert dense(named(4, prices=prices)) == [2, 2, 2, 2]


def test_a_prediction_by_the_scores_of_this_layer_evaluates_no_gate() -> None:
    token = [Cell([0], look=[naming(4, [0])], logits=[1.0, 0.0, 0.0, 0.0])] * 2
    source = ListSource(sizes(2, 4, 1, expert_bytes=4), [Prompted([token])])
    where = machine(dense_ns=2, prices={"decisions": {"ns_per_prediction": 10}})
    assert dense(replay_lists(source, 64, where, prefetch="top_k:source=current_gate")) == [2, 2]


def test_a_policy_is_charged_in_every_step_whatever_it_does() -> None:
    prices = {"decisions": {"by_policy": {"lru": 5, "fetch": 7, "top_k": 100}}}
    assert dense(named(2, prices=prices)) == [14, 14]
    assert dense(named(2, prices=prices, prefetch="top_k")) == [114, 114]
    assert dense(named(2, prices=prices, eviction="fifo")) == [9, 9]


def test_a_name_that_two_kinds_share_is_charged_once() -> None:
    prices = {"decisions": {"by_policy": {"hobbit": 5}}}
    assert dense(named(2, prices=prices, eviction="hobbit", miss="hobbit")) == [7, 7]


def test_decisions_are_not_slower_beside_a_link() -> None:
    # gate at 7: the prefetch of (1, 0) moves 7-47. Layer 1: its dense part of 2 takes 4 beside it, the decision of 5 as
    # ever: 13-22
    token = [Cell([0], look=[naming(4, [0])]), Cell([0])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=40), [Prompted([token])])
    prices = {"contention": {"compute": 0.5}, "decisions": {"by_policy": {"lru": 5}}}
    outcome = replay_lists(source, 400, machine(dense_ns=2, expert_ns=3, prices=prices), prefetch="top_k",
                           warm=((0, 0),))  # fmt: skip
    assert outcome.spans("expert")[0] == (7, 13, 0, 0)
    assert outcome.spans("dense") == [(0, 7, 0, -1), (13, 22, 1, -1)]


def test_a_router_is_charged_by_the_roofline() -> None:
    # a router of 8 x 4 weights at 16 bits: 64 bytes at 1 byte/ns and a launch of 3: 67. Over two tokens its arithmetic,
    # 2 x 32 x 2 at 1/ns, takes longer: 131. The last layer evaluates none. The dense part has no weights
    def lengths(tokens: int) -> list[int]:
        token = [Cell([0], look=[naming(4, [0])])] * 2
        of = sizes(2, 4, 1, expert_bytes=4, hidden=8, expert_params=1)
        source = ListSource(of, [Prompted([token] * tokens, tokens)])
        compute = Roofline(flops=1e9, memory_bytes_per_s=1e9, launch_ns=3)
        where = machine().model_copy(update={"compute": compute, "decisions": Decisions(gates=True)})
        return dense(replay_lists(source, 64, where, prefetch="top_k"))

    assert lengths(1) == [67, 0]
    assert lengths(2) == [131, 0]


def test_a_step_takes_as_much_longer_as_its_decisions() -> None:
    free, charged = named(3, passes=4), named(3, passes=4, prices={"decisions": {"by_policy": {"lru": 10}}})
    assert charged["time_ns"] - free["time_ns"] == charged["dense_ns"] - free["dense_ns"] == 3 * 4 * 10
    assert charged.counts("hits", "misses", "stall_ns") == free.counts("hits", "misses", "stall_ns")


# ---------------------------------------------------------------- victims


VICTIMS = {"decisions": {"ns_per_victim": 10}}


def test_each_victim_delays_the_transfer_that_evicts_it() -> None:
    # a pool of one expert of 4 bytes. Gate at 2: (0, 0) evicts nothing, 2-6, computed 6-9. Gate of layer 1 at 11:
    # (1, 0) evicts it: 11 + 10 + 4 = 25
    source = ListSource(sizes(2, 4, 1, expert_bytes=4), [Prompted(rows_of([[0], [0]]))])
    outcome = replay_lists(source, 4, machine(dense_ns=2, expert_ns=3, prices=VICTIMS))
    assert outcome.spans("transfer") == [(2, 6, 0, 0), (11, 25, 1, 0)]
    assert outcome.counts("evictions", "link_busy_ns", "time_ns") == (1, 4 + 14, 28)


def test_several_victims_of_one_transfer_add_up() -> None:
    # experts of 4 and of 8 bytes in a pool of 8. (0, 0) and (0, 1) move 2-6-10 and are computed by 13.
    # Gate at 15: (1, 0) evicts both: 15 + 20 + 8 = 43
    source = ListSource(sizes(2, 4, 2, expert_bytes=(4, 8)), [Prompted(rows_of([[0, 1], [0, -1]]))])
    outcome = replay_lists(source, 8, machine(dense_ns=2, expert_ns=3, prices=VICTIMS))
    assert outcome.spans("transfer") == [(2, 6, 0, 0), (6, 10, 0, 1), (15, 43, 1, 0)]


def test_latencies_of_victims_overlap_as_all_do() -> None:
    # two at once in a pool of two: at 13 both of layer 1 start. Each evicts one: bytes 23-27 and 27-31
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted(rows_of([[0, 1], [0, 1]]))])
    outcome = replay_lists(source, 8, machine(depth=2, dense_ns=0, expert_ns=3, prices=VICTIMS))
    assert outcome.spans("transfer")[:2] == [(0, 4, 0, 0), (0, 8, 0, 1)]
    assert outcome.spans("transfer")[2:] == [(11, 25, 1, 0), (11, 29, 1, 1)]


def test_a_rejected_demand_evicts_nothing() -> None:
    source = ListSource(sizes(1, 4, 1, expert_bytes=4), [Prompted(rows_of([[0]], [[1]], [[0]]))])
    outcome = replay_lists(source, 4, machine(dense_ns=2, expert_ns=3, prices=VICTIMS), eviction="belady:bypass=true")
    assert outcome.counts("declined", "evictions") == (1, 0)
    assert [end - begin for begin, end, _, _ in outcome.spans("transfer")] == [4, 4]


# ---------------------------------------------------------------- prefetches that compute loads

LOADS = {"loading": {"ns_per_expert": 1, "ns_per_mib": 1 << 20, "prefetch": True}}  # 5 ns for an expert of 4 bytes


def two_layers(prices: dict[str, Any], warm: tuple[tuple[int, int], ...], **settings: Any) -> Outcome:
    """A token that demands 0 and 1, then 2 and 3, as is predicted. Dense 1 ns, an expert 2."""
    token = [Cell([0, 1], look=[naming(4, [2, 3])]), Cell([2, 3])]
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted([token])])
    where = machine(dense_ns=1, expert_ns=2, prices=prices)
    return replay_lists(source, 64, where, prefetch="top_k", warm=warm, **settings)


def test_compute_loads_prefetches_before_the_hits_run() -> None:
    # gate at 1: 2 is loaded 1-6 and moves 6-10, 3 is loaded 6-11 and moves 11-15; only then the hits: 11-13-15. Dense
    # 15-16, and two hits
    outcome = two_layers(LOADS, warm=((0, 0), (0, 1)))
    assert outcome.spans("load", "prefetch") == [(1, 6, 1, 2), (6, 11, 1, 3)]
    assert outcome.spans("transfer") == [(6, 10, 1, 2), (11, 15, 1, 3)]
    assert outcome.spans("expert") == [(11, 13, 0, 0), (13, 15, 0, 1), (16, 18, 1, 2), (18, 20, 1, 3)]
    assert outcome.counts("prefetch_hits", "loading_ns", "stall_ns", "time_ns") == (2, 10, 0, 20)


def test_prefetches_are_loaded_behind_the_demands_of_the_step() -> None:
    # gate at 1: the demand 0 is loaded 1-6 and moves 6-10; then 2 and 3 are predicted, loaded 6-11-16, moved 11-15 and
    # 16-20. The hit 1 runs at 16-18, 0 at 18-20
    outcome = two_layers(LOADS, warm=((0, 1),))
    assert outcome.spans("load") == [(1, 6, 0, 0), (6, 11, 1, 2), (11, 16, 1, 3)]
    assert outcome.spans("transfer") == [(6, 10, 0, 0), (11, 15, 1, 2), (16, 20, 1, 3)]
    assert outcome.spans("expert")[:2] == [(16, 18, 0, 1), (18, 20, 0, 0)]


def test_after_the_demand_prefetches_are_loaded_at_the_end_of_the_step() -> None:
    # gate at 1, hits 1-3-5; loads 5-10-15, and the next dense part at 15-16. 3 moves 15-19: late
    outcome = two_layers(LOADS, warm=((0, 0), (0, 1)), prefetch_at="after_demand")
    assert outcome.spans("load") == [(5, 10, 1, 2), (10, 15, 1, 3)]
    assert outcome.spans("dense") == [(0, 1, 0, -1), (15, 16, 1, -1)]
    assert outcome.counts("prefetch_hits", "late", "loading_ns", "stall_ns", "time_ns") == (1, 1, 10, 1, 21)


def test_sequentially_prefetches_are_loaded_behind_the_first_look_up() -> None:
    # gate at 1: the miss 0 is loaded 1-6, moves 6-10; prefetches are loaded 6-11-16 and queue behind it: 11-15 and
    # 16-20. 0 is computed 16-18, and the hit 1: 18-20
    outcome = two_layers(LOADS, warm=((0, 1),), contract="sequential")
    assert outcome.spans("load") == [(1, 6, 0, 0), (6, 11, 1, 2), (11, 16, 1, 3)]
    assert outcome.spans("transfer") == [(6, 10, 0, 0), (11, 15, 1, 2), (16, 20, 1, 3)]
    assert outcome.spans("expert")[:2] == [(16, 18, 0, 0), (18, 20, 0, 1)]


@pytest.mark.parametrize("contract", ["atomic", "sequential"])
def test_a_step_that_demands_nothing_loads_what_it_predicts(contract: str) -> None:
    # the first layer is not routed: 2 is loaded 1-6
    token = [Cell([-1], look=[naming(4, [2])]), Cell([2])]
    source = ListSource(sizes(2, 4, 1, expert_bytes=4), [Prompted([token])])
    outcome = replay_lists(source, 64, machine(dense_ns=1, expert_ns=2, prices=LOADS), prefetch="top_k",
                           contract=contract)  # fmt: skip
    assert outcome.spans("load") == [(1, 6, 1, 2)]
    assert outcome.spans("dense") == [(0, 1, 0, -1), (6, 7, 1, -1)]


def test_every_prefetch_that_is_queued_is_loaded_once() -> None:
    # each step demands one of three experts, in a pool of two: what was used most is predicted and often absent
    rows = [[[e], [(e + 1) % 3]] for e in (0, 1, 2, 0, 2, 1, 1, 0)]
    source = ListSource(sizes(2, 4, 1, expert_bytes=4), [Prompted(rows_of(*rows))])

    def run(**more: bool) -> Outcome:
        where = machine(dense_ns=2, expert_ns=3, prices={"loading": {"ns_per_expert": 5, **more}})
        return replay_lists(source, 8, where, prefetch="frequent:factor=3")

    free, paid = run(), run(prefetch=True)
    assert free["loading_ns"] == 5 * free["misses"]
    assert paid["loading_ns"] == 5 * (paid["misses"] + paid["prefetch_issued"]) > 5 * paid["misses"]


# ---------------------------------------------------------------- figures and refusals


def test_figures_that_are_absent_change_no_document() -> None:
    plain, zero = platform("phone-ufs4"), platform("phone-ufs4:decisions.by_policy.lru=0:decisions.ns_per_victim=0")
    assert zero.figures() == plain.figures()
    assert "decisions" not in plain.document()


def test_any_policy_is_charged_in_place() -> None:
    found = platform("phone-ufs4:decisions.by_policy.lru=10000:decisions.by_policy.top_k=5").decisions
    assert found.by_policy == {"lru": 10_000, "top_k": 5}
    with pytest.raises(ConfigError, match=r"decisions\.by_policy\.lru=\?"):
        platform("phone-ufs4:decisions.by_policy.lruu=1")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[decisions]\nns_per_guess = 1", r"decisions\.ns_per_guess: unknown key"),
        ("[decisions]\nns_per_victim = -1", r"decisions\.ns_per_victim: .*at least 0"),
        ("[decisions]\nns_per_victim = 1e15", r"decisions\.ns_per_victim"),
        ("[decisions]\nns_per_prediction = 0.5", r"decisions\.ns_per_prediction: .*whole number"),
        ("[decisions]\ngates = true\nns_per_prediction = 1", r"gates cannot be combined with ns_per_prediction"),
        ("[decisions]\ngates = 2", r"decisions\.gates: expected true or false"),
        ("[decisions.by_policy]\nlru = true", r"decisions\.by_policy"),
        ("[decisions.by_policy]\nlruu = 1", r"unknown policy 'lruu'.*lru"),
        ('[decisions]\ngates = true\n[compute]\nkind = "measured"', r"gates requires .*roofline"),
        ("[decisions]\ngates = true", r"gates requires the hidden size"),
        ("[loading]\nprefetch = true", r"prefetch requires ns_per_expert or ns_per_mib"),
        ('[loading]\nprefetch = "yes!"', r"loading\.prefetch: expected true or false"),
    ],
    ids=str,
)
def test_a_wrong_figure_is_refused_by_name(text: str, facts: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\nbase = "a100-5gbps"\n{text}\n')
    with pytest.raises(ConfigError, match=facts):
        ready = plan(open_trace(SAMPLE), configure(platform=str(file), prefetch="top_k"))
        spec = ready.spec(log=False)
        assert (spec.decision_ns(0, 1), spec.times.victim_ns) == (0, 0)
