"""Misses that are not simply fetched: precisions, drop, substitute, split; and how far the mixture moves."""

from __future__ import annotations

from typing import Any

from moereplay.policies.contract import UNIT
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, replay_lists, sizes
from tests.kit.every import every

CONTRACTS = every("contract", ["atomic", "sequential"])
HALF, QUARTER = UNIT // 2, UNIT // 4
MASSES = ("mass", "mass_kept", "mass_low_precision", "mass_substituted", "mass_dropped")
#: Every expert is one byte: 5 ns on the link, 2 ns of compute per token, 7 ns on the CPU, after 1 ns of dense part.
SLOW = machine(bytes_per_ns=0.2, dense_ns=1, expert_ns_per_token=2, cpu_ns=7)


def prefill(cells: list[Cell], experts: int = 4) -> ListSource:
    """One prefill pass through one layer, a cell per token."""
    rows: list[Token] = [[cell] for cell in cells]
    return ListSource(sizes(1, experts, len(cells[0].ids)), [Prompted(rows, prompt=len(rows))])


def executed(source: ListSource, **settings: Any) -> tuple[Outcome, list[list[list[int]]]]:
    outcome = replay_lists(source, 4, SLOW, **settings)
    return outcome, source.executed


# ---------------------------------------------------------------- precisions


def importance(*rows: list[int]) -> ListSource:
    """Decode passes of two experts of 8 bytes at 16 bits; the first of each row weighs more."""
    cells: list[Token] = [[Cell(ids, [3 * QUARTER, QUARTER])] for ids in rows]
    return ListSource(sizes(1, 4, 2, expert_bytes=8), [Prompted(cells)])


CASCADE = "cascade:bits=8/4:below=0.5"  # the less important half at 4 bits (2 bytes), the other at 8 bits (4 bytes)


@CONTRACTS
def test_a_higher_precision_satisfies_and_an_upgrade_is_an_ordinary_insertion(contract: str) -> None:
    # 0 at 8 and 1 at 4; then 1 at 8 is wanted, which was never resident: compulsory, while 0 at 4 is satisfied by 8;
    # then both by what is there. Both copies of 1 stay: 4 + 2 + 4 bytes
    outcome = replay_lists(importance([0, 1], [1, 0], [0, 1]), 10, SLOW, miss=CASCADE, contract=contract)
    assert outcome.counts("misses", "compulsory", "hits", "insertions", "evictions") == (3, 3, 3, 3, 0)
    assert outcome.counts("bytes_demand", "low_precision") == (10, 1)
    assert [(event.expert, event.precision) for event in outcome.events if event.kind == "transfer"] == [
        (0, 0),
        (1, 1),
        (1, 0),
    ]


def test_the_lower_copy_may_leave_for_its_own_upgrade() -> None:
    # 8 bytes: 0 at 8 is demanded, so only 1 at 4 can make room for 1 at 8
    outcome = replay_lists(importance([0, 1], [1, 0]), 8, SLOW, miss=CASCADE)
    assert [(event.expert, event.precision) for event in outcome.events if event.kind == "evict"] == [(1, 1)]


def test_why_a_copy_is_missing_is_judged_by_the_copies_that_would_have_done() -> None:
    # 6 bytes hold 0 at 8 and 1 at 4, then 1 at 8 needs 1 at 4 to go; 1 wanted at 4 is satisfied by 8 afterwards
    outcome = replay_lists(importance([0, 1], [1, 2], [0, 1]), 6, SLOW, miss=CASCADE)
    assert outcome.counts("misses", "compulsory", "capacity", "collisions") == (5, 4, 1, 0)


def test_one_precision_for_all_changes_the_bytes_and_nothing_else() -> None:
    outcome = replay_lists(importance([0, 1]), 4, SLOW, miss="fetch:bits=4")
    assert outcome.counts("bytes_demand", "low_precision", "hits", "misses") == (4, 0, 0, 2)


# ---------------------------------------------------------------- drop


def test_drop_skips_by_the_best_rank_over_the_prompt() -> None:
    # 1 is second for both tokens and dropped; 0 and 2 are first and fetched
    tokens = [Cell([0, 1], [3 * QUARTER, QUARTER]), Cell([2, 1], [HALF, HALF])]
    outcome, ran = executed(prefill(tokens), miss="drop:keep=1")
    assert ran == [[[0, -1], [2, -1]]]
    assert outcome.counts("accesses", "misses", "dropped", "bytes_demand") == (3, 3, 1, 2)


def test_drop_keeps_what_any_token_ranks_high() -> None:
    tokens = [Cell([0, 1], [3 * QUARTER, QUARTER]), Cell([1, 2], [HALF, HALF])]
    _, ran = executed(prefill(tokens), miss="drop:keep=1")
    assert ran == [[[0, 1], [1, -1]]]


@CONTRACTS
def test_fidelity_of_drop_by_hand(contract: str) -> None:
    # kept: .75 of token 0 and .5 of token 1; half the mass that left is the total variation; no rank moves
    tokens = [Cell([0, 1], [3 * QUARTER, QUARTER]), Cell([2, 1], [HALF, HALF])]
    outcome, _ = executed(prefill(tokens), miss="drop:keep=1", contract=contract)
    assert outcome.counts("assignments", "assignments_kept", "rank_displacement") == (4, 2, 0)
    assert outcome.counts(*MASSES) == (2 * UNIT, 5 * QUARTER, 0, 0, 3 * QUARTER)
    assert outcome["variation"] == (QUARTER + HALF) // 2


def test_the_routers_own_mixture_is_kept_whole() -> None:
    tokens = [Cell([0, 1], [3 * QUARTER, QUARTER]), Cell([2, -1], [HALF, 0])]
    outcome, _ = executed(prefill(tokens))
    assert outcome.counts("assignments_kept", "mass", "mass_kept", "variation") == (3, UNIT + HALF, UNIT + HALF, 0)


# ---------------------------------------------------------------- substitute

#: Experts 0, 1 and 3 score alike for both tokens, 2 is worse; 3 is resident. Token 0 may run 3 for 0; it cannot do so
#: twice, and token 1 runs 3 already: 0 is still needed by token 1, and 1 by token 0.
ALIKE = (0.0, 0.0, -1.0, 0.0)
TWO_TOKENS = [Cell([0, 1], [HALF, HALF], logits=ALIKE), Cell([0, 3], [HALF, HALF], logits=ALIKE)]


def test_substitution_is_decided_token_by_token() -> None:
    # 3 runs two tokens, 0 and 1 one each
    outcome, ran = executed(prefill(TWO_TOKENS), miss="substitute", warm=((0, 3),))
    assert ran == [[[3, 1], [0, 3]]]
    assert outcome.counts("accesses", "hits", "misses", "substituted") == (3, 1, 2, 1)
    assert outcome.counts("bytes_demand", "expert_ns") == (2, 4 * 2)


def test_looked_up_one_by_one_what_was_just_fetched_may_stand_in() -> None:
    # 0 has arrived for token 1 when token 0 misses 1: 0, which 3 replaced before, now stands in for 1
    outcome, ran = executed(prefill(TWO_TOKENS), miss="substitute", warm=((0, 3),), contract="sequential")
    assert ran == [[[3, 0], [0, 3]]]
    assert outcome.counts("accesses", "hits", "misses", "substituted") == (3, 1, 2, 2)
    assert outcome.counts("bytes_demand", "expert_ns") == (1, 4 * 2)


def test_an_expert_whose_tokens_all_found_another_is_not_fetched() -> None:
    outcome, ran = executed(prefill(TWO_TOKENS[:1]), miss="substitute", warm=((0, 2), (0, 3)))
    assert ran == [[[3, 1]]]
    assert [expert for _, _, _, expert in outcome.spans("transfer")] == [1]


def test_a_substitute_outside_the_tolerance_is_refused() -> None:
    # softmax of ALIKE: .2945 for each of the three and .1084 for 2
    _, near = executed(prefill(TWO_TOKENS[:1]), miss="substitute:tolerance=.2", warm=((0, 2),))
    _, far = executed(prefill(TWO_TOKENS[:1]), miss="substitute:tolerance=.1", warm=((0, 2),))
    assert (near, far) == ([[[2, 1]]], [[[0, 1]]])


def test_a_substitute_is_pinned_and_gets_a_timestamp_but_no_access() -> None:
    # two slots hold 3 and 2. Token 0 runs 3 for 0 and fetches 1, so 2 is evicted although 3 was not demanded
    source = prefill(TWO_TOKENS[:1])
    outcome = replay_lists(source, 2, SLOW, miss="substitute", warm=((0, 3), (0, 2)))
    assert [expert for _, _, _, expert in outcome.spans("evict")] == [2]
    assert outcome.counts("accesses", "hits") == (2, 0)


@CONTRACTS
def test_a_pool_full_of_substitutes_does_not_block_the_fetch_behind_them(contract: str) -> None:
    # one slot holds 3, which stands in for 0 in token 0; token 1 needs 0 itself: 3 is computed, then evicted
    outcome = replay_lists(prefill(TWO_TOKENS), 1, SLOW, miss="substitute", warm=((0, 3),), contract=contract)
    assert [expert for _, _, _, expert in outcome.spans("expert")][:2] == [3, 0]


def test_fidelity_of_substitution_by_hand() -> None:
    # token 0: [0, 1] became [3, 1], half the mass moved; 3 ranks third (behind the chosen) and fills the first slot
    outcome, _ = executed(prefill(TWO_TOKENS), miss="substitute", warm=((0, 3),))
    assert outcome.counts("assignments", "assignments_kept", "rank_displacement") == (4, 3, 2)
    assert outcome.counts(*MASSES, "variation") == (2 * UNIT, UNIT + HALF, 0, HALF, 0, HALF)


# ---------------------------------------------------------------- split


def test_split_runs_the_lesser_misses_on_the_cpu_beside_the_link() -> None:
    # by weight 0, 1, 2: round(.5 * 3) = 2 are fetched: 1-6 and 6-11; 2 runs on the CPU 1-8; compute 6-8, 11-13
    tokens = [Cell([0, 1, 2], [HALF, QUARTER, QUARTER // 2])]
    outcome, ran = executed(prefill(tokens), miss="split")
    assert outcome.spans("transfer") == [(1, 6, 0, 0), (6, 11, 0, 1)]
    assert outcome.spans("cpu") == [(1, 8, 0, 2)]
    assert outcome.counts("cpu_executed", "insertions", "time_ns", "stall_ns") == (1, 2, 13, 13 - 1 - 4)
    assert ran == [[[0, 1, 2]]]


def test_the_cpu_works_one_after_the_other_and_the_step_waits_for_it() -> None:
    # at least one is fetched; 1, 2 and 3 take the CPU 1-8, 8-15, 15-22 whatever their tokens
    tokens = [Cell([0, 1], [HALF, QUARTER]), Cell([2, 3], [QUARTER, QUARTER])]
    outcome, _ = executed(prefill(tokens), miss="split:q=0")
    assert outcome.spans("cpu") == [(1, 8, 0, 1), (8, 15, 0, 2), (15, 22, 0, 3)]
    assert outcome.counts("time_ns", "stall_ns") == (22, 22 - 1 - 2)


def test_what_the_cpu_ran_is_still_absent() -> None:
    rows: list[Token] = [[Cell([0, 1], [HALF, QUARTER])]] * 2
    source = ListSource(sizes(1, 4), [Prompted(rows)])
    outcome = replay_lists(source, 4, SLOW, miss="split")
    assert outcome.counts("hits", "misses", "compulsory", "cpu_executed", "insertions") == (1, 3, 3, 1, 2)


def test_looked_up_one_by_one_every_miss_is_the_first_and_is_fetched() -> None:
    tokens = [Cell([0, 1, 2], [HALF, QUARTER, QUARTER // 2])]
    outcome, _ = executed(prefill(tokens), miss="split", contract="sequential")
    assert outcome.counts("cpu_executed", "insertions") == (0, 3)
