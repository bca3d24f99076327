"""Figures keep the phases apart and say which they cover; axes have round ticks and say that they are logarithmic."""

from __future__ import annotations

import re

import polars as pl
import pytest

from moereplay.analysis.figures.catalogue import FIGURES, draw, draw_all
from moereplay.analysis.metrics import measured
from moereplay.results.read import layers, only
from tests.kit.drawn import drawn, note, renamed, texts
from tests.kit.every import every
from tests.kit.tiny_runs import EVICTIONS, by_hand, frame_of, small_trace


def test_collisions_of_both_phases_are_drawn_as_counted(single: pl.DataFrame) -> None:
    (axes,) = draw("collisions_by_layer", single, phase="both").axes
    sums = layers(single).group_by("eviction", "layer").agg(pl.col("collisions", "misses").sum()).sort("layer")
    assert set(drawn(axes)) == set(EVICTIONS)
    for name, values in drawn(axes).items():
        rows = sums.filter(pl.col("eviction") == name)
        assert values == (rows["collisions"] / rows["misses"]).to_list()


@every("name, phase", [("collisions_by_layer", "decode"), ("collisions_in_prefill", "prefill")])
def test_each_phase_has_a_figure_that_names_it(single: pl.DataFrame, name: str, phase: str) -> None:
    figure = draw(name, single)
    cells = layers(single).filter(pl.col("phase") == phase, pl.col("eviction") == "lru").sort("layer")
    assert drawn(figure.axes[0])["lru"] == (cells["collisions"] / cells["misses"]).to_list()
    assert texts(figure)[0] == f"Collisions per miss by layer, {phase}"
    assert f"{phase.capitalize()} only. Collisions" in note(figure)


@pytest.mark.slow
def test_names_of_phases_follow_the_passes() -> None:
    """A request that is all prompt: one pass that is a prefill, and under `token` 12 passes that are not."""
    whole = small_trace(tokens=0, prompt=12)
    size = {"eviction": ["lru", "fifo"], "capacity": ["30%", "60%"]}
    recorded, token = (draw_all(frame_of(whole, passes=[each], **size)) for each in ("recorded", "token"))
    assert "collisions_in_prefill" in dict(recorded.figures) and "collisions_by_layer" in recorded.left_out
    assert "draw collisions_by_layer" in token.left_out["collisions_in_prefill"]
    assert texts(dict(token.figures)["collisions_by_layer"])[0].endswith("by layer, prompt tokens (one per pass)")
    for name, figure in token.figures:
        assert not re.search("prefill|decode", " ".join(texts(figure))), name
    for passes, said in {
        ("token", "chunk:1"): "Prompt tokens (one per pass) and decode together.",
        ("chunk:2",): "Prefill and decode together.",
        ("token", "chunk:2"): "Prompts and decode together.",
    }.items():
        assert said in note(draw("misses", frame_of(small_trace(), passes=[*passes], **size))), passes


@every("name", ["misses", "hit_rate_by_capacity"])
def test_totals_say_which_phases_they_cover(frame: pl.DataFrame, name: str) -> None:
    assert "Prefill and decode together." in note(draw(name, frame))
    parts = [by_hand({"misses": 4}, [{"layer": 0}], capacity=f"{at}%") for at in (5, 25)]
    alone = pl.concat(renamed(part, "lru") for part in parts)
    assert "Decode only: no prompt was replayed." in note(draw(name, alone))


def test_tpot_and_tokens_per_second_are_drawn_as_counted(frame: pl.DataFrame) -> None:
    figure = draw("tpot_by_capacity", only(frame, prefetch="none"))
    table = measured(only(frame, prefetch="none")).sort("capacity")
    assert {"TPOT, ms", "tokens/s, of one request"} <= set(texts(figure))
    for axes, metric in zip(figure.axes, ("tpot_ms", "tokens_per_s"), strict=True):
        for name in EVICTIONS:
            assert drawn(axes)[name] == table.filter(pl.col("eviction") == name)[metric].to_list()
        assert axes.get_ylim()[0] == 0


def test_rows_of_tpot_share_a_scale_and_columns_do_not(frame: pl.DataFrame) -> None:
    above, beside, below, _ = draw("tpot_by_capacity", frame).axes
    assert above.get_ylim() == below.get_ylim() != beside.get_ylim()
    assert above.get_xlim() == beside.get_xlim()


def test_panels_do_not_share_a_scale_on_which_lines_would_be_flat() -> None:
    platforms = {"near": ["rtx4090-pcie4", "h100-pcie5"], "far": ["phone-ufs4", "h100-pcie5"]}
    for name, pair in platforms.items():
        rows = frame_of(small_trace(), eviction=["lru"], capacity=["5%", "60%"], platform=pair)
        for drawn_by in ("tpot_by_capacity", "ttft_by_capacity"):
            figure = draw(drawn_by, rows)
            ends = [axes.get_ylim()[1] for axes in figure.axes][:: 2 if drawn_by == "tpot_by_capacity" else 1]
            assert (len(set(ends)) == 2) == (name == "far"), (name, drawn_by, ends)
            assert any("own vertical scale" in text for text in texts(figure)) == (name == "far")
            if name == "far":  # the lower one is not flat on its scale
                assert all(max(y for y in drawn(axes)["lru"] if y) > 0.5 * axes.get_ylim()[1] for axes in figure.axes)


@every(
    "highest, labels",
    [
        (0.62, ["0%", "20%", "40%", "60%"]),
        (0.88, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (1.0, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.031, ["0%", "1%", "2%", "3%"]),
        (0.0004, ["0%", "0.01%", "0.02%", "0.03%", "0.04%"]),
    ],
)
def test_percent_axes_have_round_ticks(highest: float, labels: list[str]) -> None:
    cells = [{"layer": layer, "misses": 10_000, "collisions": round(highest * 10_000 * layer)} for layer in (0, 1)]
    twice = pl.concat([by_hand({}, cells, capacity=f"{at}%") for at in (5, 25)])
    axes = draw("collisions_by_layer", twice).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert axes.get_ylim()[1] >= highest


def test_a_wide_range_of_capacities_is_logarithmic() -> None:
    wide = frame_of(small_trace(), eviction=["lru"], capacity=["5%", "60%"])
    for name in ("hit_rate_by_capacity", "ttft_by_capacity", "tpot_by_capacity"):
        figure = draw(name, wide)
        axes = figure.axes[0]
        assert (axes.get_xscale(), [label.get_text() for label in axes.get_xticklabels()]) == ("log", ["5%", "60%"])
        assert "capacity (log)" in texts(figure)


def test_an_axis_says_that_it_is_logarithmic_only_where_it_is(frame: pl.DataFrame) -> None:
    for name in FIGURES:
        figure = draw(name, frame)
        logarithmic = any("log" in (axes.get_xscale(), axes.get_yscale()) for axes in figure.axes)
        assert logarithmic == any("(log)" in text for text in texts(figure)), name


def test_what_has_one_phase_only_leaves_the_figures_of_the_other_out() -> None:
    times = {"prefill": {"ttft_ns": 5}, "decode": {"decode_ns": 5, "decode_tokens": 1}}
    rows = {
        phase: pl.concat(
            renamed(
                by_hand({}, [{"layer": 0, "phase": phase, "misses": 2, "collisions": 1}], [time], capacity=f"{at}%"),
                "lru",
            )
            for at in (5, 25)
        )
        for phase, time in times.items()
    }
    assert {name: why.partition(";")[0] for name, why in draw_all(rows["prefill"]).left_out.items()} == {
        "collisions_by_layer": "no pass decodes",
        "tpot_by_capacity": "no TPOT: no pass decodes",
    }
    assert {name: why.partition(";")[0] for name, why in draw_all(rows["decode"]).left_out.items()} == {
        "collisions_in_prefill": "no pass is a prompt's",
        "ttft_by_capacity": "no TTFT: no request has a prompt",
    }


def test_prompts_without_a_collision_have_no_figure_of_zeros() -> None:
    layer = {"layer": 0, "phase": "prefill", "misses": 2, "collisions": 0}
    rows = renamed(by_hand({}, [layer], [{"ttft_ns": 5}], capacity="5%"), "lru")
    assert "collision" in draw_all(rows).left_out["collisions_in_prefill"]
