"""Capacity: every accepted form by hand, its echo in all the others, and what is refused."""

from __future__ import annotations

import random
import re

import pytest

from moereplay.simulator.capacity import FORMS, cliff, parse_capacity
from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Geometry
from tests.kit.cases import ListSource, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every

#: 2 layers of 10 experts of 1 kB and 3 kB: 40 kB in all, 2 kB on average. Stored at 8 bits, so 80 kB at 16.
UNEVEN = Geometry(layers=2, experts=10, k=2, expert_bytes=(1000, 3000), expert_bits=8, bytes_by_bits={4: (600, 1400)})


def pools(text: str, scope: str = "global", geometry: Geometry = UNEVEN) -> tuple[int, ...]:
    return parse_capacity(text, geometry, scope, (geometry.expert_bytes,)).pools


@every(
    "text, size",
    [
        ("50%", 20_000),
        ("12.5%", 5000),
        ("50%@16", 40_000),
        ("50%@4", 10_000),  # 4 bits: 600 and 1400 bytes as recorded, not half of 8 bits
        ("20KB", 20_000),
        ("0.02MB", 20_000),
        ("20 KB", 20_000),
        ("12KiB", 12_288),
        ("20000B", 20_000),
        ("3experts", 6000),
        ("2.5 experts", 5000),
        ("4/layer", 16_000),
        ("200%", 80_000),
    ],
)
def test_every_form_gives_the_bytes_worked_by_hand(text: str, size: int) -> None:
    assert pools(text) == (size,)


@every(
    "text, each",
    [("4/layer", (4000, 12_000)), ("50%", (5000, 15_000)), ("8experts", (4000, 12_000)), ("16KB", (4000, 12_000))],
)
def test_pools_per_layer_hold_the_same_number_of_experts(text: str, each: tuple[int, int]) -> None:
    assert pools(text, "per_layer") == each


def test_an_amount_that_is_no_whole_byte_rounds_down() -> None:
    assert pools("3333.9B") == (3333,)


def test_shares_are_exact_where_floats_are_not() -> None:
    # 57 % of 100 experts of 1 kB; 0.57 * 100_000 is 56,999.99... in floats
    assert pools("57%", geometry=sizes(1, 100, 1, 1000)) == (57_000,)
    assert int(0.57 * 100_000) == 56_999


@every("text", ["", "5", "lots", "-5%", "5%%", "1e9B", "5GBps", "5 %", "3 /layer", "5%@", "5mB", "5iB"])
def test_what_cannot_be_read_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(FORMS)):
        pools(text)


def test_zero_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="bits must be positive"):
        pools("5%@0")


@every("text", ["0%", "2999B", "1.4experts"])
def test_less_than_the_largest_expert_is_refused_with_both_figures(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gives the pool [\d,]+ bytes, less than one expert of 3,000; raise it"):
        pools(text)


def test_the_pool_that_is_too_small_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"capacity 0.5/layer gives layer 0's pool 500 bytes, less than one expert of 1,000"
    ):
        pools("0.5/layer", "per_layer")


def test_the_largest_expert_is_that_of_the_precision_in_use() -> None:
    assert parse_capacity("2KB", UNEVEN, "global", ((600, 1400),)).pools == (2000,)


def test_a_capacity_is_echoed_in_every_form() -> None:
    # 20 kB: half of 40 kB, ten experts of 2 kB, five per layer; a token needs 2 * (1 + 3) kB
    found = parse_capacity("50%", UNEVEN, "global", (UNEVEN.expert_bytes,))
    assert (found.percent_stored, found.per_layer) == (50, 5)
    assert found.token_cycles == 20 / 8
    assert found.forms() == "50% = 20 kB, 5 of 10 experts per layer"


# ---------------------------------------------------------------- the cliff


def warning(text: str, scope: str = "global") -> str | None:
    geometry = sizes(4, 16, 2, 1000)
    return cliff(parse_capacity(text, geometry, scope, (geometry.expert_bytes,)), geometry, geometry.expert_bytes)


def test_a_token_cycle_is_enough() -> None:
    assert warning("8experts") is None


def test_below_a_token_cycle_there_is_a_warning() -> None:
    assert warning("7experts") == ("capacity below one token cycle, one token's demand over all layers")


def test_where_a_global_lru_cannot_hit_the_warning_says_so() -> None:
    assert "hits nothing" in str(warning("6experts"))
    assert "hits nothing" not in str(warning("1/layer", "per_layer"))


def test_the_warning_is_true() -> None:
    # 4 layers of 2 experts, always the same: 6 slots hit nothing, 8 hit everything after the first pass
    source = ListSource(sizes(4, 16), [Prompted(tokens(*[[[3, 5]] * 4] * 10))])
    assert [replay_lists(source, slots, machine())["hits"] for slots in (6, 8)] == [0, 72]


def is_said(geometry: Geometry, capacity: int) -> bool:
    """Return True if the warning states that nothing can hit."""
    found = parse_capacity(f"{capacity}B", geometry, "global", (geometry.expert_bytes,))
    return "hits nothing" in str(cliff(found, geometry, geometry.expert_bytes))


def lru_hits(geometry: Geometry, capacity: int, rows: list) -> int:
    return replay_lists(ListSource(geometry, [Prompted(tokens(*rows))]), capacity, machine(), log=False)["hits"]


def test_a_layer_of_large_experts_can_hit_where_experts_of_mean_size_could_not() -> None:
    # ten tokens that are all alike: a token's 20 bytes do not fit 16, but one of the two large experts stays beside
    # the other layers' 8 bytes
    geometry = sizes(5, 8, 2, (1, 1, 1, 1, 6))
    assert lru_hits(geometry, 16, [[[0, 1]] * 5] * 10) == 9
    assert not is_said(geometry, 16)
    assert (is_said(geometry, 14), is_said(geometry, 13)) == (False, True)


@pytest.mark.slow
def test_nothing_hits_exactly_where_it_is_said() -> None:
    """Tokens that are all alike hit as soon as any can; where it is said, none of many do."""
    dice, said = random.Random(5), 0
    for _ in range(60):
        layers, k = dice.randint(1, 4), dice.randint(1, 3)
        geometry = sizes(layers, k + 2, k, [dice.randint(1, 6) for _ in range(layers)])
        capacity = dice.randint(max(geometry.expert_bytes), k * sum(geometry.expert_bytes))
        same = [[list(range(k))] * layers] * 3
        others = [[[dice.sample(range(k + 2), k) for _ in range(layers)] for _ in range(8)] for _ in range(3)]
        hits = [lru_hits(geometry, capacity, rows) for rows in (same, *others)]
        assert not any(hits) if is_said(geometry, capacity) else hits[0] > 0
        said += is_said(geometry, capacity)
    assert 10 < said < 50
