"""Settings are declared once: the class, the options, the columns and the page of documentation follow the table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

import polars as pl
import pytest
import typer

from moereplay import policies
from moereplay.command import application
from moereplay.results import settings
from moereplay.results.schema import rows_schema, with_config, with_settings
from moereplay.results.settings import EXPERTS, KINDS, LISTED, NAMES, OF_CURVES, SETTINGS, TEXT, WHOLE, setting_kinds
from moereplay.simulator.config import Origin, ReplayConfig, configure
from tests.kit.cases import sizes
from tests.kit.collecting import case

ROOT = Path(__file__).resolve().parents[2]
TRACE = Origin(sizes(3, 8), frozenset(), 0, "0" * 64, "made")
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)


def options(verb: str) -> dict[str, object]:
    """The options of a verb in the order of its help, with their defaults."""
    command = typer.main.get_command(application())
    return {each.name: each.default for each in command.commands[verb].params}  # type: ignore[attr-defined]


# -- the class -------------------------------------------------------------------------------------------------------


def test_the_class_has_a_field_for_each_row_in_its_order():
    assert tuple(ReplayConfig.model_fields) == NAMES


def test_a_field_has_the_default_the_values_and_the_type_of_its_row():
    for setting in SETTINGS:
        with case(setting):
            field = ReplayConfig.model_fields[setting.name]
            literal = get_origin(field.annotation) is Literal
            assert field.default == setting.default
            assert (get_args(field.annotation) if literal else ()) == setting.values
            kinds = {str: TEXT, int: WHOLE, tuple[tuple[int, int], ...]: EXPERTS}
            assert (TEXT if literal else kinds[field.annotation]) == setting.kind


def test_the_help_names_every_value():
    for setting in SETTINGS:
        assert all(value in setting.help for value in setting.values)
        assert setting.help.endswith(".")


def test_the_kinds_of_policies_are_those_of_the_catalogue():
    assert tuple(policies.NAMES) == KINDS


# -- options ---------------------------------------------------------------------------------------------------------


def test_every_setting_of_a_replay_is_an_option_with_its_default():
    found = {name: default for name, default in options("replay").items() if name in NAMES}
    assert list(found) == list(NAMES)
    assert {name: default or () for name, default in found.items() if default is None} == {"warm": (), "profile": ()}
    assert all(default == getattr(configure(), name) for name, default in found.items() if default is not None)


def test_a_verb_has_the_settings_that_it_can_vary():
    for verb, has in [
        ("live", [each.name for each in SETTINGS if not each.of_recording]),
        ("validate", [each.name for each in SETTINGS if each.listed and not each.of_recording]),
        ("curve", [name for name in NAMES if name in OF_CURVES]),
    ]:
        own = {"eviction", "platform"} if verb == "curve" else set()  # it has options of these names that mean its own
        assert [name for name in options(verb) if name in NAMES and name not in own] == has


def test_an_option_of_a_verb_of_policy_sets_is_empty_unless_given():
    assert {options("validate")[name] for name in LISTED if name in options("validate")} == {""}


# -- documentation ---------------------------------------------------------------------------------------------------


def test_the_table_in_the_documentation_is_the_one_of_the_code():
    """`make tables` writes it anew."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    written = page.partition("<!-- settings:")[2].partition("-->\n")[2].partition("<!-- end -->")[0]
    assert written.strip() == settings.markdown()


# -- results of earlier versions -------------------------------------------------------------------------------------


@pytest.fixture
def younger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `lookahead` and `warm` had been added since the first version."""
    rows = [each._replace(added=each.name in ("lookahead", "warm")) for each in SETTINGS]
    monkeypatch.setattr(settings, "SETTINGS", tuple(rows))


@pytest.mark.usefixtures("younger")
def test_an_added_setting_is_part_of_an_identity_only_where_it_is_not_at_its_default():
    without = configure().identity(TRACE)
    assert without == configure(lookahead="recorded").identity(TRACE)
    changed = [configure(lookahead="shuffled_tokens"), configure(warm=((0, 1),))]
    assert len({without, *(each.identity(TRACE) for each in changed)}) == 3


@pytest.mark.usefixtures("younger")
def test_an_added_setting_has_its_default_in_results_that_lack_it():
    config = {**configure(eviction="fifo").model_dump(mode="json")}
    schema = {"identity": pl.String, "config": rows_schema(setting_kinds())["config"]}
    whole = pl.DataFrame({"identity": ["a"], "config": [config]}, schema=schema)
    fewer = whole["config"].struct.unnest().drop("lookahead", "warm")
    lacking = whole.with_columns(fewer.to_struct("config"))
    assert with_config(lacking).equals(whole)
    assert with_config(whole).equals(whole)
    assert with_settings(lacking.unnest("config")).equals(whole.unnest("config"))
