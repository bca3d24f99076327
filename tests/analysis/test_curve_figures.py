"""Curve files and their figures: refused when damaged, drawn as counted, beside the replays that they hold for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes

from moereplay.analysis.figures.catalogue import draw, draw_curves
from moereplay.results.curves import load
from moereplay.results.errors import ResultError
from moereplay.simulator.curves.curve import curve, write_curve
from moereplay.sweeps.grid import decide
from moereplay.traces.schema import Trace
from tests.kit.tiny_runs import frame_of, small_trace

LRU, BELADY = "lru at every capacity", "Belady (no prefetch)"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


@pytest.fixture(scope="module")
def curves(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("curves")
    for policy in ("lru", "belady"):
        write_curve(folder, curve(trace, policy))
    return load(folder)


def lines(axes: Axes, label: str) -> list[dict[float, float]]:
    """x -> y of each line of that label."""
    found = [line for line in axes.get_lines() if line.get_label() == label]
    return [dict(zip(np.asarray(line.get_xdata()), np.asarray(line.get_ydata()), strict=True)) for line in found]


def refusal(path: Path) -> str:
    with pytest.raises(ResultError) as refused:
        load(path.parent)
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_a_folder_without_curves_has_none(tmp_path: Path) -> None:
    assert load(tmp_path).is_empty()


@pytest.mark.slow
def test_a_curve_is_read_as_it_was_counted(trace: Trace, curves: pl.DataFrame) -> None:
    made, rows = curve(trace, "belady"), curves.filter(pl.col("policy") == "belady")
    read = rows["hit_rate"].fill_null(float("nan")).to_numpy()
    np.testing.assert_array_equal(read, made.hit_rate)
    assert np.isnan(read).any() and not np.isnan(read).all()
    assert rows["percent"].to_list() == [100 * n / 32 for n in range(1, 33)]


def test_a_file_that_cannot_be_trusted_is_refused(trace: Trace, tmp_path: Path) -> None:
    path = write_curve(tmp_path, curve(trace))
    good = pl.read_parquet(path)
    good.with_columns(digest=pl.lit("0" * 64)).write_parquet(path)
    assert refusal(path).endswith(
        "is damaged: its content does not match its digest; delete it and run moereplay curve again"
    )
    good.with_columns(curves_version=pl.lit(99, pl.Int64)).write_parquet(path)
    assert "is newer than this version reads (1)" in refusal(path)
    good.drop("curves_version").write_parquet(path)
    assert "holds no curve" in refusal(path)
    path.write_bytes(b"PAR1")
    assert "as Parquet" in refusal(path)


@pytest.mark.slow
def test_curves_run_through_the_points_of_the_replays(trace: Trace, curves: pl.DataFrame) -> None:
    replays = frame_of(trace, eviction=["lru", "fifo"], capacity=["25%", "50%", "75%"])
    (axes,) = draw("hit_rate_by_capacity", replays, curves).axes
    (whole,), (points,) = lines(axes, LRU), lines(axes, "lru")
    assert len(whole) == 32
    assert {at: whole[at] for at in points} == pytest.approx(points)
    bound, replayed = lines(axes, BELADY)
    decided = {at: rate for at, rate in replayed.items() if bound[at] == bound[at]}
    assert decided and {at: bound[at] for at in decided} == pytest.approx(decided)
    lru, fifo = (next(line for line in axes.get_lines() if line.get_label() == name) for name in ("lru", "fifo"))
    assert (lru.get_linestyle(), fifo.get_linestyle() != "None") == ("None", True)  # markers alone


@pytest.mark.slow
def test_with_prefetch_the_bound_alone_is_drawn_and_elsewhere_nothing(trace: Trace, curves: pl.DataFrame) -> None:
    prefetching = frame_of(trace, eviction=["lru"], prefetch=["top_k"], capacity=["25%", "50%"])
    (axes,) = draw("hit_rate_by_capacity", prefetching, curves).axes
    assert (len(lines(axes, LRU)), len(lines(axes, BELADY))) == (0, 2)
    for other in ({"scope": ["per_layer"]}, {"reset": ["request"]}, {"miss": ["fetch:bits=4"]}):
        replays = frame_of(trace, eviction=["lru"], capacity=["50%", "75%"], **other)
        (axes,) = draw("hit_rate_by_capacity", replays, curves).axes
        assert (len(lines(axes, LRU)), len(lines(axes, BELADY))) == (0, 1)


def test_a_curve_holds_for_the_seed_of_its_drafts_and_for_neither_arrivals_nor_residents(
    trace: Trace, curves: pl.DataFrame, tmp_path: Path
) -> None:
    for seed in (3, 0):
        write_curve(tmp_path, curve(trace, "lru", seed=seed, passes="batch:2", draft="2:accept=.5"))
    drafted, same = load(tmp_path), {"passes": ["batch:2"], "draft": ["2:accept=.5"]}
    replays = frame_of(trace, eviction=["lru"], capacity=["75%", "87.5%"], seed=[3], **same)
    (axes,) = draw("hit_rate_by_capacity", replays, drafted).axes
    (whole,), (points,) = lines(axes, LRU), lines(axes, "lru")
    assert {at: whole[at] for at in points} == pytest.approx(points)
    for other in ({"arrivals": ["every:1"]}, {"resident": [((0, 0),)]}):
        replays = frame_of(trace, eviction=["lru"], capacity=["75%", "87.5%"], seed=[3], **same, **other)
        (axes,) = draw("hit_rate_by_capacity", replays, drafted).axes
        assert not lines(axes, LRU)
    (axes,) = draw("hit_rate_by_capacity", frame_of(trace, capacity=["75%", "87.5%"], seed=[3]), curves).axes
    assert len(lines(axes, LRU)) == 1  # without drafts no curve depends on a seed


def test_what_another_machine_has_decided_stays_a_gap(trace: Trace, tmp_path: Path) -> None:
    made = curve(trace, "belady")
    write_curve(tmp_path, decide(trace, made, "phone-ufs4"))
    filled = load(tmp_path)
    assert filled["hit_rate"].null_count() == 0
    for platform, gaps in (("phone-ufs4", 0), ("a100-5gbps", int((~made.decided).sum()))):
        replays = frame_of(trace, eviction=["lru"], capacity=["25%", "50%"], platform=[platform])
        (axes,) = draw("hit_rate_by_capacity", replays, filled).axes
        rates = np.array(list(lines(axes, BELADY)[0].values()))
        assert np.isnan(rates).sum() == gaps
    assert gaps > 0


def test_curves_of_another_version_of_the_semantics_are_left_out(trace: Trace, curves: pl.DataFrame) -> None:
    replays = frame_of(trace, eviction=["lru"], capacity=["25%", "50%"])
    (axes,) = draw("hit_rate_by_capacity", replays, curves.with_columns(pl.col("semantics") + 1)).axes
    assert (len(lines(axes, LRU)), len(lines(axes, BELADY))) == (0, 1)


def test_with_a_curve_one_capacity_is_enough(trace: Trace, curves: pl.DataFrame) -> None:
    replays = frame_of(trace, eviction=["lru"], capacity=["25%"])
    (axes,) = draw("hit_rate_by_capacity", replays, curves).axes
    assert [len(lines(axes, label)) for label in (LRU, BELADY, "compulsory limit")] == [1, 2, 1]
    percents = axes.get_xticks()
    assert 25 in percents and len(percents) > 1


def test_labels_of_ticks_do_not_touch(trace: Trace, curves: pl.DataFrame) -> None:
    replays = frame_of(trace, eviction=["lru"], capacity=["9%", "10%", "11%", "48%", "52%", "87.5%"])
    figure = draw("hit_rate_by_capacity", replays, curves)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert len(boxes) > 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_curves_alone_have_a_page(trace: Trace, curves: pl.DataFrame, tmp_path: Path) -> None:
    figure = draw_curves(curves)
    (axes,) = figure.axes
    assert (axes.get_xscale(), "capacity (log)" in [text.get_text() for text in figure.texts]) == ("log", True)
    assert [len(lines(axes, label)) for label in (LRU, BELADY, "compulsory limit")] == [1, 1, 1]
    write_curve(tmp_path, curve(trace, scope="per_layer"))
    assert len(draw_curves(pl.concat([curves, load(tmp_path)])).axes) == 2
    with pytest.raises(ResultError, match="found curves of 0 settings"):
        draw_curves(curves.clear())
