"""Which of two beats the other, one among many, and what a correction for many costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.analysis.comparisons import (
    CANT_TELL,
    CONFIRMED,
    FEW,
    NO,
    OPEN,
    PARTS,
    REFUTED,
    SHARE_PASSES,
    TOO_FEW,
    YES,
    Comparison,
    Rows,
    against,
    changed,
    claimed,
    compare,
    estimate,
    holm,
)
from moereplay.analysis.statistics import FIRST, ONE, Interval
from moereplay.results.errors import ResultError
from moereplay.results.result import RANKED
from tests.kit.every import every

CHANCES = st.lists(st.floats(0, 1), max_size=8)


def rows(count: int = 20, seed: int = 0, more_hits: int = 0, slower: float = 1.0) -> list[dict[str, Any]]:
    """Requests of unequal length; the same for a seed, but for what is given."""
    dice = np.random.default_rng(seed)
    made = []
    for at in range(count):
        tokens = int(dice.integers(20, 300))
        hits = int(dice.binomial(4 * tokens, 0.5)) + more_hits
        collisions, noise = int(dice.binomial(tokens, 0.2)), float(dice.normal(1, 0.1))
        made.append(
            {
                "request": at,
                "accesses": 8 * tokens,
                "hits": hits,
                "misses": 8 * tokens - hits,
                "collisions": collisions,
                "decode_tokens": tokens,
                "decode_ns": int(tokens * 1e6 * noise * slower),
                "ttft_ns": int(1e7 * noise * slower),
            }
        )
    return made


@every("figure", PARTS)
def test_nothing_tells_two_identical_configurations_apart(figure: str) -> None:
    found = compare(rows(), rows(), figure)
    assert (found.difference, found.off, found.answer, found.requests) == (0, 0, CANT_TELL, 20)


@every("figure, answer", [("tpot_ms", YES), ("tokens_per_s", YES)])
def test_a_slower_copy_is_beaten(figure: str, answer: str) -> None:
    assert compare(rows(), rows(slower=1.2), figure).answer == answer
    assert compare(rows(slower=1.2), rows(), figure).answer == NO


def test_more_hits_win_and_fewer_misses_make_collisions_per_miss_worse() -> None:
    more, fewer = rows(more_hits=30), rows()
    assert (compare(more, fewer, "hit_rate").answer, compare(fewer, more, "hit_rate").answer) == (YES, NO)
    assert compare(more, fewer, "collisions_per_miss").answer == NO


def test_units_are_those_of_the_columns() -> None:
    assert compare(rows(), rows(slower=2), "tpot_ms").difference == pytest.approx(-1, abs=0.1)
    found = estimate(rows(), "tokens_per_s")
    assert found is not None and found.low is not None and found.high is not None
    assert found.low < 1000 < found.high and found.value == pytest.approx(1000, rel=0.1)


@every("count", [2, 5, 9, 10, 40])
def test_the_answer_is_the_other_one_the_other_way_round(count: int) -> None:
    for seed in range(20):
        one, other = rows(count, seed), rows(count, seed + 100)
        for a, b in zip(one, other, strict=True):
            b["accesses"] = a["accesses"]
        turned = {YES: NO, NO: YES, CANT_TELL: CANT_TELL}
        assert compare(other, one, "hit_rate").answer == turned[compare(one, other, "hit_rate").answer]


@every("order, first", product([range(16), (3, 0, *range(4, 16), 1, 2)], [90, 948]))
def test_the_request_that_starts_first_is_cold_whatever_its_number(order: Sequence[int], first: int) -> None:
    """90 of 121 misses are those of an empty cache: the rest is a matter of hundredths of a point. 948 decide all."""
    misses = [first, 12, 8, 0, 3, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
    cold: list[dict[str, Any]] = [
        {
            "request": at,
            "start_ns": start * 100,
            "accesses": 15_000,
            "misses": misses[start],
            "hits": 15_000 - misses[start],
        }
        for at, start in enumerate(order)
    ]
    hits, missed = estimate(cold, "hit_rate"), estimate(cold, "misses_per_access")
    assert hits and missed
    if first > 900:
        assert (hits.low, missed.low, hits.why, missed.why) == (None, None, FIRST, FIRST)
        return
    assert hits.low and hits.high and missed.low and missed.high
    assert 0.9992 < hits.low < hits.value < hits.high < 0.9997
    assert (missed.low, missed.high) == (pytest.approx(1 - hits.high), pytest.approx(1 - hits.low))


def test_fewer_than_six_requests_have_a_chance_but_no_interval() -> None:
    found = compare(rows(5), rows(5, slower=2), "tpot_ms")
    assert (found.off, found.p, found.answer) == (None, 2 / 32, CANT_TELL)
    assert (compare(rows(6), rows(6, slower=2), "tpot_ms").p, FEW) == (2 / 64, 6)
    few, enough = estimate(rows(5), "hit_rate"), estimate(rows(6), "hit_rate")
    assert few and enough and few.low is None and enough.low is not None


def test_only_requests_of_both_count() -> None:
    assert compare(rows()[:12], rows()[5:], "hit_rate").requests == 7
    nothing = compare(rows()[:5], rows()[5:], "hit_rate")
    assert (nothing.difference, nothing.p, nothing.answer, nothing.requests) == (None, None, CANT_TELL, 0)
    assert estimate([], "hit_rate") is None


def test_a_figure_that_cannot_be_compared_is_refused() -> None:
    for refused in (lambda: compare(rows(), rows(), "gb_moved"), lambda: estimate(rows(), "hits")):
        with pytest.raises(ResultError, match="unknown figure to compare"):
            refused()


def against_best(entries: Sequence[Rows], figure: str) -> list[Comparison]:
    """The best of these, as the same requests pick it, beside each of the others."""
    found = [estimate(rows, figure) for rows in entries]
    values = [each.value if RANKED[figure] else -each.value for each in found if each is not None]
    best = values.index(max(values))
    return against(entries[best], [*entries[:best], *entries[best + 1 :]], figure, picked=True)


def test_the_best_of_several_beats_what_is_worse_and_not_what_is_alike() -> None:
    entries: list[Rows] = [rows(slower=1.5), rows(), rows(slower=1.5), rows()]
    assert [each.answer for each in against_best(entries, "tpot_ms")] == [YES, YES, CANT_TELL]


def test_many_comparisons_need_more_than_one() -> None:
    """A significance for one pair does not hold for the best of thirty, least of all if the same requests picked it."""
    one, other = rows(8, 3), rows(8, 3)
    for at, row in enumerate(other):
        row["hits"] -= (5 + 9 * at) if at % 4 else -11
    others: list[Rows] = [other] * 30
    alone = compare(one, other, "hit_rate")
    corrected, picked = (against(one, others, "hit_rate", picked=chosen)[0] for chosen in (False, True))
    assert alone.answer == YES and corrected.answer == picked.answer == CANT_TELL
    assert (alone.p or 0) < (corrected.p or 0) <= (picked.p or 0)


def test_holms_correction_of_a_worked_example() -> None:
    """0.01 of four times 4, 0.02 times 3, 0.03 times 2, and none smaller than one before it."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.01, 0.02], 10) == pytest.approx([0.1, 0.18])


@given(CHANCES, st.integers(0, 5))
def test_a_correction_raises_chances_and_keeps_their_order(chances: list[float], more: int) -> None:
    corrected = holm(chances, len(chances) + more)
    assert all(chance <= after <= 1 for chance, after in zip(chances, corrected, strict=True))
    order = np.argsort(chances, kind="stable")
    assert [corrected[at] for at in order] == sorted(corrected)
    assert all(a <= b for a, b in zip(corrected, holm(chances, len(chances) + more + 1), strict=True))


def test_equal_configurations_are_seldom_said_to_differ_from_the_best() -> None:
    """Among eight equal configurations the best is a matter of chance."""
    dice = np.random.default_rng(7)
    wrong = 0
    for _ in range(60):
        lengths = dice.lognormal(6, 1, 20).astype(int) + 50
        rates = dice.normal(0.6, 0.05, 20)
        entries = [
            [
                {"request": at, "accesses": int(length), "hits": int(length * (rates[at] + dice.normal(0, 0.02)))}
                for at, length in enumerate(lengths)
            ]
            for _ in range(8)
        ]
        wrong += any(each.answer == YES for each in against_best(entries, "hit_rate"))
    assert wrong / 60 <= 0.05


# -- claims: a change of the figure, and the gate that it is held to


def missed(*misses: int, accesses: int = 100, **more: int) -> list[dict[str, Any]]:
    """Requests of one length with so many misses, one after the other."""
    return [
        {"request": at, "start_ns": 10 * at, "end_ns": 10 * at + 9, "accesses": accesses, "misses": many} | more
        for at, many in enumerate(misses)
    ]


@every("gate", [-0.5, -0.1, 0.0, 2.0])
def test_a_change_and_its_interval_are_those_worked_by_hand(gate: float) -> None:
    """A change of -20 %: deviations 1, -1, 2, -2, 0 of 5 warm requests give a standard error of sqrt(10 / 4 / 6).

    That is of 50 misses; t of 3.995 degrees (numerators vary) is 2.778. The base has no variance, so the gate does not
    matter.
    """
    found = changed(missed(40, 41, 39, 42, 38, 40), missed(*[50] * 6), "misses_per_access", gate)
    off = 2.778 * (10 / 4 / 6) ** 0.5 / 50
    assert found and (found.requests, found.why) == (6, "")
    assert (found.value, found.low, found.high) == tuple(
        pytest.approx(x, abs=1e-5) for x in (-0.2, -0.2 - off, -0.2 + off)
    )


@every(
    "low, high, gate, most, least",
    [
        (-0.3, -0.1, -0.05, CONFIRMED, REFUTED),
        (-0.3, -0.1, -0.1, CONFIRMED, OPEN),
        (-0.3, -0.1, -0.2, OPEN, OPEN),
        (-0.3, -0.1, -0.3, OPEN, CONFIRMED),
        (-0.3, -0.1, -0.4, REFUTED, CONFIRMED),
        (None, None, -0.4, OPEN, OPEN),
    ],
)
def test_a_claim_holds_or_fails_by_the_whole_interval(
    low: float | None, high: float | None, gate: float, most: str, least: str
) -> None:
    found = Interval(-0.2, low, high, 9)
    assert (claimed(found, gate, at_most=True), claimed(found, gate, at_most=False)) == (most, least)


@given(st.integers(0, 50), st.integers(2, 9), st.floats(-0.9, 9))
def test_a_variant_that_is_the_base_times_a_factor_is_found_on_its_side_of_every_gate(
    seed: int, factor: int, gate: float
) -> None:
    base = rows(seed=seed)
    variant = [row | {"misses": factor * row["misses"]} for row in base]
    found = changed(variant, base, "misses_per_access", gate)
    assert found and found.value == pytest.approx(factor - 1)
    if abs(factor - 1 - gate) > 1e-9:
        assert claimed(found, gate, at_most=True) == (CONFIRMED if factor - 1 < gate else REFUTED)


def test_a_change_without_an_interval_says_why_and_cannot_be_told() -> None:
    few, even = missed(*[50] * 5), missed(*[50] * 6)
    shared = [row | {"end_ns": row["end_ns"] + 5} for row in even]
    long = [*even[:5], even[5] | {"accesses": 100_000}]
    for one, other, why in (
        (few, few, TOO_FEW),
        (shared, even, SHARE_PASSES),
        (even, shared, SHARE_PASSES),
        (long, even, ONE),
    ):
        found = changed(one, other, "misses_per_access", -0.1)
        assert found and (found.low, found.high, found.why) == (None, None, why)
        assert claimed(found, -0.1, at_most=True) == OPEN
    for one, other in ((even, missed(*[0] * 6)), (even, []), ([], even)):
        assert changed(one, other, "misses_per_access", -0.1) is None
    assert claimed(None, -0.1, at_most=False) == OPEN
