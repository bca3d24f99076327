"""A counter is declared once: engines, tables and readers know it from there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moereplay.results import counters
from moereplay.results.counters import COUNTERS, Counter, reported
from moereplay.results.schema import rows_schema, table_schemas
from moereplay.results.settings import setting_kinds
from moereplay.simulator.compiled import counters as compiled
from moereplay.simulator.config import KINDS, configure
from moereplay.simulator.replay import replay
from tests.kit.tiny_runs import small_trace

MADE_UP = Counter("spilled", counters.COUNT, "made up by this test", per=("request",), column="spilled_over")


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this version declared one counter more, of requests alone."""
    monkeypatch.setitem(COUNTERS, MADE_UP.name, MADE_UP)


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
    assert [getattr(compiled, name.upper()) for name in COUNTERS] == list(range(len(COUNTERS)))
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
