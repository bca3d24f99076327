"""Worked examples of prefetch policies: the rules of their sources, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moereplay.analysis.ranking import heading
from moereplay.policies.contract import Step
from moereplay.simulator.capacity import parse_capacity
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan, replay
from tests.kit.bound_policies import BARE, PolicyHarness, look_ahead
from tests.kit.every import every
from tests.kit.policy_runs import Nanoseconds, Sizes, geometry_of, random_trace, replayed, trace_of

THREE_LAYERS = Sizes(layers=3, experts=4, k=2)


# -- SpecMD's percentile ----------------------------------------------------------------------------------------------


@every("experts, named", [(64, 13), (60, 12), (16, 3), (8, 2)])
def test_a_tokens_own_80th_percentile_names_a_constant_count(experts: int, named: int):
    """OLMoE, Qwen1.5, Phi and Mixtral: a fifth of the experts, 12.8, 12, 3.2 and 1.6, whatever the scores are.

    For 64 it lies between the 51st and the 52nd smallest (position 50.4), so 13 are above; for 16 it is the 13th
    smallest itself, and three are.
    """
    for power in (1, 3):
        harness = PolicyHarness("prefetch", "score", Sizes(layers=2, experts=experts, k=2))
        assert len(harness.suggest(look_ahead([(e / experts) ** power for e in range(experts)]))) == named


def test_a_running_percentile_names_more_where_the_router_is_sure():
    """The same 80 % over both layers' scores: the sure layer has two of the four largest eighths, the flat one none.

    First gate: 1/8 eight times; its own percentile is 1/8, nothing is above it. Second: 1/2, 1/4 and six small ones.
    Of sixteen scores 80 % is the 13th: 1/8, and 1/2 and 1/4 are above.
    """
    harness = PolicyHarness("prefetch", "score:pool=running", Sizes(layers=3, experts=8, k=2))
    assert harness.suggest(look_ahead([1 / 8] * 8)) == []
    harness.at(layer=1)
    assert harness.suggest(look_ahead([1 / 64, 1 / 2, 1 / 64, 1 / 4, 1 / 64, 1 / 64, 1 / 64, 1 / 64])) == [
        (2, 1),
        (2, 3),
    ]


# -- HOBBIT -----------------------------------------------------------------------------------------------------------

NEXT, AFTER = [0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.2, 0.6]  # predicted: 0 and 1; then 3 and 2


def hobbit(text: str, *resident: tuple[int, int]) -> list[tuple[int, int]]:
    harness = PolicyHarness("prefetch", text, THREE_LAYERS)
    for layer, expert in resident:
        harness.make_resident(expert, layer=layer)
    return harness.suggest(look_ahead(NEXT, AFTER, [0.0] * 4))


def test_hobbit_looks_past_a_layer_that_is_all_there():
    """Layer 1 misses expert 1: it is the one. With both there, layer 2 follows; p = 1 never looks that far."""
    assert hobbit("adaptive_depth:p=2", (1, 0)) == [(1, 0), (1, 1)]
    assert hobbit("adaptive_depth:p=2", (1, 0), (1, 1)) == [(1, 0), (1, 1), (2, 3), (2, 2)]
    assert hobbit("adaptive_depth:p=1", (1, 0), (1, 1)) == [(1, 0), (1, 1)]


def test_hobbits_scorer_fetches_the_lesser_expert_at_fewer_bits_or_not_at_all():
    """Of the predicted two, .5 / .8 = 62.5 % of the weight lies before expert 1: above T1 = .6, so low precision.

    With T2 = .6 it is not fetched at all. Before expert 0 lies nothing.
    """
    for t2, tiers in (("0.9", [0, 1]), ("0.6", [0])):
        harness = PolicyHarness("prefetch", f"adaptive_depth:p=1:precision=scored:t2={t2}", THREE_LAYERS, sizes=(8, 2))
        out = [-1] * 24
        count = harness.ask("suggest", look_ahead(NEXT), out)
        assert [y % 2 for y in out[:count]] == tiers


# -- SMoE -------------------------------------------------------------------------------------------------------------


def smoe(alpha: str, resident: Sequence[int], absent: int = -1) -> list[tuple[int, int]]:
    """The gate of layer 0 demands 0 and 1; of layer 1 .4, .3 and .2 are predicted: S_{k+1} = .2."""
    harness = PolicyHarness("prefetch", f"confident:alpha={alpha}", THREE_LAYERS)
    harness.make_resident(*resident)
    harness.at(absent=absent)
    return harness.suggest(look_ahead([0.1, 0.4, 0.2, 0.3])._replace(expert=[0, 1]))


def test_smoe_prefetches_what_stands_out_and_only_when_the_link_is_needed_anyway():
    """(1 + .35) * .2 = .27: both; (1 + .6) * .2 = .32: only the best. Nothing while the layer's own two are there."""
    assert smoe("0.35", resident=[0]) == [(1, 1), (1, 3)]
    assert smoe("0.6", resident=[0]) == [(1, 1)]
    assert smoe("0.35", resident=[0, 1]) == []


def test_smoe_counts_the_misses_that_substitution_leaves():
    """Only 0 is there. Looked up, 1 was replaced by a resident (none absent is left), or was not (one is)."""
    assert smoe("0.35", resident=[0], absent=0) == []
    assert smoe("0.35", resident=[0], absent=1) == [(1, 1), (1, 3)]


# -- MoE-Infinity -----------------------------------------------------------------------------------------------------


def test_moe_infinity_goes_on_as_the_most_similar_request_did():
    """Two requests of one token are stored: 0-0-0 and 1-(1, 2)-3. A third begins with 1, as the second did.

    Cosines of layer 0 are 0 and 1. Of the second's matrix, layer 1 has shares 1/2 and 1/2 and decay 1 - 1/4, layer 2
    share 1 and decay 1 - 2/4: priorities .375, .375 and .5.
    """
    harness, requests = (
        PolicyHarness("prefetch", "activation_matrix", THREE_LAYERS),
        [[[0], [0], [0]], [[1], [1, 2], [3]]],
    )
    for request, layers in enumerate([*requests, [[1]]]):
        for layer, demand in enumerate(layers):
            harness.at(request=request, layer=layer)
            names = harness.suggest(demand_of(layer, demand))
    assert names == [(2, 3), (1, 1), (1, 2)]


def test_of_requests_that_began_alike_the_latest_is_followed():
    """Both began with expert 0; one went on with 1, the later one with 2. Having begun with 0, a third follows that."""
    harness = PolicyHarness("prefetch", "activation_matrix:kept=2", THREE_LAYERS)
    for request, layers in enumerate([[[0], [1], [3]], [[0], [2], [3]], [[0]]]):
        for layer, demand in enumerate(layers):
            harness.at(request=request, layer=layer)
            names = harness.suggest(demand_of(layer, demand))
    assert names == [(1, 2), (2, 3)]


def demand_of(layer: int, experts: Sequence[int]) -> Step:
    return BARE._replace(expert=[layer * 4 + e for e in experts], tokens=[1] * len(experts))


# -- baselines --------------------------------------------------------------------------------------------------------


def named(prefetch: str, steps: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, int, int]]:
    """(pass, layer, expert) of every transfer of a prefetch, behind a link that is never late."""
    outcome = replayed(trace_of(steps, 6), 12, Nanoseconds(dense=100), prefetch=prefetch)
    transfers = [event for event in outcome.events if event.kind == "transfer" and event.cause == "prefetch"]
    return [(event.step_pass, event.layer, event.expert) for event in transfers]


def test_the_previous_tokens_experts_are_named_if_they_are_not_there():
    """12 slots keep everything: only what has never come is transferred, and the token before can name none of that."""
    assert named("previous_token", [[[0, 1], [2, 3]], [[0, 1], [4, 5]]]) == []


def test_coactivation_follows_the_pairs_it_has_seen():
    """Token 0 uses (0, 1) and then (2, 3) in layer 1. When 0 comes again in one layer, it votes for 2 and 3."""
    harness = PolicyHarness("prefetch", "coactivation", THREE_LAYERS)
    for layer, ids in enumerate([[0, 1], [2, 3]]):
        harness.at(**{"pass": 0, "layer": layer})
        assert harness.suggest(demand_of(layer, ids)._replace(ids=[ids])) == []
    harness.at(**{"pass": 1, "layer": 0})
    assert harness.suggest(demand_of(0, [0, 3])._replace(ids=[[0, 3]])) == [(1, 2), (1, 3)]
    assert harness.suggest(demand_of(0, [3, 2])._replace(ids=[[3, 2]])) == []


def test_the_most_used_come_first_and_the_unused_never():
    harness = PolicyHarness("prefetch", "frequent:factor=1.5", THREE_LAYERS)
    for expert, uses in ((4, 2), (6, 5), (7, 0)):
        harness.learn(expert, {"uses_ever": uses})
    assert harness.suggest(BARE) == [(1, 2), (1, 0)]


def test_a_perfect_oracle_one_layer_ahead_leaves_only_the_first_layer_to_miss():
    """With time enough (100 ns of dense part, 5 ns a transfer) and room for all, every later access hits."""
    trace = random_trace(1, Sizes(layers=4, experts=6, k=2, tokens=30))
    outcome = replayed(trace, 24, Nanoseconds(dense=100), prefetch="oracle")
    assert {access.layer for access in outcome.accesses if not access.hit} == {0}
    assert outcome.totals["predicted"] == outcome.totals["predicted_demanded"] == 30 * 3 * 2
    without = replayed(trace, 24, Nanoseconds(dense=100))
    assert outcome.totals["stall_ns"] < without.totals["stall_ns"]


# -- the bytes of side buffers ----------------------------------------------------------------------------------------


def test_side_buffers_come_on_top_of_the_capacity_or_out_of_it():
    """Eight layers of 16 experts of 5 bytes; 50 % are 320. Four buffers of 5 bytes leave 300, or 37 of a layer's 40."""
    trace = random_trace(1, Sizes(layers=8, experts=16, k=2, tokens=3, depth=1))
    for scope, beside, inside in (("global", (320,), (300,)), ("per_layer", (40,) * 8, (37,) * 8)):
        for count, pools in (("beside", beside), ("inside", inside)):
            prefetch = f"side_buffer:buffers=4:count={count}"
            ready = plan(trace, configure(capacity="50%", prefetch=prefetch, scope=scope))
            assert ready.capacity.pools == pools


def test_the_bytes_of_side_buffers_are_told_beside_the_capacity():
    trace = random_trace(1, Sizes(layers=2, experts=8, k=2, tokens=3, depth=1))
    results = [replay(trace, configure(capacity="50%", prefetch=prefetch)) for prefetch in ("none", "side_buffer")]
    assert [result.about["side_bytes"] for result in results] == [0, 20]
    lines = heading(trace, results)
    (line,) = [line for line in lines if "side buffers" in line]
    assert "side_buffer:buffers=4:fetch=2:count=beside: 20 bytes" in line


def test_side_buffers_that_leave_no_room_are_refused():
    geometry = geometry_of(Sizes(layers=2, experts=4, k=2))
    with pytest.raises(ConfigError, match="gives the pool 0 bytes after 20 of side buffers"):
        parse_capacity("20B", geometry, "global", ((5, 5),), reserved=20)
