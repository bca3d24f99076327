"""Too many configurations are refused by their count, before any is made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.experiment.expand import combinations, configurations
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.grid import MOST_CONFIGURATIONS, expand
from moereplay.sweeps.policy_sets import named_sets
from moereplay.sweeps.run import planned
from moereplay.sweeps.tune import Search, check
from tests.kit.every import every
from tests.kit.sweeping import experiment, store_trace

SEEDS = str(list(range(1000)))
LONG = ",".join(f"{at / 1000:.3f}%" for at in range(1, 3001))


@pytest.fixture(autouse=True)
def at_once():
    """A refusal by count takes no time."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 5


def refusal(tmp_path: Path, text: str) -> str:
    (tmp_path / "e.toml").write_text(f'traces = ["a.zarr"]\n{text}')
    with pytest.raises(ConfigError) as refused:
        configurations(read(tmp_path / "e.toml"), tmp_path / "e.toml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_grid_of_ten_million_is_refused_by_its_count(tmp_path):
    steps = str(list(range(1, 101)))
    said = refusal(tmp_path, f"[grid]\nseed = {SEEDS}\n'platform.link.depth' = {steps}\n'prefetch.depth' = {steps}")
    assert "e.toml: [grid] makes 10,000,000 configurations; one command takes 100,000: shorten its lists" in said
    assert f"moereplay tune {tmp_path / 'e.toml'}" in said


def test_the_count_takes_in_lists_that_move_in_step_and_what_is_included(tmp_path):
    text = f"[grid]\nseed = {list(range(400))}\n'platform.link.depth' = {list(range(1, 251))}\n"
    assert refusal(tmp_path, f"{text}[[include]]\nseed = 1").count("makes 100,001 configurations") == 1
    twice = "[[zip]]\nprefetch = ['none', 'top_k']\nprefetch_at = ['gate', 'after_demand']"
    assert "makes 200,000 configurations" in refusal(tmp_path, text + twice)


def test_what_is_left_out_counts_as_it_would_have_to_be_made(tmp_path):
    text = f"[grid]\nseed = {SEEDS}\n'platform.link.depth' = {list(range(1, 102))}\n"
    assert "makes 101,000 configurations" in refusal(tmp_path, f"{text}[[exclude]]\nseed = {SEEDS}")


def test_a_count_beyond_all_measure_is_not_spelled_out(tmp_path):
    axes = "\n".join(f"'platform.link.a{at}' = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for at in range(5000))
    assert "makes more than 1,000,000,000,000,000,000 configurations" in refusal(tmp_path, f"[grid]\n{axes}")


@every("grid", ("eviction = ['lru', 'fifo']", "capacity = { low = 1, high = 9 }"), apart=True)
def test_a_draw_of_more_than_that_is_refused_whatever_it_is_from(grid, tmp_path):
    said = refusal(tmp_path, f"[grid]\n{grid}\n[random]\nn = 99999999999999999999")
    assert said.endswith("random.n: expected at most 100000 (got 99999999999999999999)")


def test_a_few_are_drawn_from_a_grid_of_any_size(tmp_path):
    axes = "\n".join(f"'platform.link.a{at}' = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for at in range(40))
    (tmp_path / "e.toml").write_text(f'traces = ["a.zarr"]\n[grid]\n{axes}\n[random]\nn = 50')
    drawn = [list(each.values()) for each in combinations(read(tmp_path / "e.toml"), tmp_path / "e.toml")]
    assert len(drawn) == len(set(map(tuple, drawn))) == 50
    assert drawn == [list(each.values()) for each in combinations(read(tmp_path / "e.toml"), tmp_path / "e.toml")]


def test_configurations_count_once_per_trace(tmp_path):
    for name in ("tiny", "other"):
        store_trace(tmp_path / f"{name}.zarr", requests=1, seed=len(name))
    text = f'traces = ["*.zarr"]\n[base]\ncapacity = "50%"\n[grid]\nseed = {list(range(100))}\n[random]\nn = 60'
    file = experiment(tmp_path, text)
    assert len(planned(file).jobs) == 2 * (60 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moereplay.sweeps.grid.MOST_CONFIGURATIONS", 100)
        with pytest.raises(ConfigError, match="its grid on 2 traces makes 120 configurations; one command takes 100: "):
            planned(file)


def test_comma_lists_are_refused_by_their_count():
    with pytest.raises(ConfigError, match="these lists make 180,000 configurations; one command takes 100,000: short"):
        expand({"capacity": LONG, "eviction": ",".join(["lru", "fifo"] * 15), "contract": "atomic,sequential"}, {})


def test_policy_sets_are_refused_by_their_count():
    with pytest.raises(ConfigError, match=r"these lists make 180,000 configurations"):
        named_sets({"one": {"capacity": LONG, "eviction": ",".join(["lru", "fifo"] * 30)}}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moereplay.sweeps.grid.MOST_CONFIGURATIONS", 3)
        with pytest.raises(ConfigError, match="these policy sets make 4 configurations; one command takes 3: shorten"):
            named_sets({name: {"eviction": ["lru", "fifo"]} for name in ("a", "b")}, {})


def test_a_search_is_refused_more_trials_than_that(tmp_path):
    file = experiment(tmp_path, 'traces = ["tiny.zarr"]\n[grid]\ncapacity = { low = 1, high = 9, suffix = "%" }')
    search = Search(read(file), file, (), ("hit_rate",), MOST_CONFIGURATIONS + 1, "tpe", 0, "reference")
    with pytest.raises(ConfigError, match="--trials asks for 100,001 configurations; one command takes 100,000"):
        check(search)
    check(search._replace(trials=MOST_CONFIGURATIONS))


def test_the_limit_itself_is_allowed():
    one = {"capacity": "5%", "eviction": "lru"}
    assert expand(one, {}) == [configure(**one)]
