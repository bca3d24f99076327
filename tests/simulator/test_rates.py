"""Times are exact: what a platform's decimals amount to, and not what doubles make of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from typing import Any

from moereplay.simulator.platform import Link, Measured, Platform, Roofline
from moereplay.simulator.rates import Loading, ceiling, half_even
from moereplay.simulator.times import Times
from moereplay.traces.schema import Geometry
from tests.kit.every import every

Document = dict[str, Any]


def times(compute: Document, contention: Document | None = None, link: Document | None = None, **sizes: Any) -> Times:
    """The times of a model of one layer of four experts, of 1000 bytes each unless `sizes` say otherwise."""
    geometry = Geometry.model_validate({"layers": 1, "experts": 4, "k": 2, "expert_bytes": (1000,)} | sizes)
    document = {"name": "t", "links": [{"bytes_per_s": 1e9} | (link or {})], "compute": compute, "cpu": compute}
    where = Platform.model_validate(document | {"contention": contention})
    return Times(where, geometry, (geometry.expert_bytes,))


# ---------------------------------------------------------------- worked examples


@every("top, bottom, nearest, up", [(1, 2, 0, 1), (3, 2, 2, 2), (5, 2, 2, 3), (7, 3, 2, 3)])
def test_halves_go_to_the_even_number_and_the_other_rule_is_up(top: int, bottom: int, nearest: int, up: int) -> None:
    assert (half_even(top, bottom), ceiling(top, bottom)) == (nearest, up)
    assert (half_even(2 * top, 2), ceiling(2 * top, 2)) == (top, top)


@every("name", ["dense_ns", "expert_ns", "pass_ns"])
def test_a_measured_time_is_divided_by_a_share_exactly(name: str) -> None:
    # 21 / 0.7 is 30; in doubles it is 30.000000000000004, which would round up to 31
    of = times({"kind": "measured", name: 21}, {"compute": 0.7, "cpu": 0.7})
    slow = {
        "dense_ns": of.dense_ns(0, 1, True),
        "expert_ns": of.expert_ns(0, 0, 1, True),
        "pass_ns": of.pass_ns(1, True),
    }
    assert slow.pop(name) == 30
    assert set(slow.values()) == {0}
    assert of.cpu_ns(0, 0, 1, contended=True) == (30 if name == "expert_ns" else 0)


def test_each_measured_figure_is_rounded_up_before_anything_multiplies_it() -> None:
    # at .3 of the rate 10 ns become 34 and 1 ns per token becomes 4: 34 + 3 * 4, and not 13 / .3 rounded up, 44.
    # With a curve: 34 * 1.5 = 51, and not 10 * 1.5 / .3 = 50
    straight = times({"kind": "measured", "expert_ns": 10, "expert_ns_per_token": 1}, {"compute": 0.3})
    assert straight.expert_ns(0, 0, 3, contended=True) == 34 + 12
    curved = times({"kind": "measured", "expert_ns": 10, "expert_by_tokens": [[1, 1.0], [3, 1.5]]}, {"compute": 0.3})
    assert curved.expert_ns(0, 0, 3, contended=True) == 51


def test_loading_is_rounded_up_for_every_expert() -> None:
    # 5 ns, and 2 ns per MiB of a byte, of half a MiB and of three quarters
    assert [Loading(ns_per_expert=5, ns_per_mib=2).ns(size) for size in (1, 1 << 19, 3 << 18)] == [6, 6, 7]


def test_a_roofline_rounds_half_a_nanosecond_to_the_even_one() -> None:
    # 2 * 9 weights * 7 tokens / (4 FLOP/ns) = 31.5; doubles make 31.499999999999996 of it
    roofline: Document = {"kind": "roofline", "flops": 4e9, "memory_bytes_per_s": 1e18}
    assert times(roofline, dense_params=9).dense_ns(0, 7) == 32
    # and 30.5, which goes down: 2 * 61 weights / 4
    assert times(roofline, dense_params=61).dense_ns(0, 1) == 30


def test_a_curve_over_tokens_is_interpolated_exactly() -> None:
    # 30 bytes at 1 byte per 2 ns are 60 ns; 3 tokens lie half way between 1.5 and 2.75: 60 * 2.125 = 127.5, to 128
    curve = [[1, 1.0], [2, 1.5], [4, 2.75]]
    roofline: Document = {"kind": "roofline", "flops": 1e18, "memory_bytes_per_s": 0.5e9, "by_tokens": curve}
    assert times(roofline, expert_bytes=(30,), expert_params=15).expert_ns(0, 0, 3) == 128


def test_the_kv_cache_is_read_exactly_and_rounded_up() -> None:
    # 1337 bytes * 300 positions at .2 bytes/ns are 2,005,500 ns, a whole number
    compute: Document = {"kind": "measured", "kv_bytes_per_s": 0.2e9}
    assert times(compute, kv_bytes=1337).kv_ns(300) == 2_005_500
    # .7 of .3 bytes/ns is .21 bytes/ns: 21 bytes take 100 ns
    assert times(compute | {"kv_bytes_per_s": 0.3e9}, {"compute": 0.7}, kv_bytes=21).kv_ns(1, contended=True) == 100


def test_a_contended_link_keeps_a_share_of_its_rate_exactly() -> None:
    # .29 of 1e8 bytes/s are 29,000,000; in doubles 28,999,999.999999996, which would be cut to 28,999,999
    assert floor(100_000_000 * 0.29) == 28_999_999
    assert Link(bytes_per_s=1e8).wire_ns(29, share=0.29) == 1000


@every(
    "link, size, ns",
    [
        ({"bytes_per_s": 3.5}, 3, 1_000_000_000),  # 3 bytes/s
        ({"bytes_per_s": 1e9, "by_size": [[1, 5e8], [37, 1e9]]}, 35, 37),  # 972,222,222 of 972,222,222.2 bytes/s
        ({"bytes_per_s": 1e9, "by_size": [[1, 3], [3, 4]]}, 2, 666_666_667),  # 3.5 bytes/s, cut to 3
        ({"bytes_per_s": 1e9, "by_size": [[1, 0.25]]}, 2, 2_000_000_000),  # never below 1 byte/s
        ({"bytes_per_s": 1e9, "depth": 3, "lane_bytes_per_s": 2.5}, 7, 1_000_000_000),  # 7.5, cut to 7
    ],
)
def test_bandwidths_are_whole_bytes_per_second_rounded_down(link: Document, size: int, ns: int) -> None:
    assert Link.model_validate(link).wire_ns(size) == ns


def test_lanes_bound_the_bandwidth_whatever_is_in_flight() -> None:
    # 4 lanes of 1 byte/ns reach the 4 bytes/ns of the link, also for a transfer alone; 2 lanes do not
    fast = Link(bytes_per_s=4e9, depth=4, lane_bytes_per_s=1e9)
    assert (fast.wire_ns(40), fast.model_copy(update={"depth": 2}).wire_ns(40)) == (10, 20)


def test_a_first_piece_is_whole_millionths_halves_to_the_even_one() -> None:
    assert [Link(bytes_per_s=1, first_piece=share).first_millionths for share in (0.1234565, 0.1234575, 2 / 3)] == [
        123_456,
        123_458,
        666_667,
    ]


def test_weights_and_bytes_of_a_model_are_exact() -> None:
    # 97 bytes at 4.85 bits are 160 weights; 160 dense weights at 4.85 bits are 97 bytes
    of = times({"kind": "measured"}, expert_bytes=(97,), expert_bits=4.85, dense_params=160, dense_bits=4.85)
    assert (of._params, of.dense.read) == ((160,), 97)


# ---------------------------------------------------------------- the text's formulas, over random platforms


def at(points: Sequence[Sequence[float]], place: Fraction) -> Fraction:
    """Linear between the points, constant beyond both ends."""
    known = [(Fraction(x), Fraction(str(y))) for x, y in points]
    for (left, low), (right, high) in pairwise(known):
        if left <= place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return known[0][1] if place <= known[0][0] else known[-1][1]


def of_tokens(points: Sequence[Sequence[float]], tokens: int) -> Fraction:
    last, y = points[-1]
    return Fraction(str(y)) * tokens / Fraction(last) if tokens > last else at(points, Fraction(tokens))


def wire_ns(link: Document, size: int, share: Fraction) -> int:
    rate = at(link["by_size"], Fraction(size, link["reads"])) if link["by_size"] else Fraction(str(link["bytes_per_s"]))
    if link["lane_bytes_per_s"]:
        rate = min(rate, link["depth"] * Fraction(str(link["lane_bytes_per_s"])))
    return ceil(Fraction(size * 10**9, max(1, floor(rate * share))))


def roofline_ns(compute: Document, params: int, size: int, tokens: int, share: Fraction) -> int:
    flops, rate = (Fraction(str(compute[name])) for name in ("flops", "memory_bytes_per_s"))
    if not params * tokens:
        return 0
    if not compute["by_tokens"]:
        return compute["launch_ns"] + round(10**9 * max(2 * params * tokens / flops, size / (rate * share)))
    one = compute["launch_ns"] + 10**9 * max(2 * params / flops, size / (rate * share))
    return round(one * of_tokens(compute["by_tokens"], tokens))


def measured_ns(compute: Document, size: int, tokens: int, share: Fraction) -> int:
    once = ceil(compute["expert_ns"] / share)
    if compute["expert_by_tokens"]:
        spent = round(once * of_tokens(compute["expert_by_tokens"], tokens))
    else:
        spent = once + tokens * ceil(compute["expert_ns_per_token"] / share)
    return round(spent * at(compute["expert_by_size"], Fraction(size))) if compute["expert_by_size"] else spent


def rising(draw: random.Random) -> list[list[float]]:
    """A curve over tokens: one token takes 1, more take no less."""
    ys = sorted(round(draw.uniform(1, 9), draw.choice((1, 2, 3))) for _ in range(3))
    return [[x, y] for x, y in zip([1, *sorted(draw.sample(range(2, 64), 3))], [1.0, *ys], strict=True)]


def drawn(draw: random.Random) -> tuple[Document, Document, Document]:
    """A link, a roofline and measured compute of random figures: round ones often, which make halves and wholes."""

    def rate() -> float:
        return draw.choice((0.5e9, 4e9, 0.3e9, draw.uniform(1, 1e10), round(draw.uniform(1e8, 1e11), -6)))

    sizes = sorted(draw.sample(range(1, 99), 3))
    link = {
        "bytes_per_s": rate(),
        "depth": draw.randint(1, 4),
        "reads": draw.randint(1, 4),
        "by_size": draw.choice(([], [[size, rate()] for size in sizes])),
        "lane_bytes_per_s": draw.choice((None, rate())),
    }
    curve = draw.choice(([], rising(draw)))
    roofline = {"flops": rate(), "memory_bytes_per_s": rate(), "launch_ns": draw.randint(0, 9), "by_tokens": curve}
    measured = {
        "expert_ns": draw.randint(0, 99),
        "expert_ns_per_token": draw.randint(0, 9),
        "expert_by_tokens": draw.choice(([], rising(draw))),
        "expert_by_size": draw.choice(([], [[size, round(draw.uniform(0.5, 3), 2)] for size in sizes])),
    }
    return link, roofline, measured


@every("seed", range(4))
def test_times_are_those_of_the_text_in_fractions(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        link, roofline, measured = drawn(draw)
        wire, plain, curved = Link.model_validate(link), Roofline(**roofline), Measured(**measured)
        for share in (1, round(draw.uniform(0.01, 1), draw.choice((1, 2))) or 0.5):
            exact = Fraction(str(share))
            params, size, tokens = draw.randint(0, 99), draw.randint(1, 99), draw.randint(0, 99)
            assert wire.wire_ns(size, share) == wire_ns(link, size, exact), link
            assert plain.ns(params, size, tokens, share=share) == roofline_ns(roofline, params, size, tokens, exact)
            assert curved.expert(tokens, size, share) == measured_ns(measured, size, tokens, exact), measured
