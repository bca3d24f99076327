"""Named policy sets: files and lists become configurations, and what is wrong with them is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.policy_sets import SHIPPED, SHIPPED_BASE, named_sets, read_sets
from tests.kit.every import every

FILE = """
[base]
capacity = "50%"
reset = 512

[sets.lru]
eviction = "lru"
seed = 7
warm = [[0, 1], [1, 2]]

[sets.prior]
capacity = "25%"
routing = ["cache_prior:lam=0", "cache_prior:lam=.25"]
"""


def written(folder: Path, text: str) -> Path:
    (folder / "sets.toml").write_text(text)
    return folder / "sets.toml"


def test_a_file_becomes_named_configurations(tmp_path: Path) -> None:
    named = named_sets(*read_sets(written(tmp_path, FILE)))
    assert named == {
        "lru": configure(capacity="50%", reset="512", eviction="lru", seed=7, warm=((0, 1), (1, 2))),
        "prior routing=cache_prior:lam=0": configure(capacity="25%", reset="512", routing="cache_prior:lam=0"),
        "prior routing=cache_prior:lam=.25": configure(capacity="25%", reset="512", routing="cache_prior:lam=.25"),
    }


def test_the_three_that_ship_are_sound_and_of_three_kinds() -> None:
    chosen = [config.policy_set() for config in named_sets(SHIPPED, SHIPPED_BASE).values()]
    assert [each.open_loop for each in chosen] == [False, False, True]
    assert [each.prefetch.policy.name for each in chosen] == ["none", "top_k", "none"]


WRONG = {
    "no TOML": ("[sets", "expected TOML with"),
    "the same name twice": ("[sets.a]\nseed=1\n[sets.a]\nseed=2", "sets.toml"),
    "no set": ("[base]\ncapacity = '5%'", "[sets.NAME]"),
    "a set that is no table": ("sets.lru = 'lru'", "[sets.NAME]"),
    "a table of another kind": ("[set.a]\nseed=1", "'set'; use [base] and [sets.NAME]"),
    "an unknown setting": (
        "[sets.a]\nevicton = 'lru'",
        "policy set a: unknown setting 'evicton': did you mean eviction?",
    ),
    "an unknown setting of all": (
        "[base]\nx = 1\n[sets.a]\nseed = 1",
        "policy set base: unknown setting 'x': choose",
    ),
    "a value of another type": ("[sets.a]\nseed = 'lru'", "policy set a: seed: "),
    "an empty list": ("[sets.a]\neviction = []", "policy set a: the list of eviction is empty"),
    "a name that a list makes": (
        "[sets.a]\neviction = ['lru', 'lfu']\n[sets.'a eviction=lfu']\nseed = 1",
        "'a eviction=lfu'",
    ),
}


@every("name", WRONG, apart=True)
def test_what_is_wrong_is_one_line(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        named_sets(*read_sets(written(tmp_path, text)))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_policy_names_its_set() -> None:
    with pytest.raises(PolicyError, match=r"^policy set a: unknown eviction policy 'lur': did you mean"):
        named_sets({"a": {"eviction": "lur"}}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_sets(tmp_path / "nowhere.toml")
