"""Pools of different sizes by layer, and the division of a capacity that misses least, against every other division."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.curves.division import best_division
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan, replay
from moereplay.traces.schema import Trace
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.search import searched
from tests.simulator.test_curves import Scenario, scenarios, trace_of


def by_layer(capacity: str, **settings: str) -> ReplayConfig:
    return configure(**{"capacity": capacity, "scope": "per_layer"} | settings)


def bytes_of(experts: Iterable[int], each: Iterable[int]) -> int:
    return sum(map(int.__mul__, experts, each))


def of_three_layers(seed: int) -> Trace:
    """Layers of four experts of 2, 1 and 3 bytes; they favour some experts to different degrees."""
    dice = random.Random(seed)
    odds = [[1 + (expert < 2) * 5 * layer for expert in range(4)] for layer in range(3)]
    rows = [[list(dict.fromkeys(dice.choices(range(4), each, k=40)))[:2] for each in odds] for _ in range(30)]
    return trace_of(rows, 4, (2, 1, 3))


def test_a_list_has_a_pool_for_each_layer() -> None:
    ready = plan(of_three_layers(1), by_layer("3+1+4 experts"))
    assert ready.capacity.pools == (6, 1, 12)
    assert ready.capacity.forms() == "79.17% = 19 B, 3.17 of 4 experts per layer"


def test_equal_numbers_are_the_pools_of_a_total() -> None:
    trace = of_three_layers(1)
    one, other = (replay(trace, by_layer(text)) for text in ("2+2+2experts", "50%"))
    assert (one.totals, one.per_layer) == (other.totals, other.per_layer)


def test_a_file_is_its_content(tmp_path: Path) -> None:
    trace, named = of_three_layers(1), by_layer("3+1+4experts")
    for name in ("one.json", "other.json"):
        (tmp_path / name).write_text(json.dumps([3, 1, 4]))
        config = by_layer(str(tmp_path / name))
        assert (config, config.identity(trace)) == (named, named.identity(trace))


@every("written", ["[3]", "[]", '{"a": 1}', "[3, 1.5, 2]", "[3, true, 1]", "[3, -1, 2]", "3"])
def test_a_file_of_anything_else_is_refused(written: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pools") / "pools.json"
    path.write_text(written)
    with pytest.raises(ConfigError, match=r"invalid capacity .*: expected "):
        configure(capacity=str(path))


@every(
    "capacity, settings, said",
    [
        (
            "2+2+2experts",
            {"scope": "global"},
            "lists pools by layer: expected a total such as 25%, or --scope per_layer",
        ),
        ("2+2+2experts", {"scope": "per_link"}, "lists pools by layer"),
        ("2+2experts", {}, "has 2 layers, the model has 3"),
        ("2+0+2experts", {}, "gives layer 1's pool 0 bytes, less than one expert of 5"),
        ("2+2+2experts", {"prefetch": "side_buffer:count=inside"}, "choose count=beside, or a total"),
    ],
)
def test_a_list_that_does_not_apply_is_refused(capacity: str, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(random_trace(1, Sizes(depth=1)), by_layer(capacity, **settings))


def test_beside_side_buffers_pools_are_as_listed() -> None:
    config = by_layer("3+1+4experts", prefetch="side_buffer")
    assert plan(random_trace(1, Sizes(depth=1)), config).capacity.pools == (15, 5, 20)


@searched(60)
@given(scenarios(scope="per_layer"), st.sampled_from(("lru", "belady", "lfu", "arc")), st.randoms())
def test_both_engines_agree_on_every_list(scenario: Scenario, eviction: str, dice: random.Random) -> None:
    geometry = scenario.trace.geometry
    pools = [dice.randint(1, geometry.experts) for _ in range(geometry.layers)]
    config = by_layer(f"{'+'.join(map(str, pools))}experts", **scenario.how | {"eviction": eviction})
    one, other = (replay(scenario.trace, config, log=True, engine=engine) for engine in ("compiled", "reference"))
    assert (one.totals, one.per_layer, one.events) == (other.totals, other.per_layer, other.events)


@searched(60)
@given(scenarios(scope="per_layer"), st.sampled_from(("lru", "belady")), st.floats(0, 1))
def test_a_replay_of_the_division_misses_as_often(scenario: Scenario, policy: str, share: float) -> None:
    geometry, made = scenario.trace.geometry, scenario.curve(policy)
    least = int(made.capacity_bytes[made.decided][0])
    total = least + int(share * (made.total_bytes - least))
    best = best_division(made, geometry, total)
    config = by_layer(best.capacity, **scenario.how | {"eviction": policy})
    assert replay(scenario.trace, config).totals["misses"] == best.misses <= made.misses_at(total)
    assert sum(plan(scenario.trace, config).capacity.pools) <= total
    with pytest.raises(ConfigError, match=f"no division of {least - 1} bytes"):
        best_division(made, geometry, least - 1)


@every("seed, policy, contract", product((1, 2), ("lru", "belady"), ("atomic", "sequential")))
def test_no_other_division_misses_less(seed: int, policy: str, contract: str) -> None:
    """Exhaustive search: every division into pools whose misses the demand decides is replayed."""
    trace = of_three_layers(seed)
    made = curve(trace, policy, scope="per_layer", contract=contract)
    pools = [at + 1 for at in range(4) if made.decided[at]]
    assert pools[0] == (1 if contract == "sequential" else 2)
    missed = dict[int, list[int]]()
    for experts in product(pools, repeat=3):
        ready = by_layer(f"{'+'.join(map(str, experts))}experts", eviction=policy, contract=contract)
        held = bytes_of(experts, trace.geometry.expert_bytes)
        missed.setdefault(held, []).append(replay(trace, ready).totals["misses"])
    better = 0
    for total in range(min(missed), max(missed) + 2):
        best = best_division(made, trace.geometry, total)
        assert best.misses == min(min(each) for held, each in missed.items() if held <= total)
        better += best.misses < made.misses_at(total)
    assert better > 3


@searched(200)
@given(st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=3, max_size=3), st.data())
def test_curves_of_any_shape_are_divided_best(drawn: list[list[int]], data: st.DataObject) -> None:
    each = tuple(data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3)))
    trace = trace_of([[[0]] * 3], 4, each)
    missed = np.array([sorted(row, reverse=True) for row in drawn])
    made = replace(curve(trace, scope="per_layer", contract="sequential"), layer_misses=missed)
    total = data.draw(st.integers(sum(each), 4 * sum(each)))
    fitting = {
        experts: sum(row[many - 1] for row, many in zip(missed.tolist(), experts, strict=True))
        for experts in product(range(1, 5), repeat=3)
        if bytes_of(experts, each) <= total
    }
    best = best_division(made, trace.geometry, total)
    fewest = {experts for experts, misses in fitting.items() if misses == min(fitting.values())}
    assert (fitting[best.experts], best.misses) == (min(fitting.values()),) * 2
    assert bytes_of(best.experts, each) == min(bytes_of(experts, each) for experts in fewest)
