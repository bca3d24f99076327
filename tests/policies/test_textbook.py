"""Worked examples: classics of paging, and figures and formulas of the papers, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.kit.bound_policies import PolicyHarness
from tests.kit.every import every
from tests.kit.policy_runs import Nanoseconds, Outcome, Sizes, replayed, trace_of

BELADY_STRING = (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)


def paged(pages: Sequence[int], frames: int, eviction: str) -> Outcome:
    """A reference string as a model of one layer that uses one expert per token."""
    return replayed(trace_of([[[page]] for page in pages], 8), frames, eviction=eviction, contract="sequential")


def misses_of(outcome: Outcome) -> str:
    """M for a miss, . for a hit."""
    return "".join(".M"[not access.hit] for access in outcome.accesses)


# -- paging ---------------------------------------------------------------------------------------------------------


@every(
    "eviction, frames, faults",
    [("fifo", 3, 9), ("fifo", 4, 10), ("lru", 3, 10), ("lru", 4, 8), ("belady", 3, 7), ("belady", 4, 6)],
)
def test_beladys_anomaly(eviction: str, frames: int, faults: int):
    """Belady, Nelson & Shedler 1969: on this string FIFO faults more with more frames; LRU and OPT cannot.

    FIFO, 3 frames: 1 2 3 4 1 2 5 fault, 1 2 hit, 3 4 fault, 5 hits: 9. With 4 frames 1 and 2 hit in the middle,
    so they are the oldest when 5 comes, and 5 1 2 3 4 5 all fault: 10.
    """
    assert paged(BELADY_STRING, frames, eviction).misses == faults


def test_fifo_with_three_frames_step_by_step():
    """The frames hold 1 2 5 when the hits come, and 5 3 4 at the end."""
    assert misses_of(paged(BELADY_STRING, 3, "fifo")) == "MMMMMMM..MM."


def test_optimum_with_three_frames_step_by_step():
    """4 replaces 3 (next used last), 5 replaces 4, then 3 and 4 replace what is never used again."""
    assert misses_of(paged(BELADY_STRING, 3, "belady")) == "MMMM..M..MM."


def test_lru_is_a_stack_algorithm_on_a_loop():
    """Mattson et al. 1970: a loop over n pages never hits with fewer than n frames, and always with n."""
    loop = (0, 1, 2, 3) * 5
    assert [paged(loop, frames, "lru").misses for frames in (1, 2, 3, 4)] == [20, 20, 20, 4]


def test_lfu_keeps_an_old_favourite_that_lru_loses():
    """Two frames. 1 was used three times; under LFU 2 and 3 push each other out and 1 stays, under LRU 1 is lost."""
    pages = (1, 1, 1, 2, 3, 2, 3, 1)
    assert misses_of(paged(pages, 2, "lfu")) == "M..MMMM."
    assert misses_of(paged(pages, 2, "lru")) == "M..MM..M"


def test_a_resident_count_forgets_and_a_history_does_not():
    """Two frames: 1 1 2 2 2 3 1. For 3, 1 leaves (2 uses against 3), and then 3 (1 use) leaves for 1.

    When 3 comes back, the resident count of 1 is 1 again and it leaves (2 stays with 3); by history 1 has 3 uses
    against 2's 3, and is the more recent: 2 is evicted. So the last 2 hits or misses.
    """
    pages = (1, 1, 2, 2, 2, 3, 1, 3, 2)
    assert misses_of(paged(pages, 2, "lfu")) == "M.M..MMM."
    assert misses_of(paged(pages, 2, "lfu:count=history")) == "M.M..MMMM"


def test_arc_adapts_on_a_ghost_hit():
    """Four frames, by the pseudo code of Megiddo & Modha; lists from LRU to MRU, ghosts in brackets.

    0 0 1 1: both seen twice, T2 = 0 1. 2 3: T1 = 2 3. 4: cache full, p = 0 and T1 larger: 2 is evicted, T1 = 3 4 [2].
    2: a ghost hit in B1, p = 1; T1 has 2 > p, so 3 is evicted: T1 = 4 [3], T2 = 0 1 2.
    5: T1 has 1 = p and no ghost of B2 came, so T2's oldest, 0, leaves: T1 = 4 5 [3], T2 = 1 2 [0]. 4 hits: T2 = 1 2 4.
    0: a ghost hit in B2, p = 0; T1 = 5 exceeds it, so 5 is evicted: T2 = 1 2 4 0. Then 1 hits and 5 misses.
    LRU would have lost 1 by then: the frames would hold 2 5 4 0.
    """
    pages = (0, 0, 1, 1, 2, 3, 4, 2, 5, 4, 0, 1, 5)
    assert misses_of(paged(pages, 4, "arc")) == "M.M.MMMMM.M.M"
    assert misses_of(paged(pages, 4, "lru")) == "M.M.MMM.M.MM."


def test_arc_resists_a_scan():
    """Two pages used twice survive a scan of six others in four frames; LRU forgets them."""
    pages = (0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1)
    assert misses_of(paged(pages, 4, "arc"))[-2:] == ".."
    assert misses_of(paged(pages, 4, "lru"))[-2:] == "MM"


# -- SpecMD ---------------------------------------------------------------------------------------------------------


def evicted(outcome: Outcome) -> list[tuple[int, int]]:
    """(layer, expert) of every victim in order."""
    return [(event.layer, event.expert) for event in outcome.events if event.kind == "evict"]


def test_least_stale_evicts_stale_experts_of_layers_left_behind():
    """In the manner of SpecMD's figure 9: four layers, four slots, -1 where a token routes nowhere.

    Pass 0 fills the slots with 0 and 1 of layer 0, and 0 of layers 2 and 3. Pass 1 uses layer 0's expert 0 again;
    layer 1 then wants two. Its first evicts (0, 1): stale and left behind, 3 layers ahead. Its second evicts (3, 0), 2
    ahead, and not (2, 0), needed next; LRU does the opposite and misses at layer 2. At layer 3 all are current,
    and the one just used, (2, 0), has the longest way to go.
    """
    trace = trace_of([[[0, 1], [-1, -1], [0, -1], [0, -1]], [[0, -1], [0, 1], [0, -1], [0, -1]]], 4)
    assert evicted(replayed(trace, 4, eviction="least_stale")) == [(0, 1), (3, 0), (2, 0)]
    assert evicted(replayed(trace, 4, eviction="lru")) == [(0, 1), (2, 0), (3, 0), (0, 0)]


def test_least_stale_to_the_letter_evicts_the_lowest_passed_layer_first():
    """Three layers, four slots. Pass 0 fills them with 0 and 1 of layers 0 and 1; pass 1 uses 0 of both, then layer 2.

    Both 1s are stale and passed. `order=c` evicts (1, 1), which is needed last, 2 layers ahead; `order=d` (0, 1).
    """
    trace = trace_of([[[0, 1], [0, 1], [-1, -1]], [[0, -1], [0, -1], [0, -1]]], 3)
    assert evicted(replayed(trace, 4, eviction="least_stale")) == [(1, 1)]
    assert evicted(replayed(trace, 4, eviction="least_stale:order=d")) == [(0, 1)]


def test_least_stale_counts_what_its_own_gate_passed_over_as_left():
    """Five slots: layer 0's new expert takes the free one; layers 1 to 3 each evict their own old one, a round away."""
    trace = trace_of([[[0]] * 4, [[1]] * 4], 4)
    assert evicted(replayed(trace, 5, eviction="least_stale")) == [(1, 0), (2, 0), (3, 0)]


def test_least_stale_hits_where_lru_evicts_what_comes_next():
    """Four layers, one expert each, three slots, three passes: LRU always evicts what the next layer needs.

    Least-Stale, pass 0: layer 3 needs room while 0, 1 and 2 are all current; the one farthest ahead leaves: 2 (distance
    3; 1 has 2, 0 has 1). Pass 1: 0 and 1 hit; layer 2 evicts the only stale expert, 3; layer 3 evicts 2 again.
    """
    trace = trace_of([[[0]] * 4] * 3, 4)
    assert replayed(trace, 3, eviction="lru").hits == 0
    least_stale = replayed(trace, 3, eviction="least_stale")
    assert misses_of(least_stale) == "MMMM" + "..MM" * 2
    assert evicted(least_stale) == [(2, 0), (3, 0)] * 2 + [(2, 0)]


def test_hobbits_distance_is_cyclic_and_specmds_absolute():
    """At layer 3 of 4 with experts of layers 0, 1 and 2 resident: cyclic evicts 2 (3 ahead), absolute 0 (3 away)."""
    trace = trace_of([[[0]] * 4], 4)
    assert evicted(replayed(trace, 3, eviction="farthest_layer")) == [(2, 0)]
    assert evicted(replayed(trace, 3, eviction="farthest_layer:distance=absolute")) == [(0, 0)]


def test_accumulated_scores_keep_a_once_important_expert():
    """Two slots. Expert 0 weighs .9 once; 1 weighs .2 twice, .4 in all, and is evicted for 2 although more recent."""
    trace = trace_of([[[0]], [[1]], [[1]], [[2]]], 4, [[[0.9]], [[0.2]], [[0.2]], [[0.5]]])
    assert evicted(replayed(trace, 2, eviction="score")) == [(0, 1)]


def test_cascade_8_4_2_moves_the_tail_at_fewer_bits():
    """Ten experts of 8 bytes at 8 bits by falling weight: the bottom 60 % are six, of which the bottom 30 % three.

    So four move at 8 bits, three at 4 and three at 2: 4 * 8 + 3 * 4 + 3 * 2 = 50 bytes, in 50 ns at a byte each.
    """
    trace = _one_step_of_ten()
    outcome = replayed(trace, 20, miss="cascade:bits=8/4/2:below=.6/.3")
    moved = [event.t1 - event.t0 for event in outcome.events if event.kind == "transfer"]
    assert moved == [8] * 4 + [4] * 3 + [2] * 3
    assert outcome.totals["bytes_demand"] == outcome.totals["link_busy_ns"] == 50
    assert outcome.totals["low_precision"] == 6


def test_cascade_under_pressure_falls_back_as_memory_fills():
    """40 bytes free for ten experts: four at 8 bits leave 8, the fifth takes them; the rest gets the lowest precision.

    Five at 8 bits are 40 bytes; five at 2 bits, 10 more, wait for room: the first four evict what has been computed.
    """
    outcome = replayed(_one_step_of_ten(), 5, Nanoseconds(expert=1), miss="cascade:when=pressure")
    moved = [event.t1 - event.t0 for event in outcome.events if event.kind == "transfer"]
    assert moved == [8] * 5 + [2] * 5


def _one_step_of_ten():
    weights = [0.19, 0.17, 0.15, 0.13, 0.11, 0.09, 0.07, 0.05, 0.03, 0.01]
    trace = trace_of([[list(range(10))]], 16, [[weights]])
    geometry = trace.geometry.model_copy(update={"expert_bytes": (8,)})
    return replace(trace, header=trace.header.model_copy(update={"geometry": geometry}))


# -- Cache-Prior ------------------------------------------------------------------------------------------------------


def prior(text: str, resident: Sequence[int]) -> PolicyHarness:
    """The cache-prior policy bound to one layer of six experts, of which some are resident."""
    harness = PolicyHarness("routing", f"cache_prior:{text}", Sizes(1, 6, 2))
    harness.make_resident(*resident)
    return harness


def pair(harness: PolicyHarness, scores: list[float]) -> list[int]:
    """The pair chosen for one token; recorded order is by score, then id."""
    return harness.choose(sorted(range(6), key=lambda e: -scores[e])[:2], scores)


LOGITS = [4.0, 3.0, 2.5, 1.0, 0.0, -1.0]  # range 5, mean 9.5 / 6


@every(
    "text, chosen",
    [
        # J = 1 lifts 0 with the resident 2 and 5: 4 + 5/8, 3, 2.5 + 5/8 = 3.125, ..: 2 overtakes 1
        ("lam=0.125:top_j=1", [0, 2]),
        # lam * 5 = 0.4 lifts 2 to 2.9 only
        ("lam=0.08:top_j=1", [0, 1]),
        # J = 2 lifts 1 as well: 3.625 against 3.125
        ("lam=0.125:top_j=2", [0, 1]),
        # J = 0 and lam * 5 = 5: 2 rises to 7.5, 5 to 4, which ties with 0; the recorded choice comes first
        ("lam=1:top_j=0", [0, 2]),
        # a little more and even the worst resident passes
        ("lam=1.1:top_j=0", [2, 5]),
        # the mean logit 1.58 instead of the range: 2.5 + 0.25 * 1.58 = 2.896 stays below 3
        ("lam=0.25:top_j=1:delta=running_mean", [0, 1]),
        ("lam=0.25:top_j=1:delta=token_range", [0, 2]),
    ],
)
def test_cache_prior_by_hand(text: str, chosen: list[int]):
    """Residents 2 and 5; the first token's running range is its own."""
    assert pair(prior(text, [2, 5]), LOGITS) == chosen


def test_cache_priors_scale_is_the_mean_range_so_far():
    """A flat token first (range 1): the mean is (1 + 5) / 2 = 3, so 2 rises by 3/8 to 2.875, short of 3.

    A token's own range ignores the flat one: 2.5 + 5/8; the moving average hardly moves: 0.99 * 1 + 0.01 * 5 = 1.04.
    """
    flat, second = [1.0, 0.5, 0.0, 0.0, 0.0, 0.0], {}
    for delta in ("running_range", "token_range", "ema_range"):
        harness = prior(f"lam=0.125:top_j=1:delta={delta}", [2, 5])
        pair(harness, flat)
        second[delta] = pair(harness, LOGITS)
        spread = harness.bound.own.reals[0][0]
        assert spread == pytest.approx({"running_range": 6, "token_range": 0, "ema_range": 1.04}[delta])
    assert second == {"running_range": [0, 1], "token_range": [0, 2], "ema_range": [0, 1]}


def test_cache_prior_never_resurrects_a_masked_group():
    """Experts outside the kept groups score -inf; residency lifts nothing from there."""
    masked = [4.0, 3.0, -float("inf"), 1.0, -float("inf"), -float("inf")]
    assert pair(prior("lam=10:top_j=0", [2, 3, 5]), masked) == [0, 3]
