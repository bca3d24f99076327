"""The last lines name the winner, what it does not surely beat, and how sure each difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moereplay.analysis.comparisons import TEST_LEVEL, enough, pairs_of, shares_passes
from moereplay.analysis.verdict import Entry, lines

NAMES = ["capacity", "eviction"]


def entry(eviction: str, requests: Sequence[tuple[int, int]], **settings: str) -> Entry:
    """From (decode_ns, hits) of each request, all of 10 decode passes and 100 accesses."""
    rows = [
        {"request": at, "decode_tokens": 10, "decode_ns": ns, "hits": hits, "accesses": 100, "misses": 100 - hits}
        for at, (ns, hits) in enumerate(requests)
    ]
    spent = sum(ns for ns, _ in requests)
    rate = sum(hits for _, hits in requests) / (100 * len(requests))
    known: dict[str, Any] = {"trace": "t", "capacity": "50%", "eviction": eviction, **settings}
    return Entry(known, 1e10 * len(requests) / spent if spent else None, rate, lambda: rows)


def many(eviction: str, hits: int, **settings: str) -> Entry:
    """Twelve requests whose hits go around a mean."""
    return entry(eviction, [(10**9, hits + 3 * (at % 3 - 1)) for at in range(12)], **settings)


def said(found: Sequence[str]) -> str:
    return " ".join(map(str.strip, found))


def test_a_difference_that_all_requests_share_is_significant() -> None:
    """Six requests: all faster by half of very unlike times, all with ten more hits. 2 of 64 ways to swap sides."""
    fast = entry("fast", [(9**at, 60 + at) for at in range(1, 7)])
    slow = entry("slow", [(2 * 9**at, 50 + at) for at in range(1, 7)])
    speed, hits, caution = lines([slow, fast], NAMES)
    assert "(no interval: one request is most of it)" in speed
    assert speed.endswith("100% more than slow (second; significant (p = 0.031), n = 6 requests)")
    assert hits.endswith("10 points more than slow (second; 95% CI ±0 points, n = 6 requests)")
    assert caution == "  95% CI: assumes independent requests; these share a cache"


def test_where_the_test_finds_nothing_in_what_the_interval_excludes_its_chance_is_said() -> None:
    """Of six requests five gain 9 or 10 hits and one loses one: 4 of 64 ways to swap sides are as far apart.

    Times gain 2 to 7 of the same hundred.
    """
    one = entry("one", [(98 - at, 60 + at % 2) for at in range(6)])
    other = entry("other", [(100, 61 if at == 0 else 51) for at in range(6)])
    speed, hits, *_, unlike, _ = lines([one, other], NAMES)
    assert "(second; not significant (p = 0.062): 95% CI ±" in hits and speed.endswith("%, n = 6 requests)")
    assert unlike == "  significant in tokens/s; not significant in hit rate (n = 6 requests)"


def test_fewer_than_six_requests_are_never_enough() -> None:
    """All of five agree by chance in 2 of 32 cases."""
    fast, slow = (entry(name, [(ns, hits + at) for at in range(5)]) for name, ns, hits in (("a", 1, 60), ("b", 9, 9)))
    speed, hits, few = lines([slow, fast], NAMES)
    assert all("(second; no confidence interval: fewer than 6 requests)" in line for line in (speed, hits))
    assert few == "  5 requests cannot separate 2 configurations (1 pair): record 6 or more"


def test_a_difference_within_what_requests_vary_is_not_significant() -> None:
    one = entry("one", [(10**9, 90), (10**9, 10), (10**9, 50)] * 2)
    other = entry("other", [(10**9, 10), (10**9, 89), (10**9, 50)] * 2)
    speed, hits, *_ = lines([one, other], NAMES)
    assert speed == "fastest: a tie of one at 50% and other at 50%, 10 tokens/s each"
    assert "(second; not significant: 95% CI ±" in hits and hits.endswith(" points, n = 6 requests)")


def test_from_ten_requests_on_the_winners_figure_has_a_range() -> None:
    _, hits, caution = lines([many("lru", 60), many("fifo", 40)], NAMES)
    assert hits.startswith("most hits: lru at 50%, 60.00% (58.")
    assert ") , " not in hits and "), 20 points more than fifo (second; 95% CI ±0 points, n = 12 requests)" in hits
    assert "fewer" not in caution


def test_those_that_the_winner_does_not_surely_beat_are_named() -> None:
    worse = [many(f"worse_{at}", 20 + at) for at in range(3)]
    alike = [entry(f"alike_{at}", [(10**9, 60 + 9 * ((n + at) % 4 - 1)) for n in range(12)]) for at in range(4)]
    _, hits, names, *_ = lines([*worse, many("best", 66), *alike], NAMES)
    assert "not significant: 95% CI ±" in hits
    assert names.startswith("  statistically tied with 4 of 7 others: alike_")
    assert names.endswith(" and 1 more") and "worse" not in names


def test_what_is_sure_of_two_may_be_luck_of_many() -> None:
    """Six requests: the difference is twice its error at 95 %, and thirty others were tried."""
    best = entry("best", [(10**9, 60 + at % 2) for at in range(6)])
    second = entry("second", [(10**9, 56 + 4 * (at % 2)) for at in range(6)])
    others = [entry(f"other_{at}", [(10**9, 20 + (at * n) % 7) for n in range(6)]) for at in range(30)]
    assert "not significant" not in lines([best, second], NAMES)[1]
    found = lines([best, second, *others], NAMES)
    assert "not significant after correcting for 32 configurations: 95% CI ±" in found[1]


def test_requests_that_can_hardly_decide_are_said_to_be_too_few_with_the_number_that_can() -> None:
    """Sixteen configurations are 120 pairs: 120 * 2 ** -12 is below the level of an answer, 120 * 2 ** -11 is not."""
    alike = [entry(f"set_{at}", [(10**9 + at, 50 + (at * n) % 37) for n in (1, 2, 5)]) for at in range(16)]
    text = said(lines(alike, NAMES))
    assert "3 requests cannot separate 16 configurations (120 pairs): record 13 or more" in text
    assert text.count("cannot separate") == 1 and "sweep compare" in text
    for family in (1, 3, 120, 5000):
        assert family * 2.0 ** (1 - enough(family)) < TEST_LEVEL <= family * 2.0 ** (2 - enough(family))
    assert pairs_of(16) == 120
    alike = [entry(f"set_{at}", [(10**9 + at, 50 + (at * n) % 37) for n in range(14)]) for at in range(16)]
    assert "cannot separate" not in said(lines(alike, NAMES))


def test_another_platform_is_counted_request_by_request_and_not_tested() -> None:
    """Requests differ by far more than the platforms; all the same, each is faster on one of them."""
    spent = [(10**9, 60), (9 * 10**9, 10), (3 * 10**9, 40)]
    slow = entry("lru", spent, platform="slow")
    fast = entry("lru", [(int(ns / (1.1 + at / 10)), hits) for at, (ns, hits) in enumerate(spent)], platform="fast")
    mixed = entry("lru", [(int(ns * (0.5, 0.9, 1.3)[at]), hits) for at, (ns, hits) in enumerate(spent)], platform="mix")
    speed = lines([slow, fast], ["platform"])[0]
    assert speed.endswith("platform slow (second; faster on 3 of 3 requests, by 10% to 30%)")
    assert "faster on 2 of 3 requests, by -23% to 100%" in lines([slow, mixed], ["platform"])[0]
    assert "significant" not in said(lines([slow, fast], ["platform"]))
    assert "decide" not in said(lines([slow, fast, mixed], ["platform"]))


def test_platforms_are_counted_at_every_capacity_too() -> None:
    """As at one: no significance, no interval, also of synthetic routing, which has neither."""

    def at(platform: str, speed: int, capacity: str, made: bool) -> Entry:
        one = many("lru", 60, platform=platform, capacity=capacity)
        rows = [{**row, "decode_ns": row["decode_ns"] // speed} for row in one.requests()]
        return one._replace(tokens_per_s=10 * speed, rows=lambda: rows, synthetic=made)

    for made in (False, True):
        entries = [at(*each, capacity, made) for each in (("slow", 1), ("fast", 2)) for capacity in ("25%", "50%")]
        found = said(lines(entries, ["platform", "capacity"]))
        assert "100% more than platform slow (second): faster on every request at 2 of 2 (25%, 50%) " in found
        assert "(n = 12 requests)" in found and "significant" not in found and "CI" not in found


def test_requests_that_share_passes_have_no_interval() -> None:
    """Under batch:N every pass is charged to one of its requests."""

    def beside(entry: Entry) -> Entry:
        rows = [{**row, "start_ns": 5 * at, "end_ns": 5 * at + 9} for at, row in enumerate(entry.requests())]
        assert shares_passes(rows) and not shares_passes([{**row, "start_ns": 9 * row["request"]} for row in rows[:1]])
        return entry._replace(rows=lambda: rows)

    found = said(lines([beside(many("lru", 60)), beside(many("fifo", 40))], NAMES))
    assert "20 points more than fifo (second; no confidence interval: requests share passes)" in found
    assert "±" not in found and "CI:" not in found


def test_every_rate_of_arrivals_has_a_winner_of_its_own() -> None:
    """Fewer requests per second are served faster, which no policy has chosen."""
    found = said(
        lines(
            [
                many(eviction, hits, arrivals=f"poisson:{rate}", passes="batch:2", capacity=capacity)
                for rate, more in ((1, 20), (9, 0))
                for capacity in ("25%", "50%")
                for eviction, hits in (("lru", 40 + more), ("fifo", 30 + more))
            ],
            ["eviction", "arrivals", "capacity"],
        )
    )
    assert "most hits at each rate of arrivals and capacity" in found
    assert "lru at 4 of 4 (1 requests/s, capacity 25% to 9 requests/s, capacity 50%)" in found


def test_a_trace_is_called_by_its_model_where_each_model_has_one() -> None:
    def won(*traces: tuple[str, str]) -> str:
        runs = [
            many(eviction, hits, model=model, trace=trace, capacity=capacity)
            for model, trace in traces
            for capacity in ("25%", "50%")
            for eviction, hits in (("lru", 40), ("fifo", 30))
        ]
        return said(lines(runs, ["eviction", "capacity"]))

    assert "at each model and capacity" in (found := won(("a", "1" * 64), ("b", "2" * 64)))
    assert "lru at 4 of 4 (a, capacity 25% to b, capacity 50%)" in found
    assert "at each model, trace and capacity" in (found := won(("a", "1" * 64), ("a", "2" * 64), ("b", "3" * 64)))
    assert "lru at 6 of 6 (a, trace 11111111, capacity 25% to b, trace 33333333, capacity 50%)" in found


def test_every_condition_is_counted_once() -> None:
    """A sure lead, one within what requests vary, one of requests that share passes, a tie, and no second."""
    leads = {1: (60, 40), 2: (41, 40), 3: (60, 40), 4: (50, 50), 5: (60,)}
    entries = [
        many(policy, hits, arrivals=f"poisson:{rate}", passes="batch:2")
        for rate, figures in leads.items()
        for policy, hits in zip(("lru", "fifo"), figures, strict=False)
    ]
    together = [{**row, "start_ns": 5 * at, "end_ns": 5 * at + 9} for at, row in enumerate(entries[4].requests())]
    shared = [*entries[:4], entries[4]._replace(rows=lambda: together), *entries[5:]]
    noisy = entry("lru", [(10**9, 26 + 31 * (at % 2)) for at in range(12)], arrivals="poisson:2", passes="batch:2")
    found = said(lines([*shared[:2], noisy, *shared[3:]], ["eviction", "arrivals"]))
    assert "more than fifo (second): significant at 1 of 5; not significant at 1 of 5 (2 requests/s); " in found
    assert "no confidence interval: requests share passes at 1 of 5 (3 requests/s); " in found
    assert "a tie at 1 of 5 (4 requests/s); no second at 1 of 5 (5 requests/s) (95% CI, n = 12" in found


def test_requests_one_after_the_other_share_no_pass() -> None:
    assert not shares_passes([{"start_ns": 9 * at, "end_ns": 9 * at + 9} for at in range(4)])


def test_another_trace_is_another_question() -> None:
    found = said(lines([many("lru", 60), many("fifo", 59), many("lfu", 58, trace="other")], NAMES))
    assert "most hits at each trace, " in found and "of 2 others" not in found


def test_requests_that_begin_with_an_empty_cache_are_independent() -> None:
    alone = {"reset": "request", "passes": "recorded"}
    found = lines([many("lru", 60, **alone), many("fifo", 40, **alone)], NAMES)
    assert "independent" in found[-1] and "share a cache" not in found[-1]
    batch = {"reset": "request", "passes": "batch:4"}
    assert "these share a cache" in lines([many("lru", 60, **batch), many("fifo", 40, **batch)], NAMES)[-1]


def sized(eviction: str, percent: int, ns: int, hits: int) -> Entry:
    one = entry(eviction, [(ns, hits)] * 3, capacity=f"{percent}%")
    return one._replace(settings={**one.settings, "capacity_bytes": percent})


def test_the_best_set_is_named_at_each_capacity_and_no_winner_of_all() -> None:
    sizes = (5, 10, 25, 50, 90)
    lru = [sized("lru", size, 10**9 - 10**6 * size, size) for size in sizes]
    arc = [sized("arc", size, 10**9 - 10**6 * size + (10**6 if size < 50 else -(10**6)), size) for size in sizes]
    best = [sized("belady", size, 10**8, 95)._replace(foresees=True) for size in sizes]
    found = lines([*arc, *lru, *best], NAMES)
    assert found[0].startswith("fastest at each capacity, 10.05 tokens/s at 5% to 11 tokens/s at 90%: ")
    assert found[0].endswith(": lru at 3 of 5 (5% to 25%); arc at 2 of 5 (50%, 90%)")
    assert "fastest: " not in said(found) and "e-" not in said(found)
    assert "knows the future (not tested): belady, 100 tokens/s at 5% to 100 tokens/s at 90%" in said(found)


def test_one_set_at_several_capacities_has_its_ends_and_no_winner() -> None:
    found = lines([sized("lru", size, 10**9 // size, size) for size in (50, 5)], ["capacity"])
    assert found[:2] == [
        "tokens/s: 50 tokens/s at 5% to 500 tokens/s at 50% (lru)",
        "hit rate: 5.00% at 5% to 50.00% at 50% (lru)",
    ]


def test_the_second_has_the_same_platform_where_there_is_one() -> None:
    large, other = entry("lru", [(10**9, 90)]), entry("fifo", [(3 * 10**9, 40)])
    small = entry("lru", [(2 * 10**9, 80)], platform="small")
    speed, *_ = lines([small, large, other], NAMES)
    assert speed.endswith("more than fifo (second; no confidence interval: one request)")


def test_requests_that_a_sweep_did_not_keep_are_asked_for() -> None:
    kept, left_out = entry("lru", [(10**9, 90)]), entry("fifo", [(2 * 10**9, 40)])._replace(rows=list)
    assert "no confidence interval" in (speed := lines([kept, left_out], NAMES)[0]) and "`requests = true`" in speed


def test_without_decode_passes_it_says_what_to_type() -> None:
    assert "--passes decode:N" in lines([entry("lru", [(0, 5)])], NAMES)[1]


def test_what_knows_the_future_is_a_bound_and_is_not_tested() -> None:
    belady = entry("belady", [(10**8, 99), (10**8, 97)])._replace(foresees=True)
    lru, fifo = entry("lru", [(10**9, 60), (10**9, 70)]), entry("fifo", [(2 * 10**9, 50), (2 * 10**9, 60)])
    speed, best_speed, hits, most_hits, *_ = lines([belady, fifo, lru], NAMES)
    assert speed.startswith("fastest: lru at 50%, 10 tokens/s, 100% more than fifo (second")
    assert best_speed == "  knows the future (not tested): belady at 50%, 100 tokens/s"
    assert hits.startswith("most hits: lru at 50%, 65.00%, 10 points more than fifo (second")
    assert most_hits == "  knows the future (not tested): belady at 50%, 98.00%"


def test_where_all_know_the_future_the_best_is_a_bound() -> None:
    first, second = (
        entry(name, [(ns, 60)])._replace(foresees=True) for name, ns in (("belady", 10**8), ("pinned", 10**9))
    )
    assert lines([second, first], NAMES)[0] == "knows the future, tokens/s: belady at 50%, 100 tokens/s"


def test_what_has_no_speed_says_why() -> None:
    nothing = entry("lru", [(0, 60)])
    (undecoded, *_) = lines([nothing], NAMES)
    assert "no pass decodes" in undecoded
    timeless = nothing._replace(settings={**nothing.settings, "tpot_ms": 0.0})
    (instant, *_) = lines([timeless], NAMES)
    assert "decode passes take no time" in instant and "no pass decodes" not in instant
