"""Several links: worked examples in nanoseconds, the time of a stream that they share, and who lies behind which."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Link, Platform
from moereplay.simulator.platforms import platform
from moereplay.simulator.reference.engine import run
from moereplay.simulator.reference.machine import simulated
from moereplay.simulator.times import Times, homes
from tests.kit.cases import Cell, ListSource, Prompted, machine, naming, replay_lists, sizes, spec_of, tokens
from tests.kit.every import every
from tests.kit.scenarios import SHARES
from tests.kit.search import searched

EQUAL = Link(bytes_per_s=1e9)


class TestByHand:
    """Experts 0 and 1 lie behind link 0, 2 and 3 behind link 1. Both engines."""

    def test_two_links_bring_three_experts(self) -> None:
        # 4 bytes each: 4 ns on link 0; 1 ns latency and 8 on link 1. The gate is at 2.
        # link 0: 0 from 2 to 6, then 1 from 6 to 10; link 1: 2 from 2 to 11
        # compute: dense 0-2, 0 at 6-9, waits, 1 at 10-13, 2 has come at 11: 13-16
        where = machine(dense_ns=2, expert_ns=3, more=(Link(bytes_per_s=0.5e9, latency_ns=1),))
        source = ListSource(sizes(1, 4, 3, expert_bytes=4), [Prompted(tokens([[0, 1, 2]]))])
        outcome = replay_lists(source, 16, where)
        assert outcome.spans("transfer") == [(2, 6, 0, 0), (2, 11, 0, 2), (6, 10, 0, 1)]
        assert outcome.spans("expert") == [(6, 9, 0, 0), (10, 13, 0, 1), (13, 16, 0, 2)]
        assert outcome.counts("time_ns", "stall_ns", "link_busy_ns", "bytes_demand") == (16, 5, 4 + 4 + 9, 12)

    def test_in_the_same_nanosecond_the_lower_link_comes_first(self) -> None:
        # 2 is issued at 2 and 1 at 6; both are complete at 10, and compute has waited since 9: it takes 1
        where = machine(dense_ns=2, expert_ns=3, more=(Link(bytes_per_s=0.5e9),))
        source = ListSource(sizes(1, 4, 3, expert_bytes=4), [Prompted(tokens([[2, 0, 1]]))])
        outcome = replay_lists(source, 16, where)
        assert sorted(outcome.spans("transfer")) == [(2, 6, 0, 0), (2, 10, 0, 2), (6, 10, 0, 1)]
        assert outcome.spans("expert") == [(6, 9, 0, 0), (10, 13, 0, 1), (13, 16, 0, 2)]

    def test_a_demand_without_room_holds_its_own_link_only(self) -> None:
        # a pool of one for each layer. 0 comes at 6 and computes until 8, only then may 1 take its place: 8-13
        # the prefetch of (1, 2) has a link of its own and need not wait for that
        token = [Cell([0, 1], look=[naming(4, [2])]), Cell([2, -1])]
        where = machine(bytes_per_ns=0.2, dense_ns=1, expert_ns=2, more=(Link(bytes_per_s=0.2e9),))
        outcome = replay_lists(
            ListSource(sizes(2, 4, 2), [Prompted([token])]), (1, 1), where, prefetch="top_k:factor=.5"
        )
        assert outcome.spans("transfer", "demand") == [(1, 6, 0, 0), (8, 13, 0, 1)]
        assert outcome.spans("transfer", "prefetch") == [(1, 6, 1, 2)]
        assert outcome.counts("prefetch_hits", "time_ns") == (1, 18)

    def test_what_lands_makes_room_for_a_demand_of_another_link(self) -> None:
        # layer 0 routes nobody; its gate at 1 names (1, 2), which is on link 1 from 1 to 21, in the one place there is.
        # (1, 0) is demanded at 2 and can start when that has landed: 21 to 22
        token = [Cell([-1], look=[naming(4, [2])]), Cell([0])]
        where = machine(dense_ns=1, expert_ns=2, more=(Link(bytes_per_s=0.05e9),))
        outcome = replay_lists(ListSource(sizes(2, 4, 1), [Prompted([token])]), 1, where, prefetch="top_k")
        assert outcome.spans("transfer") == [(1, 21, 1, 2), (21, 22, 1, 0)]
        assert outcome.counts("time_ns", "bytes_wasted") == (24, 1)

    def test_a_reset_frees_every_link(self) -> None:
        # the prefetch of (1, 2) is on link 1 when request 1 begins at 3; its demand of (0, 2) at 3 waits for nothing
        first = [Cell([0], look=[naming(4, [2])]), Cell([-1])]
        second = [Cell([2], look=[naming(4, [2])]), Cell([-1])]
        where = machine(dense_ns=1, more=(Link(bytes_per_s=0.1e9),))
        source = ListSource(sizes(2, 4, 1), [Prompted([first]), Prompted([second])])
        outcome = replay_lists(source, 8, where, prefetch="top_k", reset="request")
        assert outcome.spans("transfer", "demand") == [(1, 2, 0, 0), (4, 14, 0, 2)]

    def test_all_experts_may_lie_behind_the_second_link(self) -> None:
        # shares of .1 and 3 give the first link a quota of .129 of four experts: none. 40 bytes at 4 bytes/ns: 10 ns
        where = machine(dense_ns=34, share=0.1, more=(Link(bytes_per_s=4e9, share=3),))
        source = ListSource(sizes(1, 4, 1, expert_bytes=40), [Prompted(tokens([[0]]))])
        outcome = replay_lists(source, 160, where)
        assert outcome.spans("transfer") == [(34, 44, 0, 0)]
        assert outcome["time_ns"] == 44


@searched(100)
@given(st.lists(st.tuples(st.sampled_from((1, 2, 5)), st.sampled_from(SHARES)), min_size=1, max_size=3))
def test_a_stream_takes_as_long_as_the_busiest_link_of_each_layer(rows: list[tuple[int, float]]) -> None:
    """Nothing but transfers takes time: a link with n of a layer's experts takes n times 10 bytes at its rate.

    On links with equal shares and rates it is a half on two, and a link without an expert makes no difference.
    """
    layers, experts = 3, 6
    (rate, share), *others = rows
    more = [Link(bytes_per_s=fast * 1e9, share=part) for fast, part in others]
    every = [Prompted(tokens([list(range(experts))] * layers))]
    outcome = replay_lists(
        ListSource(sizes(layers, experts, experts, expert_bytes=10), every),
        10 * layers * experts,
        machine(rate, share=share, more=more),
    )
    held = Counter(homes(experts, [part for _, part in rows]))
    busy = [held[link] * 10 // fast for link, (fast, _) in enumerate(rows)]
    assert outcome.counts("time_ns", "link_busy_ns") == (layers * max(busy), layers * sum(busy))


# ---------------------------------------------------------------- homes


@every(
    "experts, shares, runs",
    [
        (8, (1,), (8,)),
        (8, (0.75, 0.25), (6, 2)),
        (8, (3, 1), (6, 2)),
        (10, (0.7, 0.3), (7, 3)),  # as decimals: in binary the first quota is a little less than 7
        (10, (1, 1, 1), (4, 3, 3)),  # a third of one is left for each: the lowest row has it
        (5, (1, 2, 2), (1, 2, 2)),
        (7, (1, 2, 2), (1, 3, 3)),  # quotas 1.4, 2.8, 2.8
        (2, (1, 1, 1), (1, 1, 0)),
    ],
)
def test_runs_are_as_long_as_the_shares_say(experts: int, shares: tuple[float, ...], runs: tuple[int, ...]) -> None:
    counted = Counter(homes(experts, shares))
    assert tuple(counted[link] for link in range(len(shares))) == runs


@given(st.integers(1, 300), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_every_expert_has_a_home_within_one_of_its_links_quota(experts: int, shares: list[float]) -> None:
    dealt = homes(experts, shares)
    assert len(dealt) == experts and all(a <= b for a, b in pairwise(dealt))
    quotas = [experts * share / sum(shares) for share in shares]
    assert all(abs(dealt.count(link) - quota) < 1 + 1e-9 for link, quota in enumerate(quotas))


# ---------------------------------------------------------------- platform files

TWO = """name = "two"
[[links]]
bytes_per_s = 4e9
share = 3
from = "DRAM"
[[links]]
bytes_per_s = 1e9
latency_ns = 7
share = 1
from = "NVMe"
[compute]
kind = "measured"
"""
ONE = 'name = "one"\n[[links]]\nbytes_per_s = 4e9\n[compute]\nkind = "measured"\n'


def written(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def test_links_are_rows_of_a_file(tmp_path: Path) -> None:
    where = platform(written(tmp_path, TWO))
    assert [(link.tier, link.bytes_per_s, link.latency_ns) for link in where.links] == [
        ("DRAM", 4e9, 0),
        ("NVMe", 1e9, 7),
    ]
    assert where.row()["link GB/s"] == "4 + 1"
    times = Times(where, sizes(1, 4, expert_bytes=8), ((8,), (4,)))
    assert (times.homes, times.wire_ns, times.latency_ns) == ((0, 0, 0, 1), [[[2, 1]], [[8, 4]]], (0, 7))
    assert times.costs.load == (3 * 2 + 7 + 8) // 4


def test_a_figure_of_one_link_may_be_changed(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    changed = platform(f"{path}:links.1.bytes_per_s=2e9:links.1.share=3")
    assert [(link.bytes_per_s, link.share) for link in changed.links] == [(4e9, 3), (2e9, 3)]
    assert changed.links[1].tier == "NVMe"


def test_one_row_is_the_same_machine_as_one_table(tmp_path: Path) -> None:
    where = platform(written(tmp_path, ONE))
    table = platform(written(tmp_path, ONE.replace("[[links]]", "[link]")))
    assert where == table
    assert where.figures()["link"] == {"bytes_per_s": 4e9, "latency_ns": 0, "depth": 1}


def test_only_the_ratio_of_shares_and_no_name_is_part_of_the_figures(tmp_path: Path) -> None:
    here = platform(written(tmp_path, TWO)).figures()
    there = platform(written(tmp_path, TWO.replace("= 3", "= 0.75").replace("= 1\n", "= 0.25\n").replace("NVMe", "x")))
    assert here == there.figures()
    assert here != platform(written(tmp_path, TWO.replace("= 3", "= 2"))).figures()


@every(
    "text, change, said",
    [
        (TWO, ":links.2.depth=2", "platform two has no figure 'links.2.depth': did you mean links.1.depth=?"),
        (TWO, ":link.depth=2", "platform two has no figure 'link.depth': did you mean links.1.depth=?"),
        (TWO, ":links.0.depth=0", "links.0.depth: expected at least 1"),
        (TWO + "[link]\nbytes_per_s = 1\n", "", "[link] cannot be combined with [[links]]"),
        (TWO.replace("share = 1\n", ""), "", "links: expected a share"),
        (TWO.replace("share = 1\n", "share = 0\n"), "", "links.1.share: expected at least "),
        (ONE.replace("[[links]]", "[links]"), "", "links: expected a list"),
        (ONE.replace("[[links]]\nbytes_per_s = 4e9", "links = []"), "", "links: expected at least 1 of them"),
        (ONE.replace("[[links]]\nbytes_per_s = 4e9\n", ""), "", "link: missing"),
        ("link = 5\n" + ONE.replace("[[links]]\nbytes_per_s = 4e9\n", ""), "", "link: expected a table (got 5)"),
    ],
)
def test_wrong_rows_are_refused_in_one_line(tmp_path: Path, text: str, change: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        platform(written(tmp_path, text) + change)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_with_too_few_links_is_refused() -> None:
    source = ListSource(sizes(1, 2, 1), [Prompted(tokens([[0]]))])
    spec = spec_of(source.geometry, 2, machine(more=(EQUAL,)))
    one: Platform = machine()
    with pytest.raises(ValueError, match="the machine has 1 links, the platform 2; give each a channel"):
        run(source, spec, simulated(Times(one, source.geometry, spec.layout.tiers), 1))
