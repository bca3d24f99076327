"""Tables fit the width and keep numbers whole; the last lines name the winner, and say when that means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from analysis.short import drawn
from analysis.statistics import uncertainty
from analysis.tables import csv, definitions, folded, markdown, table
from analysis.verdict import Entry, lines

ROW = {"capacity": "5%", "eviction": "least_stale", "hit": 0.084782, "limit": 0.9846, "note": "same"}
ROWS = [ROW, ROW | {"capacity": "25%", "eviction": "lru", "hit": 1234.56}]


def test_a_table_that_fits_has_every_column() -> None:
    assert table(ROWS, width=80).splitlines() == [
        "capacity  eviction         hit   limit  note",
        "────────────────────────────────────────────",
        "5%        least_stale  0.08478  0.9846  same",
        "25%       lru          1,234.6  0.9846  same",
    ]


def test_what_does_not_vary_moves_above_a_table_that_is_too_wide() -> None:
    first, head, *_ = table(ROWS, width=36).splitlines()
    assert (first, head.split()) == ("all: limit 0.9846; note same", ["capacity", "eviction", "hit"])


def test_columns_that_can_be_spared_are_named() -> None:
    rows = [ROW, ROW | {"hit": 0.5, "limit": 0.5, "eviction": "lru"}]
    shown = table([{name: row[name] for name in ("eviction", "hit", "limit")} for row in rows], "", ["limit"], 22)
    assert shown.splitlines()[-1] == "more with --csv: limit"
    assert "0.9846" not in shown and "0.08478" in shown


def test_a_row_that_is_still_too_wide_becomes_a_line_above_its_numbers() -> None:
    rows = [
        {"eviction": name, "prefetch": f"of_{name}", "hit": 0.5, "n": at} for at, name in enumerate(("lru", "fifo"))
    ]
    assert table(rows, width=24).splitlines() == [
        "all: hit 0.5",
        "eviction  prefetch  n",
        "─────────────────────",
        "lru       of_lru    0",
        "fifo      of_fifo   1",
    ]
    assert table(rows, width=20).splitlines() == [
        "all: hit 0.5",
        "  n",
        "───",
        "eviction lru;",
        "prefetch of_lru",
        "  0",
        "eviction fifo;",
        "prefetch of_fifo",
        "  1",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
def test_no_line_is_wider_and_no_number_is_cut(width: int) -> None:
    rows = [{"eviction": "lru", "what": "a text of several words that is long", "n": 1234567, "rate": 0.12345}] * 2
    shown = table(rows, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "1,234,567" in shown and "0.1235" in shown


def test_heads_of_several_words_break_before_anything_is_lost() -> None:
    assert table([{"distinct in 8": 22.69, "recall": 0.43}], width=16).splitlines()[:2] == [
        "distinct  recall",
        "    in 8",
    ]


def test_a_ranking_has_short_heads_and_says_what_they_mean() -> None:
    shown, *legend = drawn([{"eviction": "lru", "hit_rate": 0.5, "belady_hit_rate": None, "tokens_per_s": 9.0}])
    assert shown.split()[:4] == ["eviction", "hit", "belady", "tok/s"] and "50.00%" in shown
    assert all(len(line) <= 80 for line in legend) and legend[0].startswith("belady, limit:")


def test_what_a_wide_ranking_spares_is_not_in_its_legend() -> None:
    figures = {"hit_rate": 0.5, "belady_hit_rate": 0.6, "collisions_per_miss": 0.1, "tpot_ms": 1.5, "tokens_per_s": 9.0}
    rows = [
        {
            "capacity": f"{at}%",
            "prefetch": "x" * 30,
            "platform": "y" * 12,
            **figures,
            "hit_rate": at / 9,
            "tokens_per_s": at + 0.5,
            "collisions_per_miss": at / 9,
            "tpot_ms": at / 7,
        }
        for at in (1, 2)
    ]
    rows[1] |= {"prefetch": "z", "platform": "u", "belady_hit_rate": 0.7}
    shown, *legend = drawn(rows)
    assert "more with --csv: coll" in shown and max(map(len, shown.splitlines())) <= 80
    assert not any(line.startswith("coll:") for line in legend)


def test_heads_break_after_underscores() -> None:
    assert table([{"relaxed_belady hits": 1, "nine_tenths": 2}], width=17).splitlines()[:3] == [
        "relaxed_    nine_",
        "  belady   tenths",
        "    hits",
    ]


def test_csv_and_markdown_have_whole_names() -> None:
    assert csv([{"hit_rate": 1 / 3, "tpot_ms": None}]) == "hit_rate,tpot_ms\n0.3333333333333333,"
    assert markdown([{"eviction": "a|b", "n": 1000}]) == "| eviction | n |\n| --- | --: |\n| a\\|b | 1,000 |"


# ---------------------------------------------------------------- the winner


def entry(eviction: str, requests: Sequence[tuple[int, int]], **settings: str) -> Entry:
    """From (decode_ns, hits) of each request, all of 10 decode passes and 100 accesses."""
    rows = [
        {"request": at, "decode_passes": 10, "decode_ns": ns, "hits": hits, "accesses": 100}
        for at, (ns, hits) in enumerate(requests)
    ]
    spent = sum(ns for ns, _ in requests)
    rate = sum(hits for _, hits in requests) / (100 * len(requests))
    known: dict[str, Any] = {"trace": "t", "capacity": "50%", "eviction": eviction, **settings}
    return Entry(known, 1e10 * len(requests) / spent if spent else None, rate, lambda: rows)


NAMES = ["capacity", "eviction"]


def test_a_difference_that_all_requests_share_means_something() -> None:
    fast, slow = entry("fast", [(10**9, 60), (2 * 10**9, 70)]), entry("slow", [(2 * 10**9, 50), (4 * 10**9, 60)])
    speed, hits = lines([slow, fast], NAMES)
    assert speed.startswith("fastest: fast at 50%, 6.667 tokens/s, 100% more than slow (second), which means nothing")
    assert hits == "most hits: fast at 50%, 65.00%, 10 points more than slow (second), ± 0 points over 2 requests"


def test_a_difference_within_what_requests_vary_means_nothing() -> None:
    one = entry("one", [(10**9, 90), (10**9, 10), (10**9, 50)])
    other = entry("other", [(10**9, 10), (10**9, 89), (10**9, 50)])
    speed, hits = lines([one, other], NAMES)
    assert speed == "fastest: a tie of one at 50% and other at 50%, 10 tokens/s each"
    assert "which means nothing: ± " in hits and hits.endswith(" over 3 requests")


def test_the_second_has_the_same_capacity_where_there_is_one() -> None:
    large, other = entry("lru", [(10**9, 90)]), entry("fifo", [(3 * 10**9, 40)])
    small = entry("lru", [(2 * 10**9, 80)], capacity="5%")
    speed, _ = lines([small, large, other], NAMES)
    assert speed.endswith("more than fifo (second); one request, so no telling how sure")
    assert "100% more than capacity 5% (second)" in lines([small, large], ["capacity"])[0]


def test_requests_that_a_sweep_did_not_keep_are_asked_for() -> None:
    kept, left_out = entry("lru", [(10**9, 90)]), entry("fifo", [(2 * 10**9, 40)])._replace(requests=list)
    assert lines([kept, left_out], NAMES)[0].endswith("(second); no telling how sure: `requests = true` keeps requests")


def test_without_decode_passes_it_says_what_to_type() -> None:
    assert "--passes decode:N" in lines([entry("lru", [(0, 5)])], NAMES)[1]


def test_the_interval_is_that_of_paired_samples() -> None:
    # with equal denominators the jackknife of ratios is the paired t-test: differences 1, 2 and 3, s = 1, t(2) = 4.30
    first, second = [(3, 1), (5, 1), (7, 1)], [(2, 1), (3, 1), (4, 1)]
    assert uncertainty(first, second) == pytest.approx(4.30 / 3**0.5)
    assert uncertainty(first[:1], second[:1]) is None
    with pytest.raises(ValueError, match="3 samples beside 2"):
        uncertainty(first, second[:2])


def test_what_knows_the_future_is_no_winner_but_is_said() -> None:
    belady = entry("belady", [(10**8, 99), (10**8, 97)])._replace(foresees=True)
    lru, fifo = entry("lru", [(10**9, 60), (10**9, 70)]), entry("fifo", [(2 * 10**9, 50), (2 * 10**9, 60)])
    speed, best_speed, hits, most_hits = lines([belady, fifo, lru], NAMES)
    assert speed.startswith("fastest: lru at 50%, 10 tokens/s, 100% more than fifo (second)")
    assert best_speed == "  with knowledge of the future: belady at 50%, 100 tokens/s"
    assert hits.startswith("most hits: lru at 50%, 65.00%, 10 points more than fifo (second)")
    assert most_hits == "  with knowledge of the future: belady at 50%, 98.00%"


def test_where_all_know_the_future_the_winner_says_so() -> None:
    first, second = (
        entry(name, [(ns, 60)])._replace(foresees=True) for name, ns in (("belady", 10**8), ("pinned", 10**9))
    )
    speed = lines([second, first], NAMES)[0]
    assert speed.startswith("fastest, with knowledge of the future: belady at 50%, 100 tokens/s, 900% more than pinned")


def test_a_line_is_folded_and_what_is_pasted_is_whole() -> None:
    command = "moereplay replay TRACE --capacity 5%,25% --out runs/of/mine"
    assert folded(f"no replay here; make some with: {command}", 30).splitlines() == [
        "no replay here; make some",
        "  with:",
        f"  {command}",
    ]
    assert folded("lists them: `moereplay models`, all", 25).splitlines() == [
        "lists them:",
        "  `moereplay models`, all",
    ]
    assert folded(f"  warning: {'ab ' * 20}", 30).splitlines()[1].startswith("    ab")


def test_a_definition_that_cannot_be_folded_has_a_line_of_its_own() -> None:
    assert definitions([("write", "--miss a:b=c:d=e:f=g:h=i")], 22) == ["write", "  --miss a:b=c:d=e:f=g:h=i"]


def test_definitions_are_folded_below_their_texts() -> None:
    assert definitions([("what", "one two three four"), ("", ""), ("a", "b")], 22) == [
        "what  one two three",
        "      four",
        "",
        "a     b",
    ]
