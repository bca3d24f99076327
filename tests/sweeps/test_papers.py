"""Papers' figures: each is listed, published numbers are those that were printed, and what is refused is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.results.errors import ResultError
from moereplay.sweeps.papers import (
    ORACLE,
    PAPERS,
    Cells,
    LackingError,
    PaperFigure,
    Published,
    facts,
    figures_of,
    of_model,
    planned,
    predictor,
)
from moereplay.traces.files import bundled
from moereplay.traces.recorder import from_arrays
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.tiny_runs import SMALL, small_trace

EVERY = [(paper, figure) for paper in PAPERS for figure in figures_of(paper)]
#: SpecMD (arXiv 2602.03921), Table 2: by how many percent Least-Stale is faster, as printed.
TABLE_2 = {
    "olmoe-1b-7b": [10.7, 34.7, 17.7, 13.8],
    "mixtral-8x7b": [17.8, 9.8, 25.7, 17.5],
    "phi-3.5-moe": [14.8, -4.3, 44.1, 24.6],
    "qwen1.5-moe-a2.7b": [7.8, 4.3, 18.4, 23.0],
}
#: What each figure without a table says of what is published: section or table, series, range.
PRINTED = {
    ("specmd", "collisions"): [
        ("§5.2, at 5 %", "least_stale", 0.016, 0.019),
        ("§5.2, at 5 %", "lru", 0.045, 0.126),
        ("§5.2, at 5 %", "score", 0.426, 0.609),
    ],
    ("specmd", "hit_rate"): [("abstract and §5.2, at 5 %", "least_stale", 0.88, 0.92)],
    ("specmd", "collisions_by_layer"): [  # of both, says the text on Fig. 5
        ("Fig. 5, deep layers of OLMoE at 1 %", "lru", 0.08, 0.12),
        ("Fig. 5, deep layers of OLMoE at 1 %", "score", 0.08, 0.12),
    ],
    ("cache-conditional", "device"): [  # up to 2 times; as lambda is not said, beside each
        ("abstract: up to 2 times, lambda not said", f"cache_prior lam={lam}", 1, 2) for lam in (0.1, 0.2, 0.5)
    ],
}


@every("paper, figure", EVERY)
def test_every_figure_says_where_it_is_from_and_stands_in_its_own_grid(paper: str, figure: PaperFigure) -> None:
    """A published number beside no cell would never be seen; those of another grid stand beside a series of it."""
    assert figure.where and figure.title
    assert figure.assumed or figure.throughout
    cells = planned(figure, open_trace(bundled(Path("miniature")))).cells
    series = {(cell.panel, cell.series) for cell in cells} | {(cell.panel, "belady") for cell in cells}
    columns = {*figure.chart.values, *figure.chart.drawn, figure.chart.x}
    for number in figure.published:
        assert (number.panel, number.series) in series and number.value in columns, number
        assert 0 <= number.low <= number.high and number.source


def table(name: str) -> PaperFigure:
    return figures_of("specmd", name)[0]


def times() -> dict[str, list[tuple[float, float]]]:
    """Table 2: TTFT in ms of each configuration as it is and with Least-Stale, by model."""
    return {
        numbers.model: [(before, after) for _, before, after in numbers.quotients]
        for numbers in table("table_2").entry.published
    }


def test_table_1_has_the_printed_numbers() -> None:
    found = {(each.model, each.x, each.value): each.low for each in table("table_1").published}
    assert len(found) == 4 * 6 * 2
    assert found["olmoe-1b-7b", "baseline", "ttft_mean_ms"] == 3166
    assert found["mixtral-8x7b", "#5", "tokens_per_s"] == 1.42
    assert found["phi-3.5-moe", "#3", "ttft_mean_ms"] == 3459
    assert found["qwen1.5-moe-a2.7b", "#4", "tokens_per_s"] == 3.50


def test_both_tables_of_specmd_print_the_same_times() -> None:
    """Table 2's times before a change are those of Table 1, rounded."""
    first = {(each.model, each.x): each.low for each in table("table_1").published if each.value == "ttft_mean_ms"}
    for model, pairs in times().items():
        assert [round(before) for before, _ in pairs] == [first[model, f"#{number}"] for number in range(1, 5)]


def test_published_times_give_the_published_percentages() -> None:
    """The table prints both; one copied wrongly would differ."""
    found = {
        model: [round(100 * (1 - after / before), 1) for before, after in pairs] for model, pairs in times().items()
    }
    assert found == TABLE_2
    ratios = {(each.model, each.x): each.low for each in table("table_2").published}
    assert ratios["phi-3.5-moe", "Zhu"] == pytest.approx(1987.6 / 1905.6) and len(ratios) == 16


@every("place", PRINTED)
def test_other_published_numbers_are_those_of_the_paper(place: tuple[str, str]) -> None:
    (figure,) = figures_of(*place)
    found = dict.fromkeys((mark.source, mark.series, mark.low, mark.high) for mark in figure.published)
    assert [*found] == PRINTED[place]  # each beside every reading that is drawn


def test_a_model_has_its_own_numbers_and_others_the_range_over_all() -> None:
    every = [Published("v", low, low, "s", "x", "T", model=model) for model, low in (("a-1b", 1.0), ("b-2b", 3.0))]
    assert [(each.low, each.high, each.model) for each in of_model(every, "org/A-1B")] == [(1, 1, "a-1b")]
    assert [(each.low, each.high, each.model) for each in of_model(every, "other")] == [(1, 3, "2 models")]


def test_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ResultError, match=r"'specmdd'.*specmd"):
        figures_of("specmdd")
    with pytest.raises(ResultError, match=r"specmd.*'colision'.*collisions"):
        figures_of("specmd", "colision")


def ids_alone() -> Trace:
    return from_arrays(np.tile(np.arange(2), (6, 4, 1)), SMALL)


def test_a_trace_of_ids_alone_lacks_what_it_lacks() -> None:
    trace = ids_alone()
    assert facts(trace, "recorded") == {"ids", "decode"}
    prompts = small_trace(tokens=0, prompt=12)  # under decode:8 its last 4 tokens are decoded, one per pass
    found = {each: facts(prompts, each) & {"prompts", "decode"} for each in ("token", "decode:8", "batch:2")}
    assert found == {"token": {"prompts"}, "decode:8": {"prompts", "decode"}, "batch:2": {"prompts"}}
    (figure,) = figures_of("specmd", "miss_handling")
    with pytest.raises(LackingError, match=r"requires decode.* --passes decode:N"):
        planned(figure, prompts)
    assert {cell.config.passes for cell in planned(figure, prompts, {"passes": "decode:8"}).cells} == {"decode:8"}
    assert predictor(trace) == ORACLE
    assert predictor(small_trace()) == "top_k"
    (overfetch,) = figures_of("specmd", "overfetch")
    with pytest.raises(LackingError, match=r"lookahead, .*trace lacks.* --look-ahead 1"):
        planned(overfetch, trace)


def test_a_cell_that_a_trace_does_not_allow_is_left_out_with_the_reason() -> None:
    trace = ids_alone()
    whole = table("collisions")
    figure = PaperFigure(whole.paper, whole.entry.model_copy(update={"panels": False}))
    found = planned(figure, trace)
    assert "lru" in {cell.series for cell in found.cells} and "score" not in {cell.series for cell in found.cells}
    assert "needs weights" in found.left_out["score"]
    alone = figure.entry.model_copy(update={"cells": [Cells(series="score", set={"eviction": "score"})]})
    with pytest.raises(LackingError, match="needs weights"):
        planned(PaperFigure(figure.paper, alone), trace)
