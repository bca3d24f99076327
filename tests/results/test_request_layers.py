"""Rows per request and layer: they add up to those per layer and per request, and are stored if few or asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
import pytest

import moereplay
from moereplay.analysis.comparisons import COLD
from moereplay.analysis.figures.catalogue import chart
from moereplay.analysis.figures.chart import rows_of
from moereplay.analysis.statistics import interval
from moereplay.results.counters import BY_LAYER, heading_of
from moereplay.results.stored import load
from moereplay.simulator import replay as replaying
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.jobs import Batch, compute
from moereplay.sweeps.parts import keep, merge
from moereplay.sweeps.run import left_to_do, planned
from moereplay.sweeps.store import Folder
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.sweeping import GRID, experiment
from tests.kit.tiny_runs import small_trace

NAMES = [heading_of(name) for name in BY_LAYER]
CONFIGS = [configure(capacity=capacity, passes="token") for capacity in ("25%", "50%")]


def stored(folder: Path, by_layer: bool | None) -> Path:
    trace = small_trace(requests=3)
    for _ in keep(folder, trace, CONFIGS, run_grid(trace, CONFIGS, by_layer=by_layer), "compiled"):
        pass
    return folder


def sums(table: pl.DataFrame, *keys: str) -> pl.DataFrame:
    return table.group_by("identity", *keys).agg(pl.col(NAMES).sum()).sort("identity", *keys)


@every("keys, whole", [(("layer", "phase"), "layers"), (("request",), "requests")])
def test_they_add_up_to_the_other_tables(tmp_path: Path, keys: tuple[str, ...], whole: str) -> None:
    folder = stored(tmp_path / whole, None)
    rows = moereplay.read_results(folder, "request_layers")
    assert set(rows["request"]) == {0, 1, 2}
    assert sums(rows, *keys).equals(sums(moereplay.read_results(folder, whole), *keys))


def test_few_are_kept_unasked_and_any_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = small_trace(requests=3)
    few = replay(trace, CONFIGS[0], by_layer=None).request_layers
    assert few == replay(trace, CONFIGS[0], by_layer=True, engine="reference").request_layers != {}
    assert replay(trace, CONFIGS[0]).request_layers == {}
    monkeypatch.setattr(replaying, "MOST_BY_LAYER", 3 * trace.geometry.layers - 1)
    assert replay(trace, CONFIGS[0], by_layer=None).request_layers == {}
    assert replay(trace, CONFIGS[0], by_layer=True).request_layers == few
    table = moereplay.read_results(stored(tmp_path, None), "request_layers")
    assert table.is_empty() and set(NAMES) <= set(table.columns)


def test_a_sweep_keeps_them_and_replays_what_was_stored_without(tmp_path: Path) -> None:
    sweep = planned(experiment(tmp_path))
    asking = planned(experiment(tmp_path, f"request_layers = true\n{GRID}", "asking.toml"))
    job = next(job for job in sweep.jobs if job.kind == "configuration")
    without, asked, out = (Folder(tmp_path / name) for name in ("without", "asked", "merged"))

    def held(place: Folder, *kept: bool) -> Mapping[str, Sequence[str]]:
        requests, by_layer = kept
        part = compute(Batch(0, (job,), "compiled", requests, (), by_layer)).part
        place.store(part, {"sweep_version": 1})
        return part.holds

    assert "request_layers" not in held(without, False, False)
    assert job in left_to_do(asking, without, asking.jobs) and job not in left_to_do(sweep, without, sweep.jobs)
    assert held(asked, True, True)["request_layers"] == [job.identity]
    assert job not in left_to_do(asking, asked, asking.jobs)
    merge([without, asked], out)
    assert job not in left_to_do(asking, out, asking.jobs)
    with pytest.raises(ConfigError, match="request_layers = true requires rows of requests"):
        planned(experiment(tmp_path, f"request_layers = true\nrequests = false\n{GRID}", "neither.toml"))


# intervals by layer


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled recording, of six requests, under two policies."""
    folder, trace = tmp_path_factory.mktemp("drawn"), open_trace("miniature")
    configs = [configure(capacity="25%", passes="token", eviction=name) for name in ("lru", "least_stale")]
    for _ in keep(folder, trace, configs, run_grid(trace, configs, by_layer=None), "compiled"):
        pass
    return folder


@every("phase, per", [("decode", "misses"), ("both", "accesses")])
def test_bars_are_the_interval_of_each_layer_over_requests(drawn: Path, phase: str, per: str) -> None:
    made = chart("collisions_by_layer", load(drawn), phase=phase, per=per.removesuffix("es"))
    rows = moereplay.read_results(drawn, "request_layers").filter(eviction="lru")
    rows = rows if phase == "both" else rows.filter(phase=phase)
    own = next(line for line in made.panels[0][0].series if line.name == "lru")
    for point in own.points[2:]:
        sums = rows.filter(layer=int(point.x)).group_by("request", maintain_order=True).agg(pl.col(NAMES).sum())
        assert point[1:4] == pytest.approx(interval(sums.select("collisions", per).rows(), COLD, share=True)[:3])
        assert point.low is not None and 0 <= point.low < (point.y or 0) < (point.high or 0) <= 1
    assert "Bars: 95% CI over requests (n = 6), for each layer alone." in made.note
    assert "Layers without a bar: one request at most has collisions, or lacks them." in made.note
    assert [row["high"] for row in rows_of(made) if row["name"] == "lru"] == [point.high for point in own.points]


def test_without_these_rows_a_figure_says_so(tmp_path: Path) -> None:
    trace = open_trace("miniature")
    config = configure(capacity="25%", passes="token")
    for _ in keep(tmp_path, trace, [config], run_grid(trace, [config]), "compiled"):
        pass
    assert (
        "rows by request and layer were not stored; replay with --request-layers"
        in chart("collisions_by_layer", load(tmp_path)).note
    )
