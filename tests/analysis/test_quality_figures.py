"""Figures of `quality`: what is on the front, which families have a parameter, and what is refused with a remedy."""

from __future__ import annotations

import polars as pl
import pytest

from moereplay.analysis.figures.catalogue import draw, draw_all
from moereplay.analysis.figures.quality import Outcome, families_of, front
from moereplay.analysis.quality import leading, order_of, shown, tables
from moereplay.results.errors import ResultError
from tests.kit.quality_rows import TASK, changed, quality_frame

SETS = {
    "lru": (changed(0, 0, 0), {"eviction": "lru"}),
    "prior routing=cache_prior:lam=.1": (changed(0.01, 0.01, 0), {"routing": "cache_prior:lam=.1"}),
    "prior routing=cache_prior:lam=.5": (changed(0.1, 0.1, 0), {"routing": "cache_prior:lam=.5"}),
    "drop": (changed(0.1, 0, 0.1), {"miss": "drop"}),
}


def frame() -> pl.DataFrame:
    """Counters of runs that never were, with misses of their own."""
    made = quality_frame(SETS, {"nll": lambda change: change.variation, "kl": lambda change: change.variation / 2})
    counted = {"accesses": 100, "hits": 60, "misses": 40, "decode_ns": 10**9, "decode_passes": 100}
    rows = [row | {"live": row["replayed"] and row["replayed"] | counted} for row in made.to_dicts()]
    return pl.DataFrame(rows, schema=made.schema)


def test_a_point_is_on_the_front_if_no_other_beats_it_in_both() -> None:
    points = [Outcome("a", x, loss, 0) for x, loss in ((0.1, 5), (0.2, 3), (0.3, 4), (0.4, 1), (0.4, 2))]
    assert [(each.x, each.loss) for each in front(points, more_is_better=False)] == [(0.1, 5), (0.2, 3), (0.4, 1)]
    assert [(each.x, each.loss) for each in front(points, more_is_better=True)] == [(0.4, 1)]


def test_the_order_of_mass_changed_stands_beside_the_order_of_kl() -> None:
    """Ranks 1, 2, 3.5, 3.5 of 0, .01, .1, .1 against 1, 2, 3, 4 of KL: 4.5 / sqrt(4.5 * 5) = .949."""
    rows = tables(frame())[TASK]
    assert [row["mass changed"] for row in rows] == [None, 0, *(pytest.approx(share) for share in (0.01, 0.1, 0.1))]
    assert order_of(frame(), TASK) == "mass changed, of the replays: rank correlation with kl 0.95, 4 sets"
    alike = frame().filter(pl.col("set").is_in(["unmodified", "lru"]))
    assert order_of(alike, TASK) == ""


def test_every_figure_of_quality_is_drawn_or_says_why_not() -> None:
    drawn = draw_all(frame())
    assert {"quality_by_miss_rate", "quality_by_speed", "quality_by_parameter"} <= {name for name, _ in drawn.figures}


def test_a_family_has_the_number_that_its_list_varies() -> None:
    (family,) = families_of(frame())
    assert (family.name, family.parameter) == ("prior", "lam")
    assert [point.x for point in family.points] == [0.1, 0.5]
    assert [point.loss for point in family.points] == pytest.approx([0.01, 0.1], abs=0.02)
    assert [point.misses for point in family.points] == [0.4, 0.4]


def test_without_a_family_the_remedy_is_named() -> None:
    alone = frame().filter(~pl.col("set").str.starts_with("prior"))
    with pytest.raises(ResultError, match="quality --study lambda"):
        draw("quality_by_parameter", alone)


def test_without_times_there_is_no_speed() -> None:
    untimed = frame().with_columns(pl.lit(None, frame().schema["live"]).alias("live"))
    with pytest.raises(ResultError, match="no task has examples and tokens/s"):
        draw("quality_by_speed", untimed)


def test_a_task_is_judged_by_a_measure_that_varies() -> None:
    made = frame()
    (task,) = made["task"].unique()
    assert leading(made, task) == "nll"


def test_names_of_sets_are_short_in_tables() -> None:
    assert shown("lru") == "lru"
    assert shown("prior routing=max_rank:m=6") == "prior max_rank:m=6"
    assert shown("max_rank routing=max_rank:m=6") == "max_rank:m=6"
    assert shown("both routing=max_rank miss=drop") == "both max_rank drop"
