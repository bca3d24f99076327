"""Figures: what is drawn equals the counters, looks are stable, files are the same bytes from run to run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import matplotlib
import polars as pl
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from moereplay import policies
from moereplay.analysis.figures.catalogue import FIGURES, chart, draw, draw_all, on_page, save
from moereplay.analysis.figures.chart import Axis, Chart, Panel, Point, Series
from moereplay.analysis.figures.drawing import rendered, styled
from moereplay.analysis.figures.facets import OMITTED_AT
from moereplay.analysis.metrics import measured
from moereplay.analysis.palette import KNOWN, Look, look_of, looks
from moereplay.results.errors import ResultError
from moereplay.results.files import to_frame
from moereplay.results.read import layers, only, runs
from moereplay.results.result import Row
from moereplay.results.stored import load
from moereplay.simulator.config import ReplayConfig
from moereplay.traces.schema import Geometry
from tests.kit.drawn import drawn, legend, note, renamed, texts
from tests.kit.every import every
from tests.kit.tiny_runs import EVICTIONS, by_hand, frame_of, replayed, small_trace, written_to


def refusal(name: str, frame: pl.DataFrame, **options: str) -> str:
    with pytest.raises(ResultError) as caught:
        draw(name, frame, None, None, None, **options)
    return str(caught.value)


# Looks


def test_every_eviction_policy_has_a_look_of_its_own() -> None:
    assert len(set(looks(policies.NAMES["eviction"]).values())) == len(policies.NAMES["eviction"])
    assert len({look.colour for look in KNOWN.values()}) == len(KNOWN)


def test_a_look_depends_on_the_name_alone() -> None:
    assert looks(["lru", "belady"])["lru"] == looks(["arc", "lru", "fifo"])["lru"] == KNOWN["lru"]
    # the hash fallback, pinned: it must not follow Python's own hash, which changes from process to process
    assert look_of("my_policy") == Look("#228833", (3, 1, 0))


def test_variants_keep_the_marker_and_change_the_line() -> None:
    plain, variant = KNOWN["least_stale"], look_of("least_stale:order=a")
    assert (variant.marker, variant.dash != plain.dash) == (plain.marker, True)
    assert variant == looks(["least_stale", "least_stale:order=a"])["least_stale:order=a"]


def test_many_variants_of_a_policy_stay_distinct() -> None:
    names = ["lfu", *(f"lfu:count={number}" for number in range(15))]
    assert len(set(looks(names).values())) == len(names)


def test_legends_follow_the_order_of_the_catalogue() -> None:
    assert list(looks(["zebra", "belady", "lru:x=1", "lru"])) == ["lru", "lru:x=1", "belady", "zebra"]


# Contents


def test_collisions_of_one_phase_per_access(single: pl.DataFrame) -> None:
    (axes,) = draw("collisions_by_layer", single, per="access").axes
    cells = layers(single).filter(pl.col("phase") == "decode", pl.col("eviction") == "lru").sort("layer")
    assert drawn(axes)["lru"] == (cells["collisions"] / cells["accesses"]).to_list()
    assert sum(drawn(axes)["lru"]) > 0


def test_a_layer_without_misses_is_a_gap() -> None:
    cells = [{"layer": 0, "misses": 4, "collisions": 1}, {"layer": 1}, {"layer": 2, "misses": 2}]
    (axes,) = draw("collisions_by_layer", by_hand({}, cells)).axes
    first, gap, last = drawn(axes)["lru"]
    assert (first, last) == (0.25, 0.0)
    assert gap != gap  # not a number


def test_misses_are_stacked_as_counted(single: pl.DataFrame) -> None:
    (axes,) = draw("misses", single).axes
    counted = runs(single).row(0, named=True)
    at = [label.get_text() for label in axes.get_yticklabels()].index(counted["eviction"])
    reasons = ("compulsory", "capacity_misses", "collisions")
    widths = [bars[0].get_width() for bars in axes.containers[3 * at : 3 * at + 3]]
    assert widths == [counted[reason] for reason in reasons]
    assert f"{counted['misses']:,}" in [text.get_text() for text in axes.texts]


def test_the_bound_stands_at_belady_s_misses(single: pl.DataFrame) -> None:
    (axes,) = draw("misses", single).axes
    bound = runs(single).row(0, named=True)
    assert axes.get_lines()[0].get_xdata() == [bound["bound_accesses"] - bound["bound_belady_hits"]] * 2


def test_hit_rates_and_both_bounds_are_drawn_as_counted(frame: pl.DataFrame) -> None:
    without = only(frame, prefetch="none")
    (axes,) = draw("hit_rate_by_capacity", without).axes
    table = measured(without).sort("capacity")
    lines = drawn(axes)
    for name in EVICTIONS:
        assert lines[name] == table.filter(pl.col("eviction") == name)["hit_rate"].to_list()
    lru = table.filter(pl.col("eviction") == "lru")
    assert lines["Belady (no prefetch)"] == lru["belady_hit_rate"].to_list() == lines["belady"]
    assert lines["compulsory limit"] == lru["compulsory_limit"].to_list()


def test_without_bounds_none_are_drawn() -> None:
    results, _ = replayed(small_trace(), eviction=["lru"], capacity=["25%", "50%"])
    unbounded = to_frame(results, [None, None])
    assert legend(draw("hit_rate_by_capacity", unbounded)) == ["lru"]
    assert legend(draw("misses", unbounded)) == ["compulsory", "capacity", "collision"]


#: Words of a caption, and the name of what they explain in the legend.
EXPLAINED = {
    "Compulsory limit:": "compulsory limit",
    "Compulsory:": "compulsory",
    "Collisions:": "collision",
    "Capacity: the other misses": "capacity",
}


@every(
    "how",
    [
        {"eviction": ["lru", "fifo"], "capacity": ["25%", "50%"]},
        {"eviction": ["lru"], "capacity": ["25%", "50%"], "passes": ["batch:2"], "arrivals": ["poisson:900"]},
        {"eviction": ["lru"], "capacity": ["100%"]},
    ],
)
def test_a_caption_explains_what_is_drawn_and_nothing_else(how: dict[str, list[str]]) -> None:
    """With arrivals there is no limit, and where every expert fits no miss is for want of room."""
    rows = frame_of(small_trace(), **how)
    for name in ("hit_rate_by_capacity", "misses", "collisions_by_layer"):
        if name == "hit_rate_by_capacity" and len(how["capacity"]) == 1:
            continue  # one capacity makes no curve
        made = chart(name, rows)
        entries = [entry.name for entry in made.legend]
        points = [point for _, _, panel in made.cells() for each in panel.series for point in each.points]
        bars = [bar for _, _, panel in made.cells() for bar in panel.bars]
        for words, explained in EXPLAINED.items():
            if name != "collisions_by_layer":
                assert (words in made.note) == (explained in entries), (name, words)
        assert ("have no point" in made.note) == any(point.y is None for point in points), name
        assert ("Bars:" in made.note) == any(each.low is not None for each in (*points, *bars)), name


# Pages


def test_capacities_are_columns_and_settings_are_rows(frame: pl.DataFrame) -> None:
    figure = draw("collisions_by_layer", frame)
    assert len(figure.axes) == 4
    assert {"capacity 25%", "capacity 50%", "prefetch none", "prefetch top_k"} <= set(texts(figure))
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert len(draw("hit_rate_by_capacity", frame).axes) == 2


@every("name", FIGURES)
def test_every_figure_says_what_it_was_made_from(frame: pl.DataFrame, name: str) -> None:
    title, *others = texts(draw(name, only(frame, prefetch="top_k")))
    subtitle = " ".join(others)
    assert len(title) > 10 and "SIMULATED, synthetic routing" in others
    for fact in ("synthetic-markov", f"trace {runs(frame)['trace'][0][:8]}", "platform a100-5gbps", "contract atomic"):
        assert fact in subtitle
    assert "scope global" in subtitle and "reset never" not in subtitle


@pytest.mark.slow
def test_open_loop_results_are_labelled() -> None:
    figure = draw("misses", frame_of(small_trace(), eviction=["lru"], miss=["drop"], capacity=["25%"]))
    assert "SIMULATED, open-loop, synthetic routing" in texts(figure)


def test_unusual_settings_are_told_and_the_usual_ones_are_the_defaults() -> None:
    assert ReplayConfig().model_dump(include=set(OMITTED_AT)) == OMITTED_AT | {
        "warm": (),
        "profile": (),
        "resident": (),
    }
    figure = draw("misses", frame_of(small_trace(), eviction=["lru"], reset=["request"], capacity=["25%"]))
    assert any("reset request" in text for text in texts(figure))


def test_lines_that_coincide_are_named_above_the_panel() -> None:
    # the last one drawn hides the other
    cells = [{"layer": layer, "misses": 4, "collisions": layer} for layer in range(3)]
    twins = pl.concat([by_hand({}, cells, eviction=name) for name in ("fifo", "lru")])
    (axes,) = draw("collisions_by_layer", twins).axes
    assert [text.get_text() for text in axes.texts] == ["lru = fifo"]
    # 50.1 % in place of 50 % is less than a line is thick, 52 % is not; the axis ends at 50 %
    for misses, said in ((1000, "lru = fifo"), (998, "lru ≈ fifo"), (960, "")):
        near = [{"layer": layer, "misses": 1000, "collisions": 500} for layer in range(3)]
        moved = [near[0], {"layer": 1, "misses": misses, "collisions": 500}, near[2]]
        pair = pl.concat([by_hand({}, near, eviction="fifo"), by_hand({}, moved, eviction="lru")])
        (axes,) = draw("collisions_by_layer", pair).axes
        assert [text.get_text() for text in axes.texts] == [said]


TIMED = [{"ttft_ns": 3_000_000, "decode_ns": 9_000_000, "decode_tokens": 4}]  #: a request with a first token, and more


def both_phases(cells: list[Row]) -> list[Row]:
    return [cell | {"phase": phase} for cell in cells for phase in ("prefill", "decode")]


@cache
def many() -> pl.DataFrame:
    """As many lines as a page holds, 35 policies and variants, over 61 layers, four capacities."""
    names = [*policies.NAMES["eviction"], *(f"cascade{number}" for number in range(11))][:35]
    cells = both_phases([{"layer": layer, "misses": 7 + layer, "collisions": layer % 5} for layer in range(61)])
    base = pl.concat([by_hand({"misses": 99, "capacity": 99}, cells, TIMED, capacity=f"{c}%") for c in (1, 5, 25, 50)])
    return pl.concat([renamed(base, name) for name in names])


@cache
def tiny() -> pl.DataFrame:
    """One layer, one policy."""
    geometry = Geometry(layers=1, experts=8, k=2, expert_bytes=(10,))
    return frame_of(small_trace(geometry), eviction=["fifo"], capacity=["25%", "50%"])


def outside(text: Text, figure: Figure) -> bool:
    box, page = text.get_window_extent(), figure.bbox
    return box.x0 < 0 or box.y0 < 0 or box.x1 > page.x1 or box.y1 > page.y1


def overlapping(boxes: list[Bbox]) -> int:
    return sum(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])


@cache
def several() -> pl.DataFrame:
    """Two settings with long names, two capacities, and lines that coincide."""
    cells = both_phases([{"layer": layer, "misses": 4, "collisions": layer} for layer in range(3)])
    settings = product(("none", "score:percentile=85:pool=running"), ("25%", "50%"), ("lru", "least_stale:order=a"))
    made = [
        by_hand({"misses": 4}, cells, TIMED, prefetch=p, capacity=c, eviction=e, miss="drop") for p, c, e in settings
    ]
    return pl.concat(made).with_columns(
        pl.col("about").struct.with_fields(capacity_forms=pl.col("config").struct.field("capacity"))
    )


@pytest.mark.parametrize("made", [pytest.param(many, marks=pytest.mark.long), tiny, several])
@every("name, width", product(FIGURES, (None, 3.3)))
def test_texts_stay_on_the_page_and_off_each_other(
    name: str, width: float | None, made: Callable[[], pl.DataFrame]
) -> None:
    if (name, made) == ("collisions_in_prefill", tiny):
        return  # which has no collision
    with on_page(width), styled():
        figure = draw(name, made())
        figure.draw_without_rendering()
    shown = [text for text in figure.texts if text.get_text()]
    assert not [text.get_text() for text in shown if outside(text, figure)]
    blocks = [text.get_window_extent() for text in (*shown, figure.legends[0])]
    panels = [box for axes in figure.axes if (box := axes.get_tightbbox()) is not None]
    assert (overlapping(blocks + panels), len(panels)) == (0, len(figure.axes))


def test_bars_of_many_layers_lie_within_their_layer_and_no_label_names_another() -> None:
    points = [Point(layer, 0.5, 0.4, 0.6) for layer in range(48)]
    series = [Series(name, look, points) for name, look in looks(["lru", "lfu", "fifo", "arc", "random"]).items()]
    with on_page(3.3), styled():
        figure = rendered(Chart("layers", x=Axis("layer", "whole"), y=Axis(zero=True), panels=[[Panel(series)]]))
        figure.draw_without_rendering()
    (axes,) = figure.axes
    across = axes.transData.inverted()
    bars = [each for each in axes.collections if isinstance(each, LineCollection)]
    moved = [
        [across.transform(bar.get_transform().transform(line[0]))[0] for line in bar.get_segments()] for bar in bars
    ]
    assert len(moved) == 5 and moved[0][0] < moved[-1][0]
    assert all(abs(x - layer) < 0.5 for line in moved for layer, x in enumerate(line))
    low, high = axes.get_xlim()
    assert max(tick for tick in axes.get_xticks() if low <= tick <= high) < 48


# Refusals


def test_an_unknown_figure_or_option_suggests_the_nearest(single: pl.DataFrame) -> None:
    assert refusal("mises", single) == "unknown figure 'mises': did you mean misses?"
    assert refusal("misses", single, phase="decode").startswith("unknown option of misses 'phase'")
    answer = refusal("collisions_by_layer", single, phase="decoding")
    assert answer == "unknown value of collisions_by_layer's phase 'decoding': did you mean decode?"


@pytest.mark.slow
def test_without_names_all_that_can_be_drawn_is_drawn(frame: pl.DataFrame, single: pl.DataFrame) -> None:
    assert draw_all(frame).left_out == {}
    assert tuple(name for name, _ in draw_all(frame).figures) == tuple(FIGURES)
    few = draw_all(single)
    assert [name for name, _ in few.figures] == ["collisions_by_layer", "collisions_in_prefill", "misses"]
    reason = "needs two capacities or more, found 25%; replay several, for example --capacity 1%,5%,25%"
    assert few.left_out == {f"{name}_by_capacity": reason for name in ("hit_rate", "complete", "ttft", "tpot")}
    assert [name for name, _ in draw_all(frame, ["misses"]).figures] == ["misses"]


def test_a_figure_asked_for_by_name_is_never_left_out(single: pl.DataFrame) -> None:
    with pytest.raises(ResultError, match="needs two capacities"):
        draw_all(single, ["misses", "hit_rate_by_capacity"])
    with pytest.raises(ResultError, match="has no results to draw"):
        draw_all(single.clear())


def test_one_capacity_makes_no_curve(single: pl.DataFrame) -> None:
    answer = refusal("hit_rate_by_capacity", single)
    assert answer == (
        "hit_rate_by_capacity needs two capacities or more, found 25%; replay several, for example --capacity 1%,5%,25%"
    )


def test_no_misses_make_no_collisions(single: pl.DataFrame) -> None:
    answer = refusal("collisions_by_layer", by_hand({}, [{"layer": 0}]))
    assert answer.startswith("collisions_per_miss is undefined in every layer (decode): there are no misses; replay a")
    assert refusal("misses", single.clear()) == "misses has no results to draw; load a folder of results first"


def test_more_panels_than_a_page_holds_are_refused_with_a_way_out() -> None:
    rows = pl.concat([by_hand({}, seed=str(seed)) for seed in range(9)])
    assert refusal("misses", rows).startswith(
        "9 combinations of seed do not fit a page of 8 rows; choose fewer, for example --where seed=0"
    )


def test_of_more_capacities_than_a_page_has_columns_the_ends_and_some_between_are_drawn() -> None:
    columns = pl.concat([by_hand({}, capacity=f"{percent}%") for percent in range(11, 21)])
    figure = draw("misses", columns)
    assert len(figure.axes) == 6
    shown = [text for text in texts(figure) if text.startswith("capacity ")]
    assert shown[0] == "capacity 11%" and shown[-1] == "capacity 20%"
    assert "6 of 10 capacities are drawn; --where capacity=... chooses others." in note(figure)


# Files

PROGRAM = """
import sys
from pathlib import Path
from moereplay.analysis.figures.catalogue import FIGURES, chart, draw, draw_all, save
from moereplay.analysis.figures.drawing import save
from moereplay.results.stored import load
frame = load(Path(sys.argv[1]))
for name, figure in draw_all(frame).figures:
    save(figure, Path(sys.argv[2]) / name)
"""


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    written_to(tmp_path / "results", *replayed(small_trace(), eviction=["lru", "fifo"], capacity=["25%", "50%"]))
    root = Path(__file__).resolve().parents[2]
    for name, figure in draw_all(load(tmp_path / "results")).figures:
        save(figure, tmp_path / "one" / name)
    arguments = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "results"), str(tmp_path / "two")]
    # another hash seed, and a user's own matplotlib settings, must not show
    (tmp_path / "rc").write_text("font.size: 12\n")
    environment = {"PYTHONPATH": str(root), "PYTHONHASHSEED": "2", "MATPLOTLIBRC": str(tmp_path / "rc")}
    subprocess.run(arguments, check=True, env=environment)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert set(digests(tmp_path / "one")) == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}


def test_files_carry_no_date_and_no_version(single: pl.DataFrame, tmp_path: Path) -> None:
    png, svg = save(draw("misses", single), tmp_path / "figures" / "misses.v1")
    assert (png.name, svg.name) == ("misses.v1.png", "misses.v1.svg")
    assert png.read_bytes().startswith(b"\x89PNG") and b"Software" not in png.read_bytes()
    assert "<dc:date>" not in svg.read_text() and matplotlib.__version__ not in svg.read_text()


def test_what_cannot_be_written_leaves_nothing_behind(single: pl.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "misses.png").mkdir()
    with pytest.raises(ResultError, match=r"^cannot write .*misses.png: .*; choose another folder$"):
        save(draw("misses", single), tmp_path / "misses")
    assert [path.name for path in tmp_path.iterdir()] == ["misses.png"]


def test_a_file_in_place_of_the_folder_is_one_line(single: pl.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultError, match=r"^cannot write .*misses.png: .*; choose another folder$"):
        save(draw("misses", single), tmp_path / "file" / "misses")


def test_drawing_leaves_the_settings_of_matplotlib_alone(single: pl.DataFrame) -> None:
    before = dict(matplotlib.rcParams)
    draw("misses", single)
    assert dict(matplotlib.rcParams) == before
