"""Worked examples of more evictions: formulas and figures of their sources, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moereplay.policies.contract import RESIDENT, UNIT, Costs
from moereplay.policies.eviction import mrs, payback, shielded_score
from moereplay.policies.grammar import parse
from moereplay.traces.schema import MOST_BIAS
from tests.kit.bound_policies import BARE, PolicyHarness
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace, replayed, trace_of
from tests.kit.scenarios import CONTRACTS
from tests.policies.test_textbook import evicted, misses_of, paged

MODEL = Sizes(layers=4, experts=7, k=2)

# -- queues ---------------------------------------------------------------------------------------------------------


def victims(pages: Sequence[int], frames: int, eviction: str) -> list[int]:
    """Pages in the order in which they leave."""
    return [page for _, page in evicted(paged(pages, frames, eviction))]


def test_clock_gives_a_second_chance():
    """Three frames, 1 2 3, then 2 again: marked. 4 replaces 1, the oldest. For 5 the hand comes to 2, spends its mark
    and replaces 3. For 6 the oldest are 4, 2, 5: 4 is evicted. FIFO would have replaced 1, 2, 3.
    """
    assert victims((1, 2, 3, 2, 4, 5, 6), 3, "clock") == [1, 3, 4]
    assert victims((1, 2, 3, 2, 4, 5, 6), 3, "fifo") == [1, 2, 3]


def test_a_clock_of_two_bits_gives_up_to_three_chances():
    """0 is hit twice: two marks. 1 is evicted for 2 and 2 for 3, each time after 0 spent one; then 0 is evicted for 4.

    With one bit the second hit is forgotten: 1 is evicted, then 0, then 2.
    """
    assert victims((0, 1, 0, 0, 2, 3, 4), 2, "clock:bits=2") == [1, 2, 0]
    assert victims((0, 1, 0, 0, 2, 3, 4), 2, "clock") == [1, 0, 2]


def test_sieve_keeps_its_hand_where_it_stopped():
    """Zhang et al.: frames hold 1 2 3, oldest first; 1 is hit: marked. For 4 the hand spends that mark and replaces 2.

    It now points at 3, the next newer, which is evicted for 5; then 4 is evicted for 6 and 5 for 7: new pages go
    quickly, and 1 stays where it is. CLOCK moved 1 to the newest end and meets it again, unmarked, after 3.
    """
    assert victims((1, 2, 3, 1, 4, 5, 6, 7), 3, "sieve") == [2, 3, 4, 5]
    assert victims((1, 2, 3, 1, 4, 5, 6, 7), 3, "clock") == [2, 3, 1, 4]


def test_slru_keeps_what_was_used_twice_and_lets_it_down_gently():
    """Karedla et al.: two of four frames protected. 0 1 2 3 fill the probation; hits on 0 and 1 protect them.

    A hit on 2 protects it too, so 0, the least recent there, becomes the newest of the probation: 3 0 | 1 2.
    A scan of 4 5 then pushes out 3 and 0; 1 and 2 still hit. LRU would have lost 3 and 0 as well, but then 1 for 6.
    """
    pages = (0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 1, 2)
    assert victims(pages, 4, "slru") == [3, 0, 4]
    assert misses_of(paged(pages, 4, "slru"))[-2:] == ".."
    assert victims(pages, 4, "lru")[:3] == [3, 0, 1]


def test_s4lru_raises_step_by_step():
    """Huang et al.: four queues of one frame each. Every hit moves a page one queue up, and what was there one down.

    0 1 2 3, then 3 twice: queue 1 takes 3, then queue 2. A hit on 2 takes it to queue 1. 0, 1 remain below: 4 replaces
    0, 5 replaces 1, 6 replaces 4; 2 and 3 stay.
    """
    assert victims((0, 1, 2, 3, 3, 3, 2, 4, 5, 6), 4, "slru:segments=4:protected=.75") == [0, 1, 4]


def test_lirs_keeps_part_of_a_loop_that_lru_loses():
    """Jiang & Zhang: a loop over one page more than there are frames. Three frames, two of them LIR; S from its bottom.

    0 and 1 become LIR, 2 does not. 3 replaces 2, the only one in Q: S = 0 1 (2) 3. Hits on 0 and 1 bring both to the
    top, and 2 and 3 leave S below them. So 2 returns as a stranger, replaces 3, and 3 then 2: half of the loop hits.
    """
    loop = (0, 1, 2, 3) * 3
    assert misses_of(paged(loop, 3, "lirs")) == "MMMM..MM..MM"
    assert misses_of(paged(loop, 3, "lru")) == "M" * 12


def test_lirs_exchanges_status_by_the_distance_between_two_uses():
    """Three frames, two of them LIR: 0 and 1. 2, then 3, which replaces it: S = 0 1 (2) 3, Q = 3.

    2 comes again, and has two others since its last use where 0 has three: 3 is evicted from Q, 2 becomes LIR and 0, at
    the bottom of S, moves to Q. 4 replaces 0. 1 and 2 hit. Under LRU 4 replaces 1, which was used before 3.
    """
    pages = (0, 1, 2, 3, 2, 4, 1, 2)
    assert victims(pages, 3, "lirs") == [2, 3, 0]
    assert misses_of(paged(pages, 3, "lirs")) == "MMMMMM.."
    assert misses_of(paged(pages, 3, "lru")) == "MMMM.MM."
    # a queue of everything is LRU
    assert misses_of(paged(pages, 3, "lirs:hir=1")) == "MMMM.MM."


def test_w_tinylfu_lets_a_scan_through_its_window_alone():
    """Einziger et al.: three frames, one of them the window. 0 and 1 are used twice and become the main part; 2 is in
    the window when 3 comes. One use does not win against two of 0, the oldest in the probation: 2 is evicted.

    3 hits in the window, two uses. That ties with 0, so for 5 it is 3 that is evicted. It comes again, a third use, and
    5 with one is evicted. When 6 comes 3 wins, and replaces 0. LRU would have lost 0 to 3 and 1 to 5.
    """
    pages = (0, 0, 1, 1, 2, 3, 3, 5, 3, 6)
    assert victims(pages, 3, "tinylfu") == [2, 3, 5, 0]
    assert victims(pages, 3, "lru") == [0, 1, 2]
    scan = (0, 0, 1, 1, 2, 3, 4, 5, 0, 1)
    assert misses_of(paged(scan, 3, "tinylfu"))[-2:] == ".."
    assert misses_of(paged(scan, 3, "lru"))[-2:] == "MM"


def test_tinylfu_without_a_window_admits_what_was_used_more_often():
    """Two frames: 0, twice, and 1. 2 has one use, then two, which ties with 0: the bypass buffer. The third wins."""
    outcome = paged((0, 0, 1, 2, 2, 2, 2), 2, "tinylfu:window=0:protected=0")
    assert misses_of(outcome) == "M.MMMM."
    assert evicted(outcome) == [(0, 0)]
    assert outcome.totals["declined"] == 2


def test_tinylfu_halves_its_counts():
    """Two frames and samples of two uses per frame. Four uses of 0 end the first sample: 2, and 2 uses are counted.

    1, then 2: four are counted, 0 has 1, the others 0. 2 again has 1, a tie; once more 2, the end of a sample: 1 and 0.
    """
    pages = (0, 0, 0, 0, 1, 2, 2, 2)
    assert victims(pages, 2, "tinylfu:window=0:protected=0") == []
    assert victims(pages, 2, "tinylfu:window=0:protected=0:sample=2") == [0]


def test_lru_2_tells_index_pages_from_records():
    """O'Neil et al., example 1.1: every record is read through an index page, 0 or 1; records 2 to 7 come once.

    Three frames, so LRU always loses an index page before it returns (three others come between). LRU-2: a page with
    one use is evicted before any with two, least recent first: 0 for 3, 2 for 0 (which has two uses now), 1 for 4, 3
    for 1. From then on only records are evicted, and both index pages hit.
    """
    pages = (0, 2, 1, 3, 0, 4, 1, 5, 0, 6, 1, 7)
    assert misses_of(paged(pages, 3, "lru")) == "M" * 12
    assert misses_of(paged(pages, 3, "lru_k")) == "MMMMMMMM.M.M"
    assert victims(pages, 3, "lru_k")[:4] == [0, 2, 1, 3]


def test_lru_2_without_a_memory_forgets_that_it_has_met_a_page():
    """The same, but a returning index page has one use again and is no better than a record: every access misses."""
    pages = (0, 2, 1, 3, 0, 4, 1, 5, 0, 6, 1, 7)
    assert misses_of(paged(pages, 3, "lru_k:history=resident")) == "M" * 12


def test_s3fifo_demotes_quickly_and_remembers_ghosts():
    """Yang et al.: one frame small, three main (small=.25 of four); ghosts for three.

    0 1 2 3 fill the small queue; 0 is hit twice, 1 once. For 4 the small queue's oldest is looked at: 0 was used twice
    and goes to the main queue; 1 was used once, which is not enough: it is evicted, a ghost. 1 returns: the main queue.
    For it 2 is evicted, for 5 then 3. 0 has been there all along; a plain FIFO loses it to 4.
    """
    pages = (0, 1, 2, 3, 0, 0, 1, 4, 1, 5, 0)
    assert victims(pages, 4, "s3fifo:small=.25") == [1, 2, 3]
    assert misses_of(paged(pages, 4, "s3fifo:small=.25")) == "MMMM...MMM."
    assert victims(pages, 4, "fifo")[0] == 0
    # 6 and 7 push 4 and 5 through the small queue; 1, a ghost that returned, stays
    assert misses_of(paged((*pages, 6, 7, 1), 4, "s3fifo:small=.25"))[-3:] == "MM."


# -- counts that age --------------------------------------------------------------------------------------------------


def test_a_decayed_count_forgets_an_old_favourite():
    """Half-life one token. 0 is used at tokens 0, 1, 2: 1.75 then, and 1.75 / 8 = 0.22 at token 5. 1 is used at tokens
    3 and 4: 1.5 then, and 0.75 at token 5, so 0 is evicted for 2. With a half-life of 100 the counts are still about 3
    and 2, and 1 is evicted, as under LFU.
    """
    pages = (0, 0, 0, 1, 1, 2)
    assert victims(pages, 2, "lfu_decay:half_life=1") == [0]
    assert victims(pages, 2, "lfu_decay:half_life=100") == [1] == victims(pages, 2, "lfu")


def test_payback_admits_what_saves_its_transfer():
    """Two frames hold 0, used three times, and 1, once; no count decays noticeably. 2 comes again and again.

    A transfer that costs two uses: 2 has one, two, three against 1 + 2 and enters at its third. Without a price its
    first ties with 1 and suffices, and so it does at half a margin of 1.9: 1 >= .95. A margin of 0 asks nothing.
    """
    pages, slow = (0, 0, 0, 1, 2, 2, 2, 2), f"payback:half_life={1 << 20}:price="
    assert misses_of(paged(pages, 2, f"{slow}1.99")) == "M..MMMM."
    assert misses_of(paged(pages, 2, f"{slow}0:margin=0.99")) == "M..MM..."
    assert misses_of(paged(pages, 2, f"{slow}0:margin=1.01")) == "M..MMM.."
    assert misses_of(paged(pages, 2, f"{slow}9:margin=0")) == misses_of(paged(pages, 2, "lfu_decay"))


@every(
    "costs, price",
    [
        (Costs(load=700, compute=20, cpu=370), 2),  # 700 ns for 350 ns at every use
        (Costs(load=700, compute=20, cpu=0), 0),  # without a CPU the transfer is due in any case
        (Costs(load=700, compute=370, cpu=370), payback.NEVER_PAYS),  # nothing is saved
    ],
)
def test_the_price_of_a_transfer_in_uses(costs: Costs, price: float):
    """On a platform; a price that is given stays."""
    chosen, given = parse("eviction", "payback"), parse("eviction", "payback:price=5")
    assert chosen.policy.priced(chosen.params, costs)["price"] == price
    assert given.policy.priced(given.params, costs)["price"] == 5


@every("contract", CONTRACTS)
@every("prefetch, miss", [("none", "fetch"), ("top_k", "fetch"), ("missed", "cpu")])
def test_payback_without_a_margin_is_lfu_decay_to_the_last_event(contract: str, prefetch: str, miss: str):
    """Whatever fetches, on a trace of ties; with a margin it is not."""
    trace, texts = random_trace(3, Sizes(tokens=60, depth=1)), ("lfu_decay", "payback:margin=0", "payback:price=1")
    given: dict[str, Any] = {"contract": contract, "prefetch": prefetch, "miss": miss}
    plain, free, dear = (replayed(trace, 6, eviction=text, **given) for text in texts)
    assert plain == free != dear


def test_lfru_weighs_frequency_against_age():
    """2608.07911: frequency / (clock - last + 1), one step per token, for the page that comes at step 7.

    0: three uses, last at step 2: 3 / 6. 1: two uses, last at step 4: 2 / 4. 2: two uses, last at 6: 2 / 2.
    0 and 1 tie and the less recent is evicted. One step later 0 would have 3 / 7 and 1 2 / 5: 1 is evicted, as under
    LFU.
    """
    pages = (0, 0, 0, 1, 1, 2, 2)
    assert victims((*pages, 3), 3, "lfru") == [0]
    assert victims((*pages, 2, 3), 3, "lfru") == [1]
    assert victims((*pages, 3), 3, "lfu") == [1]


def test_class_lru_divides_age_by_use():
    """Half-life 128 tokens. Five uses of 0 at tokens 0 to 4 are worth 4.7 at token 13: class 2, so its age of 9 counts
    9 / 4. 1 was used once, at token 5: class 0, and its age of 8 counts 8: it is evicted for 3, where LRU takes 0.

    At token 45 the five uses are worth 3.9, class 1, and 41 / 2 exceeds the 10 of 4, used once at token 35: 0 is
    evicted.
    """
    soon, late = (*[0] * 5, 1, *[2] * 7, 3), (*[0] * 5, *[1] * 30, 4, *[1] * 9, 5)
    assert victims(soon, 3, "class_lru") == [1]
    assert victims(soon, 3, "lru") == [0]
    assert victims(late, 3, "class_lru") == [0]


# -- HOBBIT -----------------------------------------------------------------------------------------------------------


def test_a_use_at_low_precision_does_not_count():
    """Two experts a step, the heavier at 8 bits, the lighter at 4: 8 and 4 bytes; room for 16.

    0 high and 1 low, twice; then 2 high, which needs 8 with 4 free. 1 has no high use, 0 has two: 1 is evicted.
    LRU takes 0, which is used before 1 in every step.
    """
    trace = trace_of([[[0, 1]], [[0, 1]], [[2, 3]]], 8, [[[0.6, 0.4]]] * 3)
    geometry = trace.geometry.model_copy(update={"expert_bytes": (8,)})
    trace = replace(trace, header=trace.header.model_copy(update={"geometry": geometry}))
    first = {}
    for eviction in ("least_high_precision", "lru"):
        first[eviction] = evicted(replayed(trace, 2, eviction=eviction, miss="cascade:bits=8/4:below=.5"))[0]
    assert first == {"least_high_precision": (0, 1), "lru": (0, 0)}


def hobbit_order(text: str, layer: int, uses: dict[int, list[tuple[int, int]]], tokens: int) -> list[int]:
    """Experts 0 of layers 0 to 3, the first to leave first; `uses`: layer -> (token, precision) of each."""
    harness = PolicyHarness("eviction", text, MODEL, sizes=(8, 4))
    harness.at(layer=layer)
    history = sorted((token, used, precision) for used, each in uses.items() for token, precision in each)
    for token, used, precision in history:
        harness.tables.now.update(position=token, tokens=1)
        harness.call("on_use", used * MODEL.experts * 2 + precision)
    harness.tables.now.update(position=tokens - 1, tokens=1)
    return sorted(range(4), key=lambda layer: harness.call("key", layer * MODEL.experts * 2))


@every(
    "text, order",
    [
        # R / T: last used at tokens 2, 8, 4, 10 of 10
        ("w_lru=1:w_lfu=0:w_lhu=0:w_fld=0", [0, 2, 1, 3]),
        # F / T: 4, 1, 3, 2 uses
        ("w_lru=0:w_lfu=1:w_lhu=0:w_fld=0", [1, 3, 2, 0]),
        # H / T: 1, 0, 3, 2 of them at high precision
        ("w_lru=0:w_lfu=0:w_lhu=1:w_fld=0", [1, 0, 3, 2]),
        # 1 - d / 4 at layer 2: layers 2, 3, 0, 1 are 0, 1, 2, 3 ahead
        ("w_lru=0:w_lfu=0:w_lhu=0:w_fld=1", [1, 0, 3, 2]),
        # sums of all four: .2 + .4 + .1 + .5 = 1.2, .8 + .1 + 0 + .25 = 1.15, .4 + .3 + .3 + 1 = 2, 1 + .2 + .2 + .75
        ("", [1, 0, 2, 3]),
    ],
)
def test_hobbits_four_terms(text: str, order: list[int]):
    uses = {0: [(0, 0), (0, 1), (1, 1), (1, 1)], 1: [(7, 1)], 2: [(1, 0), (2, 0), (3, 0)], 3: [(8, 0), (9, 0)]}
    assert hobbit_order(f"hobbit:{text}".rstrip(":"), 2, uses, tokens=10) == order


# -- router scores ----------------------------------------------------------------------------------------------------


def keys_after(text: str, gates: Sequence[Sequence[int]]) -> list[int]:
    """Keys of layer 0's experts after gates with these scores, each a pass of one token."""
    harness = PolicyHarness("eviction", text, MODEL)
    for number, scores in enumerate(gates):
        harness.tables.now.update({"pass": number, "step": number * 4}, tokens=1)
        harness.ask("on_gate", BARE._replace(gate=[[*scores, *[0] * (MODEL.experts - len(scores))]]))
    return [harness.call("key", e) for e in range(len(gates[0]))]


def test_mrs_averages_only_what_is_near_the_top():
    """HybriMoE: S = a TopP(s) + (1 - a) S with a = 3/4 and, for k = 2, the four largest scores.

    First gate 40 30 20 8 2: S = 30 22.5 15 6 0, the last being the fifth. Second gate 0 8 10 60 22: the 0 is the fifth;
    S = 7.5, 6 + 5.625, 7.5 + 3.75, 45 + 1.5, 16.5.
    """
    keys = keys_after("mrs", [[40, 30, 20, 8, 2], [0, 8, 10, 60, 22]])
    assert [key / 2**16 for key in keys] == [7.5, 11.625, 11.25, 46.5, 16.5]


def test_mrs_takes_each_expert_once_where_a_bias_makes_scores_negative():
    """Of -8 -1 -9 -2 the three largest are kept; what is not kept counts as 0."""
    assert mrs.top({"experts": 4}, BARE._replace(gate=[[-8, -1, -9, -2]]), 3) == [-8, -1, 0, -2]


def test_sums_of_biased_scores_fit_64_bits():
    window, score = shielded_score.MOST, (1 + MOST_BIAS) * UNIT
    assert window * score * shielded_score.FINER < 2**63
    assert shielded_score.FINER > shielded_score.MOST**2  # so that two means of whole numbers never fall together


def test_smoe_averages_the_last_iterations_of_all_experts():
    """n = 1: the mean of the last two. Scores 20 0, 4 4, 2 12 give 3 and 8; all three would give 8.67 and 5.33."""
    harness = PolicyHarness("eviction", "shielded_score:n=1", MODEL)
    for scores in ([20, 0], [4, 4], [2, 12]):
        harness.ask("on_gate", BARE._replace(gate=[[*scores, *[50] * (MODEL.experts - 2)]]))
    for y in (0, 1):
        harness.tables.copies[y]["state"] = RESIDENT
        harness.call("on_insert", y, 0)
    assert harness.call("victim", 0, 5) == 0
    harness.call("on_predict", 0)  # a prefetch suggests 0: it is shielded, and evicted only after 1
    assert harness.call("victim", 0, 5) == 1
    harness.call("on_use", 0)
    assert harness.call("victim", 0, 5) == 0


def test_smoes_shield_holds_half_of_the_cache():
    """100 bytes and experts of 8: six predictions fit into 50; the seventh exposes the first."""
    harness = PolicyHarness("eviction", "shielded_score", MODEL)
    for y in range(7):
        harness.tables.copies[y]["state"] = RESIDENT
        harness.call("on_insert", y, 1)
    assert harness.call("victim", 0, 20) == 0


def test_a_window_of_scores_forgets_a_once_important_expert():
    """Two slots. 0 weighs .9 in pass 0, 1 weighs .2 in passes 1 and 2; over passes 2 and 3 that is 0 against .2."""
    trace = trace_of([[[0]], [[1]], [[1]], [[2]]], 4, [[[0.9]], [[0.2]], [[0.2]], [[0.5]]])
    assert evicted(replayed(trace, 2, eviction="score:over=window:window=2")) == [(0, 0)]
    assert evicted(replayed(trace, 2, eviction="score")) == [(0, 1)]


def test_moe_infinity_keeps_early_layers_and_what_this_sequence_uses():
    """Four layers; three of four assignments at layer 0 were expert 0's, one was 1's. Layer 3 used its 0 all the time.

    Ratio times 1 - l / 4: 3/4 * 1, 1/4 * 1, 1 * 1/4. With e = 1e-6 layer 3's is smaller than layer 0's 1, by 3/4 e.
    Frequencies are 3/8, 1/8 and 4/8: .28, .03, .13, so the order of the last two turns round.
    """
    for frequency, order in (("false", [21, 1, 0]), ("true", [1, 21, 0])):
        harness = PolicyHarness("eviction", f"activation_ratio:frequency={frequency}", MODEL)
        for token, chosen in enumerate((0, 0, 1, 0)):
            for layer, e in ((0, chosen), (3, 0)):
                harness.tables.now.update({"pass": token, "layer": layer, "gated": 1})
                harness.ask("on_gate", BARE._replace(expert=[layer * MODEL.experts + e], tokens=[1]))
        assert sorted((0, 1, 21), key=lambda y: harness.call("key", y)) == order


# -- profiles and the future ------------------------------------------------------------------------------------------


def test_static_placement_is_settled_once_the_best_have_come():
    """2608.07911's static row: the most often demanded stay. 2 comes three times, 1 and 0 twice, 3 once; two slots.

    0 and 1 fill them. 2 outranks both; 1 ranks below 0 (ties by id), so it is evicted. Then none outranks 0 and 2.
    """
    pages = (0, 1, 2, 1, 2, 3, 0, 2)
    outcome = paged(pages, 2, "static")
    assert misses_of(outcome) == "MMMM.M.."
    assert evicted(outcome) == [(0, 1)]
    assert outcome.totals["declined"] == 2


def test_a_given_profile_beats_the_traces_own_order():
    """--profile names 3 and 1: 3 replaces 0, which it does not list, and 2 may replace none that it lists."""
    pages, given = (0, 1, 3, 2, 0, 1, 3), {"profile": ((0, 3), (0, 1)), "contract": "sequential"}
    outcome = replayed(trace_of([[[page]] for page in pages], 8), 2, eviction="static:profile=given", **given)
    assert evicted(outcome) == [(0, 0)]
    assert misses_of(outcome) == "MMMMM.."


def test_pinned_experts_survive_a_scan():
    """Two of four slots for 0 and 1, the most demanded; 2 to 7 pass through the other two, and LRU loses 0 and 1."""
    pages = (0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1)
    assert misses_of(paged(pages, 4, "pinned"))[-2:] == ".."
    assert misses_of(paged(pages, 4, "lru"))[-2:] == "MM"


def test_belady_with_a_short_sight():
    """Two slots, 0 1 2: 0 comes back two tokens later, 1 four. Belady lets 1 go, and so does a window of two, which
    does not see 1. A window of one sees neither, and lets the less recent 0 go.
    """
    pages = (0, 1, 2, 2, 0, 2, 1)
    assert [victims(pages, 2, f"belady:window={window}")[0] for window in (0, 2, 1)] == [1, 1, 0]


# -- predictions ------------------------------------------------------------------------------------------------------


def test_a_prediction_refreshes_a_resident_if_it_counts():
    """Timestamps 3 and 5, and the older was suggested by a prefetch at 7."""
    for touch, leaves in (("false", 0), ("true", 1)):
        harness = PolicyHarness("eviction", f"lru:touch_on_predict={touch}", MODEL)
        harness.tables.experts[0].update(last_use=3, last_prediction=7)
        harness.tables.experts[1].update(last_use=5)
        assert min((0, 1), key=lambda y, harness=harness: harness.call("key", y)) == leaves
