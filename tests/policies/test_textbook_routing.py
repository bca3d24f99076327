"""Worked examples of routing policies: the rules of their sources, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moereplay.policies.contract import UNIT
from moereplay.traces.routers import weigh
from moereplay.traces.schema import Header, Request, memory_trace
from tests.kit.bound_policies import BARE, PolicyHarness
from tests.kit.cases import Cell, ListSource, Prompted, machine, replay_lists, sizes
from tests.kit.every import every
from tests.kit.policy_runs import RENORMALISED, Sizes, geometry_of, replayed

EIGHT = Sizes(layers=1, experts=8, k=3)
FALLING = [4.0, 3.0, 2.0, 1.0, 0.5, 0.0, -1.0, -2.0]  # expert e has rank e + 1


@every(
    "text, chosen",
    [
        # ranks 2 to 5 may be reordered: 4 is resident and comes before 1 and 2, of which the better is left
        ("max_rank:m=5:top_j=1", [0, 1, 4]),
        # up to rank 7 both residents come in, beside the protected first
        ("max_rank:m=7:top_j=1", [0, 4, 6]),
        # only the third slot may change, and the better resident takes it
        ("max_rank:m=7:top_j=2", [0, 1, 4]),
        # with nothing protected two of three are residents
        ("max_rank:m=7:top_j=0", [0, 4, 6]),
        # a window of k, or k protected, is the identity
        ("max_rank:m=3:top_j=0", [0, 1, 2]),
        ("max_rank:m=8:top_j=3", [0, 1, 2]),
    ],
)
def test_max_rank_by_hand(text: str, chosen: list[int]):
    """Experts 4 and 6, of ranks 5 and 7, are resident; three are chosen."""
    harness = PolicyHarness("routing", text, EIGHT)
    harness.make_resident(4, 6)
    assert harness.choose([0, 1, 2], FALLING) == chosen


def test_max_rank_prefers_ram_to_a_disk():
    """Two levels: of ranks 2 to 6, with the first protected, 5 is in VRAM and 3 and 4 in RAM; the choice is 0 1 2.

    One level takes 5 and the best of the others, 1; two take 5 and 3. With nothing in VRAM RAM has both places.
    """
    for text, residents, chosen in (
        ("max_rank:m=6:top_j=1", [5], [0, 1, 5]),
        ("max_rank:m=6:top_j=1:levels=2", [5], [0, 3, 5]),
        ("max_rank:m=6:top_j=1:levels=2", [], [0, 3, 4]),
    ):
        harness = PolicyHarness("routing", text, EIGHT)
        harness.make_resident(*residents)
        for e in (3, 4):
            harness.tables.copies[e]["lower"] = 1
        assert harness.choose([0, 1, 2], FALLING) == chosen


@every(
    "p, chosen",
    [
        ("0.5", [0, 1, 2]),  # one expert holds half: the window is k
        ("0.9375", [0, 1, 2]),  # 1/2 + 1/4 + 1/8 + 1/16: four, of which rank 4 is absent
        ("0.95", [0, 1, 4]),  # a fifth is needed, and it is resident
        ("0.99", [0, 4, 6]),  # 127/128: seven
    ],
)
def test_cumulative_probability_by_hand(p: str, chosen: list[int]):
    """Probabilities 1/2, 1/4, ... 1/128, 1/128. J = 1 protects the first."""
    harness = PolicyHarness("routing", f"cumulative:top_j=1:p={p}", EIGHT)
    harness.make_resident(4, 6)
    assert harness.choose([0, 1, 2], FALLING, [2.0**-n for n in (1, 2, 3, 4, 5, 6, 7, 7)]) == chosen


def cecar(text: str) -> list[int]:
    """At pass 10; 4 was used in pass 9, 5 in pass 8, 6 in pass 6: distances 1, 2 and 4."""
    harness = PolicyHarness("routing", text, EIGHT)
    harness.at(**{"pass": 10})
    harness.make_resident(4, 5, 6)
    for expert, last in ((4, 9), (5, 8), (6, 6)):
        harness.learn(expert, {"last_pass": last, "uses_ever": 1})
    return harness.choose([0, 1, 2], FALLING)


def test_cecar_lifts_what_is_used_again_soon_and_drops_what_is_absent_and_weak():
    """The lift is up to 4 - 2 = 2: expert 4 gets (1 - 1/4) of it, 0.5 + 1.5 = 2, as much as expert 2 has.

    The recorded choice wins the tie. Expert 5 gets half, 0 + 1 = 1; expert 6, the farthest, nothing. With T = 2 the
    third, expert 2, is dropped: it is absent. The first two are kept, absent as they are.
    """
    assert cecar("reuse_distance:keep=3") == [0, 1, 2]
    assert cecar("reuse_distance:keep=2") == [0, 1, -1]


def test_cecars_lifted_expert_needs_no_fetch():
    """Without the tie, expert 4 replaces 2, and being resident it is never dropped."""
    harness = PolicyHarness("routing", "reuse_distance:keep=1", EIGHT)
    harness.at(**{"pass": 10})
    harness.make_resident(4, 6)
    harness.learn(4, {"last_pass": 9})
    harness.learn(6, {"last_pass": 2})
    # distances 1 and 8: 0.5 + 2 * 7/8 = 2.25 exceeds 2
    assert harness.choose([0, 1, 2], FALLING) == [0, 4, -1]


@every(
    "text, chosen",
    [
        # absent are 0, 1 and 2, of .25 to .21; 4 (.10) and 6 (.02) are there, and of 1 or 2 the latter costs less
        ("regret=.12:swaps=1", [0, 1, 4]),
        # .11 is just too much, in shares of 1
        ("regret=.1:swaps=2", [0, 1, 2]),
        # the second cheapest pair of the two that are left, 1 and 6, costs .21
        ("regret=.2:swaps=2:m=8", [0, 1, 4]),
        ("regret=.22:swaps=2:m=8", [0, 4, 6]),
        # 6 is the seventh: beyond twice k
        ("regret=1:swaps=2", [0, 1, 4]),
        ("regret=1:swaps=1:m=8", [0, 1, 4]),
        # scores are 4 3 2 1 .5 0 -1 -2: 2 - .5 is 1.5, and then 3 + 1 is too much
        ("of=score:regret=1.5:swaps=3:m=8", [0, 1, 4]),
        ("of=score:regret=1.4:swaps=3:m=8", [0, 1, 2]),
    ],
)
def test_bounded_swaps_by_hand(text: str, chosen: list[int]):
    """Experts 4 and 6, of ranks 5 and 7, are resident; three are chosen, with a probability of .25, .23 and .21."""
    harness = PolicyHarness("routing", f"bounded:{text}", EIGHT)
    harness.make_resident(4, 6)
    assert harness.choose([0, 1, 2], FALLING, [0.25, 0.23, 0.21, 0.14, 0.1, 0.04, 0.02, 0.01]) == chosen


def batch_of(text: str, *residents: int) -> list[list[int]]:
    """The choice for three decoded tokens of eight experts, three each, scores falling from 7 in the orders given."""
    orders = ([0, 1, 2, 3, 4, 5, 6, 7], [3, 0, 6, 1, 2, 7, 5, 4], [5, 4, 7, 6, 3, 2, 1, 0])
    scores = [[7.0 - order.index(e) for e in range(8)] for order in orders]
    harness, out = PolicyHarness("routing", text, EIGHT), [[-1] * 3 for _ in orders]
    harness.at(tokens=len(orders))
    harness.make_resident(*residents)
    harness.ask("choose", BARE._replace(ids=[order[:3] for order in orders], choice=scores), out)
    return out


def test_piggyback_takes_what_other_tokens_of_the_batch_need():
    """OEA: with a baseline of one the tokens need 0, 3 and 5, three experts where their own choice has eight.

    The first token ranks them 0 3 5, the second 3 0 5, the third 5 3 0. With two the union is 0 1 3 5 4: the third
    place goes to 3, 1 and 3. Where 2 is resident the first token keeps all of its own choice.
    """
    assert batch_of("piggyback:keep=1") == [[0, 3, 5], [3, 0, 5], [5, 3, 0]]
    assert batch_of("piggyback:keep=2") == [[0, 1, 3], [3, 0, 1], [5, 4, 3]]
    assert batch_of("piggyback:keep=2:also=resident", 2) == [[0, 1, 2], [3, 0, 1], [5, 4, 3]]
    assert batch_of("piggyback:keep=3") == [[0, 1, 2], [3, 0, 6], [5, 4, 7]]


def test_a_lone_token_has_none_to_ride_with():
    """Its own baseline is the union, unless residents count; 4 and 6 are there."""
    for also, chosen in (("none", [0, -1, -1]), ("resident", [0, 4, 6])):
        harness = PolicyHarness("routing", f"piggyback:keep=1:also={also}", EIGHT)
        harness.make_resident(4, 6)
        assert harness.choose([0, 1, 2], FALLING) == chosen


def kept(text: str, profile: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Return the experts that two tokens run, of four in each of two layers; scores fall with the expert's number."""
    logits = np.tile(np.array([3.0, 2.0, 1.0, 0.0], np.float32), (2, 2, 1))
    chosen = np.array([[[0, 1], [0, 1]], [[0, 2], [0, 1]]])
    weights = weigh(RENORMALISED, logits, chosen)
    header = Header(geometry=geometry_of(Sizes(layers=2, experts=4, k=2)))
    trace = memory_trace(header, [Request(chosen, 0, weights, logits)])
    return replayed(trace, 8, routing=text, profile=tuple(profile)).ran


def test_a_pruned_model_routes_among_the_experts_that_it_keeps():
    """1 and 3 of layer 0 are left, and 2 of layer 1. In layer 0 the first token has 1 and then 3, the second, which did
    not choose 1, takes it by its score. In layer 1 a place stays empty. A layer that the list leaves out is not pruned.
    """
    assert kept("keep:profile=given", [(0, 3), (1, 2), (0, 1)]) == [[[1, 3]], [[2, -1]], [[1, 3]], [[2, -1]]]
    assert kept("keep:profile=given", [(0, 3), (0, 1)]) == [[[1, 3]], [[0, 1]], [[1, 3]], [[0, 1]]]


def test_pruning_by_frequency_keeps_what_the_trace_chose_most_often():
    """Half of four. Layer 0 chose 0 twice, 1 and 2 once, ties by id: 0 and 1 stay. Layer 1 chose these.

    A quarter is one expert, 0 in both; the other place stays empty.
    """
    assert kept("keep", []) == [[[0, 1]]] * 4
    assert kept("keep:share=.25", []) == [[[0, -1]]] * 4


def prior(
    text: str, resident: Sequence[int], ids: Sequence[int], scores: Sequence[float], *weights: float
) -> list[int]:
    """Return Cache-Prior's choice among four experts."""
    harness = PolicyHarness("routing", f"cache_prior:delta=token_range:{text}", Sizes(layers=1, experts=4, size=8, k=2))
    harness.make_resident(*resident)
    return harness.choose(ids, scores, weights=weights)


def test_cache_prior_leaves_ranks_to_the_router():
    """Lifted by half of the range 2, expert 1 (2.9 + 1) passes 0 (3), which remains the router's first."""
    assert prior("lam=.5:top_j=0", [1], [0, 1], [3, 2.9, 1, 1]) == [0, 1]


def test_cache_prior_protects_one_of_two_experts_and_two_of_more():
    """J = 2 of k = 2 would leave nothing to choose. Lift 1 = .5 * 2: 3 + 1 and 2.9 against the resident 2 + 1."""
    assert prior("lam=.5", [2], [0, 1], [3, 2.9, 2, 1]) == [0, 2]
    assert prior("lam=.5:top_j=2", [2], [0, 1], [3, 2.9, 2, 1]) == [0, 1]


def test_cache_prior_protects_by_gate_weight_where_a_bias_ranks_otherwise():
    """Scores with the bias are .9, 1.1, .85, .1, without it expert 0 weighs most: J = 1 lifts 0, not the first rank, 1.

    The range is 1, the lift .2: 0 1.1, 1 1.1, 2 1.05 and 3 .3. By rank, as where weights are not recorded, 1 would have
    1.3 and 2, resident, would win against 0.
    """
    scores = [0.9, 1.1, 0.85, 0.1]
    assert prior("lam=.2:top_j=1", [2, 3], [1, 0], scores, 0.5, 0.9) == [1, 0]
    assert prior("lam=.2:top_j=1", [2, 3], [1, 0], scores) == [1, 2]


def test_pruning_renormalises_what_is_left_where_the_router_does():
    """Mixtral's rule, softmax over the chosen: .75 and .25 from logits log 3 and 0. Alone, the first weighs 1.

    Of mass 1 .75 is kept and .25 dropped; total variation (|.75 - 1| + |.25 - 0|) / 2 = .25.
    """
    logits = [1.0986122886681098, 0.0, -9.0, -9.0]
    cell = Cell([0, 1], [3 * UNIT // 4, UNIT // 4], logits=logits)
    source = ListSource(sizes(1, 4, 2), [Prompted([[cell]])])
    outcome = replay_lists(source, 4, machine(), routing="prune:keep=1")
    assert source.executed == [[[0, -1]]]
    assert outcome.counts("mass", "mass_kept", "mass_dropped", "mass_substituted") == (
        UNIT,
        3 * UNIT // 4,
        UNIT // 4,
        0,
    )
    assert outcome["variation"] == pytest.approx(UNIT / 4, abs=2)


def test_pruning_rank_1_leaves_the_second_alone_with_all_the_weight():
    """Mixtral's rule again: of .75 and .25 the .75 is not executed, and the second expert, renormalised, weighs 1.

    Of mass 1 .25 is kept and .75 dropped; total variation (|0 - .75| + |1 - .25|) / 2 = .75.
    """
    logits = [1.0986122886681098, 0.0, -9.0, -9.0]
    cell = Cell([0, 1], [3 * UNIT // 4, UNIT // 4], logits=logits)
    source = ListSource(sizes(1, 4, 2), [Prompted([[cell]])])
    outcome = replay_lists(source, 4, machine(), routing="prune_rank:rank=1")
    assert source.executed == [[[-1, 1]]]
    assert outcome.counts("mass", "mass_kept", "mass_dropped") == (UNIT, UNIT // 4, 3 * UNIT // 4)
    assert outcome["variation"] == pytest.approx(3 * UNIT / 4, abs=2)


def test_swapping_a_rank_for_the_next_best_is_the_mildest_case():
    """Rank 1 gives way to rank 4, the best that was not chosen; the paper finds that rank 1 ruins the model."""
    assert PolicyHarness("routing", "swap:rank=1:by=next", EIGHT).choose([0, 1, 2], FALLING) == [3, 1, 2]
    assert PolicyHarness("routing", "swap:rank=3:by=next", EIGHT).choose([0, 1, 2], FALLING) == [0, 1, 3]
