"""The policy sets of `quality --study`: whole for every model, and each family over one parameter."""

from __future__ import annotations

from itertools import product

import pytest

from moereplay.analysis.figures.quality import parameter
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.policy_sets import STUDIES, Study, study
from moereplay.traces.geometry import known
from moereplay.traces.schema import Geometry
from tests.kit.every import every

MODELS = ("olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")


def geometry(model: str) -> Geometry:
    return known(model).geometry


def families(made: Study, model: str) -> dict[str, list[dict[str, object]]]:
    """Configurations by the name of their set."""
    found: dict[str, list[dict[str, object]]] = {}
    for name, config in made.configs(geometry(model)).items():
        found.setdefault(name.partition(" ")[0], []).append(config.model_dump(mode="json"))
    return found


@every("name, model", product(STUDIES, MODELS))
def test_every_family_varies_one_number(name: str, model: str) -> None:
    found = families(study(name), model)
    assert all(len(configs) == 1 or parameter(configs) is not None for configs in found.values())
    assert all(config["reset"] == "request" for configs in found.values() for config in configs)


def test_ranks_are_all_of_the_model() -> None:
    assert [len(configs) for configs in families(study("ranks"), "olmoe-1b-7b").values()] == [8, 8]
    assert [len(configs) for configs in families(study("ranks"), "mixtral-8x7b").values()] == [2, 2]


def test_max_rank_goes_up_to_all_experts() -> None:
    routings = [str(each["routing"]) for each in families(study("lambda"), "mixtral-8x7b")["max_rank"]]
    assert routings == ["max_rank:m=3", "max_rank:m=4", "max_rank:m=5", "max_rank:m=8"]


def test_the_capacity_is_the_studys_or_the_users() -> None:
    default, given = (study("lambda").configs(geometry("olmoe-1b-7b"), capacity) for capacity in (None, "10%"))
    assert {config.capacity for config in default.values()} == {"50%"}
    assert {config.capacity for config in given.values()} == {"10%"}


def test_a_study_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'rank'.*ranks"):
        study("rank")


PARAMETERS = (
    ([{"routing": "cache_prior:lam=.1"}, {"routing": "cache_prior:lam=1"}], "routing:lam"),
    ([{"miss": "lowest_bit:bits=8"}, {"miss": "lowest_bit:bits=2"}], "miss:bits"),
    ([{"routing": "swap:rank=1:by=next"}, {"routing": "swap:rank=2:by=next"}], "routing:rank"),
    ([{"routing": "swap:rank=1:seed=1"}, {"routing": "swap:rank=2:seed=2"}], None),  # two numbers
    ([{"miss": "lowest_bit:bits=8/4"}, {"miss": "lowest_bit:bits=8/2"}], None),  # no single number
    ([{"capacity": "5%"}, {"capacity": "9%"}], None),  # no policy
    ([{"routing": "max_rank", "miss": "drop"}, {"routing": "swap", "miss": "fetch"}], None),
    ([{"routing": "max_rank"}], None),
)


@every("configs, expected", PARAMETERS)
def test_the_one_number_in_which_configurations_differ(configs: list[dict[str, object]], expected: str | None) -> None:
    assert parameter(configs) == expected
