"""Links that are the home of whole layers, and a pool for each link: worked examples, closed forms, bounds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.policies.contract import PolicyError
from moereplay.results.result import Result
from moereplay.simulator.bounds import bound_of, count, without_effect
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.limits.limits import limits
from moereplay.simulator.platform import Link, Platform
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.replay import plan, replay
from moereplay.simulator.times import homes_of
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.cases import ListSource, Outcome, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.search import searched

ENGINES = ("reference", "compiled")
MACHINE = """name = "split"
[[links]]
bytes_per_s = 1e9
{first}
[[links]]
bytes_per_s = 5e8
latency_ns = 2
{second}
[compute]
kind = "measured"
dense_ns = 3
expert_ns = 2
"""


def written(folder: Path, first: str, second: str, name: str = "split.toml") -> str:
    """A platform of two links, by what each row says of its experts."""
    (folder / name).write_text(MACHINE.format(first=first, second=second))
    return str(folder / name)


def by_layers(folder: Path, first: str, second: str) -> str:
    return written(folder, f'layers = "{first}"', f'layers = "{second}"')


class TestByHand:
    """Layer 0 lies behind link 0, 1 ns per expert, and layer 1 behind link 1, 2 ns per expert. Both engines."""

    # In passes 1 and 2 layer 1 demands nothing, in pass 3 layer 0 does not.
    SOURCE = [[[0], [0]], [[1], [-1]], [[0], [-1]], [[-1], [0]]]
    WHERE: dict[str, Any] = {"dense_ns": 1, "expert_ns": 1, "layers": "0"}

    def replayed(self, pools: int | tuple[int, ...], **settings: Any) -> Outcome:
        where = machine(**self.WHERE, more=(Link(bytes_per_s=0.5e9, layers="1"),))
        source = ListSource(sizes(2, 2, 1), [Prompted(tokens(*self.SOURCE))])
        return replay_lists(source, pools, where, **settings)

    def test_a_pool_of_each_link_keeps_what_the_other_does_not_need(self) -> None:
        # pass 0: dense 0-1, (0, 0) moves 1-2 and computes 2-3; dense 3-4, (1, 0) moves 4-6 and computes 6-7
        # pass 1: dense 7-8, (0, 1) takes the place of (0, 0), moves 8-9, computes 9-10; dense 10-11
        # pass 2: dense 11-12, (0, 0) takes its place, 12-13, computes 13-14; dense 14-15
        # pass 3: dense 15-16; dense 16-17, (1, 0) is in the pool of link 1 since 6, and computes 17-18
        outcome = self.replayed((1, 1), scope="per_link")
        assert outcome.spans("transfer") == [(1, 2, 0, 0), (4, 6, 1, 0), (8, 9, 0, 1), (12, 13, 0, 0)]
        assert outcome.counts("hits", "evictions", "time_ns", "link_busy_ns") == (1, 2, 18, 1 + 2 + 1 + 1)

    def test_one_pool_of_the_same_bytes_does_not(self) -> None:
        # up to 12 the same; then (0, 0) takes the place of (1, 0), the longest unused, which moves again 17-19: end 20
        outcome = self.replayed(2)
        assert outcome.spans("transfer")[-2:] == [(12, 13, 0, 0), (17, 19, 1, 0)]
        assert outcome.counts("hits", "evictions", "time_ns") == (0, 3, 20)

    def test_capacity_is_split_by_the_bytes_at_home(self, tmp_path: Path) -> None:
        # 3 layers of 4 experts, 5 bytes each: 60 bytes, of which the layers 0 and 2 have 40 and layer 1 has 20.
        # 70% are 42 bytes: 28 and 14. Of 50 bytes 33.3 and 16.7 are rounded down, each.
        trace = random_trace(1, Sizes(layers=3, experts=4))
        split = by_layers(tmp_path, "0,2", "1")
        for capacity, pools in (("70%", (28, 14)), ("50B", (33, 16)), ("6experts", (20, 10)), ("2/layer", (20, 10))):
            assert plan(trace, configure(capacity=capacity, scope="per_link", platform=split)).capacity.pools == pools

    def test_shares_split_it_as_well(self, tmp_path: Path) -> None:
        # of 4 experts of each layer 3 are at home at link 0: 3 x 3 x 5 = 45 bytes, and 15 at link 1
        trace = random_trace(1, Sizes(layers=3, experts=4))
        split = written(tmp_path, "share = 3", "share = 1")
        assert plan(trace, configure(capacity="50%", scope="per_link", platform=split)).capacity.pools == (22, 7)
        with pytest.raises(ConfigError, match=r"capacity 25% gives link 1's pool 3 bytes, less than one expert of 5"):
            plan(trace, configure(capacity="25%", scope="per_link", platform=split))


@pytest.mark.slow
@every("eviction", ("lru", "arc", "s3fifo", "sieve", "clock"))
def test_pools_of_one_layer_each_evict_as_if_alone(eviction: str) -> None:
    """A model of one layer with two links has more pools than layers; a policy keeps numbers for each of them."""
    draw = random.Random(3)
    stream = [[draw.choice((0, 0, 1, 2, 3, 4, 4, 5, 6, 7))] for _ in range(200)]
    where = machine(more=(Link(bytes_per_s=1e9),))
    homes = homes_of(where, sizes(1, 8, 1))

    def replayed(pools: int | tuple[int, ...], rows: list[list[int]], **scope: Any) -> Outcome:
        source = ListSource(sizes(1, 8, 1), [Prompted(tokens(*([row] for row in rows)))])
        return replay_lists(source, pools, where, eviction=eviction, **scope)

    parts = [[row if homes[row[0]] == link else [-1] for row in stream] for link in (0, 1)]
    apart = [replayed(2, rows).counts("hits", "misses", "evictions") for rows in parts]
    both = replayed((2, 2), stream, scope="per_link").counts("hits", "misses", "evictions")
    assert both == tuple(map(sum, zip(*apart, strict=True))) and both[0] > 20 < both[2]


def numbers(result: Result) -> tuple[object, ...]:
    """All that a replay counts."""
    return result.totals, result.per_layer, result.per_request


SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"eviction": "least_stale", "prefetch": "top_k"},
    {"eviction": "lfu_decay", "contract": "sequential", "reset": "request"},
    {"eviction": "arc", "miss": "drop:keep=1"},
    {"eviction": "belady", "miss": "fetch:bits=4"},
    {"eviction": "farthest_layer", "prefetch": "side_buffer:buffers=1:fetch=1"},
)


@every("settings", SETTINGS)
@every("engine", ENGINES)
def test_a_link_for_each_layer_is_a_pool_for_each_layer(settings: dict[str, str], engine: str, tmp_path: Path) -> None:
    trace, split = random_trace(5, Sizes(layers=2, requests=2, prompt=3, depth=2)), by_layers(tmp_path, "0", "1")
    each = [
        replay(trace, configure(capacity="50%", platform=split, scope=scope, **settings), engine=engine)
        for scope in ("per_link", "per_layer")
    ]
    assert numbers(each[0]) == numbers(each[1])
    other = replay(trace, configure(capacity="50%", platform=split, **settings), engine=engine)
    assert numbers(each[0]) != numbers(other)


@every("settings", SETTINGS)
@every("engine", ENGINES)
def test_the_pool_of_one_link_is_the_global_one(settings: dict[str, str], engine: str) -> None:
    trace = random_trace(5, Sizes(layers=2, requests=2, prompt=3, depth=2))
    each = [
        replay(trace, configure(scope=scope, capacity="50%", **settings), engine=engine)
        for scope in ("per_link", "global")
    ]
    assert numbers(each[0]) == numbers(each[1])
    config = configure(capacity="50%", scope="per_link", **settings)
    assert any(line.startswith("scope per_link has no effect: ") for line in without_effect(trace, [config]))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layer 1 of three lies behind a link of its own."""
    return by_layers(tmp_path_factory.mktemp("split"), "0,2", "1")


class TestBounds:
    @searched(50)
    @given(
        st.integers(0, 10**6),
        st.sampled_from(("40%", "60%", "80%")),
        st.sampled_from(("belady", "lru", "random")),
        st.sampled_from(("0", "2")),
    )
    def test_no_replay_hits_more_than_the_sum_and_belady_as_often(
        self, split: str, seed: int, capacity: str, eviction: str, draft: str
    ) -> None:
        trace = random_trace(seed, Sizes(layers=3, experts=5, tokens=20))
        config = configure(capacity=capacity, scope="per_link", platform=split, eviction=eviction, draft=draft)
        bound = bound_of(trace, config)
        assert bound is not None
        totals = replay(trace, config, engine="reference").totals
        counted, hits = count(trace, bound), totals["hits"]
        assert counted["accesses"] == totals["accesses"] and (draft != "0" or counted["accesses"] == 3 * 2 * 20)
        assert hits <= (counted["belady_hits"] or 0)
        if eviction == "belady" and draft == "0":  # a pass with drafts may demand more than a pool holds
            assert hits == counted["belady_hits"]

    def test_the_bound_of_a_link_for_each_layer_is_that_of_pools_per_layer(self, tmp_path: Path) -> None:
        trace, split = random_trace(3, Sizes(layers=2)), by_layers(tmp_path, "1", "0")
        how: dict[str, Any] = {"capacity": "50%", "platform": split, "warm": ((0, 1), (1, 2)), "resident": ((1, 3),)}
        for miss in ("fetch", "drop:keep=1", "fetch:bits=8"):
            one, other = (
                bound_of(trace, configure(scope=scope, miss=miss, **how)) for scope in ("per_link", "per_layer")
            )
            assert one is not None and other is not None
            assert dict(count(trace, one)) == dict(count(trace, other))

    def test_experts_of_one_pool_that_differ_in_bytes_are_bracketed(self, tmp_path: Path) -> None:
        trace = _unequal(random_trace(3, Sizes(layers=3, tokens=40)), (5, 5, 9))
        mixed = bound_of(trace, configure(capacity="50%", scope="per_link", platform=by_layers(tmp_path, "0,2", "1")))
        equal = bound_of(trace, configure(capacity="50%", scope="per_link", platform=by_layers(tmp_path, "0,1", "2")))
        assert mixed is not None and equal is not None
        found = count(trace, mixed)
        assert (found["feasible_hits"] or 0) <= (found["belady_hits"] or 0) < (found["accesses"] or 0)
        assert count(trace, equal)["feasible_hits"] is None
        assert mixed.identity(trace) != equal.identity(trace)

    def test_what_has_no_machine_or_needs_one_pool_says_so(self, split: str) -> None:
        trace = random_trace(3, Sizes(layers=3))
        with pytest.raises(ConfigError, match=r"^no curve with scope per_link: "):
            curve(trace, scope="per_link")
        config = configure(capacity="50%", scope="per_link", platform=split)
        found = limits(trace, config)
        assert found.relaxed is None
        assert found.reasons[0].startswith("no limits of pools by link")


def _unequal(trace: Trace, each: tuple[int, ...]) -> Trace:
    header = trace.header.model_copy(update={"geometry": trace.geometry.model_copy(update={"expert_bytes": each})})
    return memory_trace(header, [trace.request(at) for at in range(trace.requests)])


class TestLayers:
    def test_every_expert_of_a_layer_has_its_link(self, tmp_path: Path) -> None:
        split = platform(by_layers(tmp_path, "1,3", "0,2"))
        assert homes_of(split, sizes(4, 3)) == (1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0)
        assert homes_of(platform("two-gpus"), sizes(48, 1, 1)) == (0,) * 24 + (1,) * 24

    @every(
        "first, second, fault",
        (
            ("0", "2", "no row names 1"),
            ("0-1", "1-2", "two rows name 1"),
            ("0-2", "3,7-8", "the model lacks 3, 7, 8"),
            ("0", "1-1,4", "no row names 2; the model lacks 4"),
        ),
    )
    def test_the_rows_name_each_of_the_models_layers_once(
        self, first: str, second: str, fault: str, tmp_path: Path
    ) -> None:
        trace = random_trace(1, Sizes(layers=3))
        said = rf"layers of \[\[links\]\]: expected each of the model's 3 MoE layers once, but {fault}; add its layers "
        said += "after the platform, as :links.0.layers=0-0:links.1.layers=1-2$"
        with pytest.raises(ConfigError, match=said):
            plan(trace, configure(capacity="50%", platform=by_layers(tmp_path, first, second)))

    @every(
        "rows, fault",
        (
            (('layers = "0"', ""), "expected layers for every link, or for none"),
            (('layers = "0"\nshare = 1', 'layers = "1"\nshare = 1'), "layers cannot be combined with share"),
            (('layers = "0-1,1"', 'layers = "2"'), "layer 1 is named twice"),
            (('layers = "2-0"', 'layers = "1"'), "invalid layers '2-0': expected A-B"),
            (('layers = "all"', 'layers = "1"'), "invalid layers 'all': expected A-B"),
        ),
    )
    def test_a_file_that_cannot_be_meant_is_refused(self, rows: tuple[str, str], fault: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=fault):
            platform(written(tmp_path, *rows))

    def test_one_set_of_layers_is_one_machine(self, tmp_path: Path) -> None:
        written_so = [platform(by_layers(tmp_path, *rows)) for rows in (("2,0-1", "3"), ("0-2", "3-3"), ("0-1", "2-3"))]
        assert written_so[0].figures() == written_so[1].figures() != written_so[2].figures()
        (tmp_path / "again.toml").write_text(as_toml(written_so[0]))
        assert platform(str(tmp_path / "again.toml")) == written_so[0]
        assert platform("two-gpus:links.0.layers=0-3:links.1.layers=4-5").links[1].layers == "4-5"

    def test_without_layers_a_machine_keeps_its_figures(self) -> None:
        rows = [{"bytes_per_s": 1e9, "share": share} for share in (1.0, 3.0)]
        plain = Platform.model_validate({"name": "x", "links": rows, "compute": {"kind": "measured"}})
        assert plain.figures()["links"] == [
            {"bytes_per_s": 1e9, "latency_ns": 0, "depth": 1, "share": share} for share in (0.25, 0.75)
        ]


@pytest.mark.slow
def test_warm_and_resident_experts_are_held_to_their_links_pool(split: str) -> None:
    # 6 experts of 5 bytes in each of 3 layers; 50% are 30 bytes for layers 0 and 2, and 15 for layer 1
    trace = random_trace(1, Sizes(layers=3))
    how: dict[str, Any] = {"capacity": "50%", "scope": "per_link", "platform": split}
    four = tuple((1, e) for e in range(4))
    with pytest.raises(ConfigError, match=r"--warm fills pool 1 with 20 bytes, its capacity is 15"):
        plan(trace, configure(warm=four, **how))
    with pytest.raises(ConfigError, match=r"--resident fills pool 1 with 20 bytes, its capacity is 15"):
        plan(trace, configure(resident=four, **how)).spec(log=False)
    with pytest.raises((ConfigError, PolicyError), match=r"--resident leaves 0 of the 15 bytes of pool 1"):
        plan(trace, configure(resident=four[:3], **how)).spec(log=False)
    two = configure(resident=four[:2], warm=(four[2], (0, 0)), **how)
    assert numbers(replay(trace, two)) == numbers(replay(trace, two, engine="reference"))


def test_a_capacity_above_the_experts_of_each_link_is_noted(split: str) -> None:
    trace = random_trace(1, Sizes(layers=3))
    noted = {
        capacity: plan(trace, configure(capacity=capacity, scope="per_link", platform=split)).surplus
        for capacity in ("100%", "110%")
    }
    assert noted["100%"] is None
    assert "everything fits" in str(noted["110%"])
