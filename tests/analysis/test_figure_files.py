"""Figures show intervals, list what they draw, write what they show as CSV, and fit the width of a column."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from matplotlib.figure import Figure

from moereplay.analysis.figures.catalogue import (
    FIGURES,
    KINDS,
    draw,
    draw_all,
    on_page,
    save,
    save_caption,
    save_numbers,
)
from moereplay.analysis.figures.misses import misses
from moereplay.analysis.metrics import measured, with_ends
from moereplay.analysis.palette import KNOWN, looks
from moereplay.results.read import only, runs
from tests.kit.drawn import legend, note, renamed, texts
from tests.kit.every import every
from tests.kit.tiny_runs import by_hand, frame_of, small_trace

CAPACITIES = ["25%", "40%", "60%"]


@pytest.fixture(scope="module")
def several() -> pl.DataFrame:
    """Replays of a trace whose requests differ, as if it had been recorded."""
    frame = frame_of(small_trace(requests=6), eviction=["lru", "fifo", "belady"], capacity=CAPACITIES)
    recorded = {"model": pl.lit("recorded"), "synthetic": pl.lit(None, pl.String), "label": pl.lit("SIMULATED")}
    return frame.with_columns(pl.col("about").struct.with_fields(**recorded))


def labels(figure: Figure) -> set[str]:
    """The labels of what panels show."""
    drawn = [artist for axes in figure.axes for artist in (*axes.get_lines(), *axes.containers)]
    return {str(artist.get_label()) for artist in drawn}


@every("name", ["hit_rate_by_capacity", "complete_by_capacity", "ttft_by_capacity", "tpot_by_capacity"])
def test_points_have_the_intervals_of_their_figures(several: pl.DataFrame, name: str) -> None:
    figure = draw(name, several)
    metric = {"ttft_by_capacity": "ttft_mean_ms", "tpot_by_capacity": "tpot_ms"}.get(name, "hit_rate")
    table = with_ends(several, measured(several), [metric]).filter(pl.col("eviction") == "lru").sort("capacity")
    known = table.drop_nulls(f"{metric}_low")
    (bars,) = [each for each in figure.axes[0].collections if each.get_label() == "_ends of lru"]
    found = [(below[1], above[1]) for below, above in bars.get_segments()]  # type: ignore[attr-defined]
    assert found and found == list(zip(known[f"{metric}_low"], known[f"{metric}_high"], strict=True))
    assert "Bars: 95% CI over requests" in note(figure)
    assert figure.axes[0].get_ylim()[1] >= max(high for _, high in found)


def test_the_interval_of_misses_holds_their_number(several: pl.DataFrame) -> None:
    """Fewer misses than hits have it from the share of hits, whose ends are the other way round."""
    few = runs(several).filter(pl.col("misses") * 2 < pl.col("accesses"))["capacity"].unique().to_list()
    (panels,) = misses(only(several, capacity=few)).panels
    ends = [(bar.low, bar.total, bar.high) for panel in panels for bar in panel.bars]
    assert ends
    assert all(low is not None and high is not None and low < total < high for low, total, high in ends), ends


@pytest.mark.slow
@every("name", FIGURES)
def test_a_legend_lists_what_is_drawn_and_nothing_else(several: pl.DataFrame, name: str) -> None:
    words = {"compulsory": "compulsory", "capacity": "capacity_misses", "collision": "collisions"}
    for frame in (several, several.with_columns(bounds=pl.lit(None, several.schema["bounds"]))):
        figure = draw(name, frame)
        assert {words.get(text, text) for text in legend(figure)} <= labels(figure)


def test_a_limit_without_belady_s_bound_is_drawn_and_no_line_that_is_not() -> None:
    """As in a pool of experts that differ in bytes."""
    parts = [by_hand({"accesses": 10, "hits": 2, "misses": 8}, [{"layer": 0}], capacity=f"{at}%") for at in (5, 25)]
    unknown = pl.lit(None, pl.Int64)
    bounds = pl.struct(belady_hits=unknown, feasible_hits=unknown, accesses=pl.lit(10), compulsory=pl.lit(3))
    figure = draw("hit_rate_by_capacity", pl.concat(renamed(part, "lru") for part in parts).with_columns(bounds=bounds))
    assert "compulsory limit" in legend(figure) and "Belady (no prefetch)" not in legend(figure)
    assert "compulsory limit" in labels(figure)


@every("typed", [["26.44%", "27.72%", "40%"], ["26.44%", "27.72%", "90%"], ["1%", "2%", "90%"]])
def test_labels_of_ticks_never_touch(typed: list[str]) -> None:
    request = [{"ttft_ns": 3_000_000, "decode_ns": 9_000_000, "decode_tokens": 4}]
    parts = [by_hand({}, [{"layer": 0}], request, capacity=each) for each in typed]
    frame = pl.concat(renamed(part, "lru") for part in parts)
    for width in (None, 3.3):
        with on_page(width):
            figure = draw("tpot_by_capacity", frame)
        figure.draw_without_rendering()
        axes = figure.axes[-1]
        boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert boxes and all(left.x1 < right.x0 for left, right in pairwise(boxes))
        assert len(axes.get_xticks()) + len(axes.get_xticks(minor=True)) == len(typed)


def test_capacities_are_written_as_they_were_typed() -> None:
    frame = frame_of(small_trace(), eviction=["lru"], capacity=["8MB", "12.5MB", "20MB"])
    ticks = [label.get_text() for label in draw("hit_rate_by_capacity", frame).axes[0].get_xticklabels()]
    assert ticks == ["8MB", "12.5MB", "20MB"]


def test_a_users_policy_has_a_marker_and_a_colour_of_its_own_and_no_version_in_the_legend() -> None:
    for name in (f"mine{at}@0123456789ab" for at in range(40)):
        drawn = looks([*KNOWN, name])
        assert drawn[name].marker not in {look.marker for look in KNOWN.values()}
        assert drawn[name].colour not in {look.colour for look in KNOWN.values()}
    one = renamed(by_hand({"misses": 3}, [{"layer": 0, "misses": 3, "collisions": 1}]), "mine@0123456789ab")
    assert legend(draw("collisions_by_layer", one)) == ["mine"]
    two = pl.concat([one, renamed(by_hand({"misses": 3}, [{"layer": 0, "misses": 3}]), "mine@ba9876543210")])
    assert set(legend(draw("collisions_by_layer", two))) == {"mine@0123456789ab", "mine@ba9876543210"}


def test_belady_s_policy_and_belady_s_bound_differ(several: pl.DataFrame) -> None:
    (axes,) = draw("hit_rate_by_capacity", several).axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert lines["belady"].get_color() != lines["Belady (no prefetch)"].get_color()


def test_a_csv_has_every_point_with_its_interval(several: pl.DataFrame, tmp_path: Path) -> None:
    figures = dict(draw_all(several).figures)
    path = save_numbers(figures["hit_rate_by_capacity"], tmp_path / "hits")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    table = measured(several)
    for name in ("lru", "fifo", "belady"):
        drawn = {float(row["x"]): float(row["y"]) for row in rows if row["name"] == name}
        assert sorted(drawn.values()) == sorted(table.filter(pl.col("eviction") == name)["hit_rate"].to_list())
    assert any(row["low"] for row in rows)
    parts = list(csv.DictReader(save_numbers(figures["misses"], tmp_path / "misses").read_text().splitlines()))
    bars = [
        row for row in parts if row["panel"] == "capacity 25%" and row["name"] == "lru" and row["part"] != "interval"
    ]
    total = only(several, eviction="lru", capacity="25%")["totals"][0]["misses"]
    assert sum(float(row["x"]) for row in bars) == total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_kind_are_the_same_twice_and_have_no_date(
    several: pl.DataFrame, tmp_path: Path, kind: str
) -> None:
    for folder in ("one", "two"):
        save(draw("misses", several), tmp_path / folder / "misses", [kind])
    first, second = (tmp_path / folder / f"misses.{kind}" for folder in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert not any(word in first.read_bytes() for word in (b"CreationDate", b"Producer", b"Creator", b"<dc:date>"))


@pytest.mark.slow
@every("name", FIGURES, apart=True)
def test_a_page_has_the_width_of_a_column_and_its_title_beside_it(
    several: pl.DataFrame, tmp_path: Path, name: str
) -> None:
    with on_page(3.3):
        figure = draw(name, several)
    figure.draw_without_rendering()
    assert figure.get_size_inches()[0] == pytest.approx(3.3)
    shown = [text for text in (*figure.texts, *figure.legends[0].get_texts()) if text.get_text()]
    assert {text.get_fontsize() for text in shown} == {7.0}
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 + 1 for text in shown)
    caption = save_caption(figure, tmp_path / name).read_text()
    assert "(SIMULATED)" in caption and "platform a100-5gbps" in caption and texts(draw(name, several))[0] in caption
