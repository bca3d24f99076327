"""Settings and counters are declared once: classes, options, columns, remarks and pages follow from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import polars as pl
import pytest
import typer

from moereplay import policies
from moereplay.command import application
from moereplay.results import counters, settings
from moereplay.results.counters import COUNTERS, Counter, reported
from moereplay.results.remarks import LEAST, idle
from moereplay.results.schema import rows_schema, table_schemas, with_config, with_settings
from moereplay.results.settings import (
    EXPERTS,
    LISTED,
    NAMES,
    OF_CURVES,
    SETTINGS,
    TEXT,
    WHOLE,
    expert_lists,
    repeat_command,
    setting_kinds,
)
from moereplay.simulator.compiled import counters as compiled
from moereplay.simulator.config import KINDS, Origin, ReplayConfig, configure
from moereplay.simulator.replay import replay
from tests.kit.cases import sizes
from tests.kit.collecting import case
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.tiny_runs import small_trace

ROOT = Path(__file__).resolve().parents[2]
TRACE = Origin(sizes(3, 8), frozenset(), 0, "0" * 64, "made")


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
    assert tuple(policies.NAMES) == settings.KINDS


# -- options ---------------------------------------------------------------------------------------------------------


def test_every_setting_of_a_replay_is_an_option_with_its_default():
    found = {name: default for name, default in options("replay").items() if name in NAMES}
    assert list(found) == list(NAMES)
    assert {name: default or () for name, default in found.items() if default is None} == {
        "warm": (),
        "profile": (),
        "resident": (),
    }
    assert all(default == getattr(configure(), name) for name, default in found.items() if default is not None)


def test_a_verb_has_the_settings_that_it_can_vary():
    for verb, has in [
        ("live", [each.name for each in SETTINGS if not each.of_recording]),
        ("validate", [each.name for each in SETTINGS if each.listed and not each.of_recording]),
        ("curve", [name for name in NAMES if name in (*OF_CURVES, "seed")]),
    ]:
        own = {"eviction", "platform"} if verb == "curve" else set()  # it has options of these names that mean its own
        assert [name for name in options(verb) if name in NAMES and name not in own] == has


@pytest.mark.slow
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


MADE_UP = Counter("spilled", counters.COUNT, "made up by this test", per=("request",), column="spilled_over")


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this version declared one counter more, of requests alone."""
    monkeypatch.setitem(COUNTERS, MADE_UP.name, MADE_UP)
    monkeypatch.setattr(counters, "_reported", counters._reported.__wrapped__)  # it keeps which counters there are


def test_every_counter_says_what_it_counts_in_which_unit() -> None:
    units = {counters.COUNT, counters.BYTES, counters.NS, counters.WEIGHT}
    assert {counter.unit for counter in COUNTERS.values()} == units
    assert all(counter.definition and counter.per for counter in COUNTERS.values())
    assert all((counter.unit == counters.NS) == name.endswith("_ns") for name, counter in COUNTERS.items())


def test_no_column_of_a_flat_table_is_there_twice() -> None:
    """`capacity` is a setting, so the counter has another column."""
    (table, *_), settings = table_schemas(setting_kinds(), KINDS).values(), setting_kinds()
    headings = [counter.heading for counter in COUNTERS.values()]
    assert len({*headings, *settings}) == len(headings) + len(settings)
    assert {*headings, *settings} < set(table)


def test_a_counter_of_requests_alone_is_in_no_other_row(one_more: None) -> None:
    result = replay(small_trace(), configure(capacity="50%"), engine="reference")
    assert all("spilled" in row for row in (result.totals, *result.per_request))
    assert not any("spilled" in row for row in result.per_layer)
    counts = dict.fromkeys(COUNTERS, 1).values()
    assert "spilled" in reported(counts, "request") and "spilled" not in reported(counts, "layer")


def test_schemas_and_the_documented_table_have_what_is_declared(one_more: None) -> None:
    nested, tables = rows_schema(), table_schemas()
    assert "spilled" in str(nested["per_request"]) and "spilled" not in str(nested["per_layer"])
    assert [name for name, table in tables.items() if "spilled_over" in table] == ["configurations", "requests"]
    assert "| `spilled` | count | made up by this test (per request only) |" in counters.markdown()


def test_compiled_code_has_the_column_of_every_counter_by_name() -> None:
    assert [getattr(compiled, name.upper()) for name in COUNTERS] == compiled.DECLARED
    assert sorted(compiled.DECLARED) == list(range(len(COUNTERS)))
    with pytest.raises(AttributeError, match="spilled"):
        _ = compiled.SPILLED


def test_a_result_is_a_tidy_row_and_one_per_layer_and_phase() -> None:
    result = replay(small_trace(), configure(capacity="50%", warm=((0, 1),)), engine="reference")
    (row,) = result.frame().to_dicts()
    assert {name: row[counter.heading] for name, counter in COUNTERS.items()} == {
        name: result.totals[name] for name in COUNTERS
    }
    assert (row["capacity"], row["warm"], row["time_ns"]) == ("50%", "0:1", result.totals["time_ns"])
    assert row["bound_belady_hits"] is None
    rows = result.layers_frame()
    assert rows.select("layer", "phase", "misses").to_dicts() == [
        {name: each[name] for name in ("layer", "phase", "misses")} for each in result.per_layer
    ]


def test_results_of_older_settings_have_a_frame_too() -> None:
    """Columns are those of the result, whatever the configuration of today is."""
    result = replay(small_trace(), configure(capacity="50%"), engine="reference")
    kinds = {"share": "number", **{name: kind for name, kind in result.kinds.items() if name != "seed"}}
    config = {name: value for name, value in result.config.items() if name != "seed"} | {"share": 0.5}
    frame = replace(result, config=config, kinds=kinds).frame()
    assert frame["share"].item() == 0.5
    assert "seed" not in frame.columns


def test_defaults_are_left_out_and_what_a_shell_would_read_is_quoted() -> None:
    config = configure(capacity="25%", prefetch="top_k:depth=2", seed=3).model_dump(mode="json")
    assert repeat_command(config, "my trace.zarr") == (
        "moereplay replay 'my trace.zarr' --capacity 25% --prefetch top_k:depth=2 --seed 3"
    )
    assert repeat_command(configure().model_dump(), "a.zarr") == "moereplay replay a.zarr"


def test_lists_are_read_from_files() -> None:
    config = configure(warm=((0, 1), (2, 3))).model_dump()
    assert repeat_command(config, "a.zarr") == "moereplay replay a.zarr --warm warm.json"
    assert expert_lists(config) == {"warm.json": [[0, 1], [2, 3]]}


def test_settings_that_older_results_lack_are_at_their_default() -> None:
    assert repeat_command({"eviction": "fifo", "capacity": "5%", "scope": None}, "a.zarr") == (
        "moereplay replay a.zarr --eviction fifo"
    )


def test_a_users_policy_goes_without_the_hash_of_its_file() -> None:
    assert repeat_command({"eviction": "mine@0f3a:k=2"}, "a.zarr", ["mine.py"]) == (
        "moereplay replay a.zarr --eviction mine:k=2 --policy-file mine.py"
    )


CONFIG = {"miss": "cpu", "platform": "p", "capacity": "5%", "warm": []}
TOTALS = {"bytes_demand": 0, "bytes_prefetch": 0, "bytes_lower": 0, "misses": 9}


def row(config: dict | None = None, **totals: int) -> dict:
    return {"config": CONFIG | (config or {}), "totals": TOTALS | totals}


def test_a_cache_that_nothing_enters_is_named_once_with_what_fills_it():
    (said,) = idle([row(), row()])
    assert said.startswith("miss cpu: nothing is ever loaded") and said.endswith("--warm FILE fills it at the start")
    assert idle([row({"warm": [[0, 1]]})]) == [] and idle([row(bytes_demand=5)]) == [] and idle([row(misses=0)]) == []


def test_a_tier_that_includes_the_one_above_is_named_where_it_catches_next_to_nothing():
    (said,) = idle([row(bytes_demand=2_177, bytes_lower=2_146)])
    assert (
        said.startswith("p at 5%: lower tiers catch 1.4% of the bytes") and "includes the experts of the cache" in said
    )
    assert idle([row(bytes_demand=100, bytes_lower=int(100 * (1 - LEAST)) - 1)]) == []


@pytest.mark.slow
def test_replay_says_it():
    given = ("--miss", "cpu", "--platform", "rtx4090-pcie4", "--capacity", "25%", "--engine", "reference")
    ended = moereplay("replay", "miniature", "--passes", "token", *given)
    assert ended.returncode == 0 and "miss cpu: nothing is ever loaded" in unfolded(ended.stdout), ended.stderr
