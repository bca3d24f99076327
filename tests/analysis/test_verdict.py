"""The last lines name the winner, what it does not surely beat, and when a difference means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.verdict import Entry, lines

NAMES = ["capacity", "eviction"]


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


def many(eviction: str, hits: int, **settings: str) -> Entry:
    """Twelve requests whose hits go around a mean."""
    return entry(eviction, [(10**9, hits + 3 * (at % 3 - 1)) for at in range(12)], **settings)


def test_a_difference_that_all_requests_share_means_something() -> None:
    fast, slow = entry("fast", [(10**9, 60), (2 * 10**9, 70)]), entry("slow", [(2 * 10**9, 50), (4 * 10**9, 60)])
    speed, hits, caution = lines([slow, fast], NAMES)
    assert speed.startswith("fastest: fast at 50%, 6.667 tokens/s, 100% more than slow (second), which means nothing")
    assert hits == "most hits: fast at 50%, 65.00%, 10 points more than slow (second), ± 0 points over 2 requests"
    assert caution == "  ±: 95%, if requests are independent; these share a cache; fewer than ten requests: rough"


def test_a_difference_within_what_requests_vary_means_nothing() -> None:
    one = entry("one", [(10**9, 90), (10**9, 10), (10**9, 50)])
    other = entry("other", [(10**9, 10), (10**9, 89), (10**9, 50)])
    speed, hits, _ = lines([one, other], NAMES)
    assert speed == "fastest: a tie of one at 50% and other at 50%, 10 tokens/s each"
    assert "which means nothing: ± " in hits and hits.endswith(" over 3 requests")


def test_from_ten_requests_on_the_winners_figure_has_a_range() -> None:
    _, hits, caution = lines([many("lru", 60), many("fifo", 40)], NAMES)
    assert hits.startswith("most hits: lru at 50%, 60.00% (58.")
    assert ") , " not in hits and "), 20 points more than fifo (second), ± 0 points over 12 requests" in hits
    assert "fewer" not in caution


def test_those_that_the_winner_does_not_surely_beat_are_named() -> None:
    worse = [many(f"worse_{at}", 20 + at) for at in range(3)]
    alike = [entry(f"alike_{at}", [(10**9, 60 + 9 * ((n + at) % 4 - 1)) for n in range(12)]) for at in range(4)]
    _, hits, names, _ = lines([*worse, many("best", 66), *alike], NAMES)
    assert "which means nothing: ± " in hits
    assert names.startswith("  can't tell it from 4 of 7 others: alike_")
    assert names.endswith(" and 1 more") and "worse" not in names


def test_what_is_sure_of_two_may_be_luck_of_many() -> None:
    """Six requests: the difference is twice its error at 95 %, and thirty others were tried."""
    best = entry("best", [(10**9, 60 + at % 2) for at in range(6)])
    second = entry("second", [(10**9, 56 + 4 * (at % 2)) for at in range(6)])
    others = [entry(f"other_{at}", [(10**9, 20 + (at * n) % 7) for n in range(6)]) for at in range(30)]
    assert "which" not in lines([best, second], NAMES)[1]
    assert ", which may be luck among 32: ± " in lines([best, second, *others], NAMES)[1]


def test_another_trace_is_not_compared() -> None:
    apart = lines([many("lru", 60), many("fifo", 59), many("lfu", 58, trace="other")], NAMES)[1:]
    assert apart[0].startswith("most hits: lru at 50%") and "of 2 others" not in " ".join(apart)


def test_requests_that_begin_with_an_empty_cache_are_independent() -> None:
    alone = {"reset": "request", "passes": "recorded"}
    assert lines([many("lru", 60, **alone), many("fifo", 40, **alone)], NAMES)[-1] == (
        "  ±: 95%, if requests are independent"
    )
    batch = {"reset": "request", "passes": "batch:4"}
    assert "these share a cache" in lines([many("lru", 60, **batch), many("fifo", 40, **batch)], NAMES)[-1]


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


def test_what_knows_the_future_is_no_winner_but_is_said() -> None:
    belady = entry("belady", [(10**8, 99), (10**8, 97)])._replace(foresees=True)
    lru, fifo = entry("lru", [(10**9, 60), (10**9, 70)]), entry("fifo", [(2 * 10**9, 50), (2 * 10**9, 60)])
    speed, best_speed, hits, most_hits, _ = lines([belady, fifo, lru], NAMES)
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


def test_what_has_no_speed_says_why() -> None:
    nothing = entry("lru", [(0, 60)])
    (undecoded, *_) = lines([nothing], NAMES)
    assert "no pass decodes" in undecoded
    timeless = nothing._replace(settings={**nothing.settings, "tpot_ms": 0.0})
    (instant, *_) = lines([timeless], NAMES)
    assert "decode passes take no time" in instant and "no pass decodes" not in instant
