"""Forecasts fitted to live points of known truth: values, intervals and refusals."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isfinite
from statistics import median

import numpy as np
import polars as pl
import pytest

from moereplay.analysis.forecast import Forecast, by_policy, coverage, forecast, in_words, shown, signal, with_forecasts
from moereplay.analysis.forecast_fit import (
    NOTHING,
    Change,
    Form,
    Point,
    best_form,
    change_of,
    distance,
    distances,
    fitted,
    leave_out,
    moved,
    policy_of,
    reach_of,
    stored_bits,
    tiers_of,
)
from moereplay.analysis.quality import judged
from moereplay.results.errors import ResultError
from tests.kit.every import every
from tests.kit.quality_rows import ASSIGNMENTS, MASS, TASK, Loss, changed, counters_of, quality_frame

#: Settings of sets by the kind of change that they make.
SETTINGS = {
    "cache_prior": {"routing": "cache_prior:lam={}"},
    "cumulative": {"routing": "cumulative:p={}"},
    "drop_below": {"miss": "drop_below:f={}"},
    "substitute": {"miss": "substitute:tolerance={}"},
}
MIXED = ("cache_prior", "cumulative", "substitute")


def truth(change: Change) -> float:
    """Variation and dropping carry all of it."""
    return 0.5 * change.variation + 0.2 * change.dropping


def drawn_changes(count: int, seed: int = 1) -> list[tuple[str, Change]]:
    """Policies in turn, and changes such as theirs from slight to harsh."""
    drawn, made = np.random.default_rng(seed), []
    for at in range(count):
        policy = [*SETTINGS][at % len(SETTINGS)]
        share, ranks = float(drawn.uniform(0.02, 0.4)), float(drawn.uniform(0, 3))
        mixed = changed(share, share * float(drawn.uniform(0.8, 1.2)), 0.0, ranks, 0.0)
        made.append((policy, mixed if policy in MIXED else changed(share / 2, 0.0, share, 0.0, 0.0)))
    return made


def sets_of(changes: list[tuple[str, Change]]) -> dict[str, tuple[Change, dict[str, str]]]:
    """A policy set for each, at a strength of its own."""
    return {
        f"{policy} {at}": (change, {kind: text.format(f"0.{at:02}1") for kind, text in SETTINGS[policy].items()})
        for at, (policy, change) in enumerate(changes)
    }


def frame_of(count: int = 24, loss: Loss = truth, noise: float = 0.0005) -> pl.DataFrame:
    return quality_frame(sets_of(drawn_changes(count)), {"nll": loss, "kl": loss}, noise)


def points_of(count: int, seed: int, spread: float) -> list[Point]:
    """Points whose loss strays from the truth by a factor, lognormal."""
    drawn = np.random.default_rng(seed)
    changes = drawn_changes(count, seed)
    strayed = [truth(change) * exp(spread * drawn.standard_normal()) for _, change in changes]
    return [Point(str(at), *each, strayed[at], 0.001) for at, each in enumerate(changes)]


@pytest.fixture(scope="module")
def made() -> Forecast:
    return forecast(frame_of())


# The fit


def test_weights_are_found_again(made: Forecast):
    assert made.fit.form.power == 1
    assert made.fit.weights.variation == pytest.approx(0.5, rel=0.1)
    assert made.fit.weights.dropping == pytest.approx(0.2, rel=0.1)


def test_a_square_is_told_from_a_line():
    assert forecast(frame_of(loss=lambda change: change.variation**2)).fit.form.power == 2


def test_a_noisy_measure_goes_by_kl_times_a_factor():
    sets = sets_of(drawn_changes(24))
    clean = quality_frame(sets, {"kl": truth}, 0.0005)
    noisy = quality_frame(sets, {"nll": lambda change: 2 * truth(change)}, 0.05)
    both = clean.with_columns(
        pl.concat_list("measures", noisy["measures"].alias("more")),
        pl.concat_list("examples", noisy["examples"].alias("more")),
    )
    made = forecast(both)
    assert (made.measure, made.fit.form.through_kl) == ("nll", True)
    assert made.fit.weights.variation == pytest.approx(2 * 0.5, rel=0.2)
    assert made.fit.weights.dropping == pytest.approx(2 * 0.2, rel=0.2)


def test_new_sets_are_forecast(made: Forecast):
    for _, change in drawn_changes(40, seed=2):
        if made.fit.refusal(change) is None:
            assert made.at(change).loss == pytest.approx(truth(change), rel=0.1, abs=0.001)


def test_no_change_costs_nothing_for_certain(made: Forecast):
    assert made.at(NOTHING)[:3] == (0, 0, 0)


def test_more_of_a_change_never_costs_less(made: Forecast):
    drawn = np.random.default_rng(3)
    for _ in range(100):
        harsh = Change(*(most * share for most, share in zip(made.fit.most, drawn.uniform(size=6), strict=True)))
        slight = Change(*(value * share for value, share in zip(harsh, drawn.uniform(size=6), strict=True)))
        for less, more in zip(made.at(slight)[:3], made.at(harsh)[:3], strict=True):
            assert less is not None and more is not None and less <= more


def test_the_signal_is_where_it_was_put(made: Forecast):
    shares = {row["figure"]: row["share of the loss"] for row in signal(made)}
    assert shares["variation"] + shares["dropping"] == pytest.approx(1, abs=0.1)
    assert sum(shares.values()) == pytest.approx(1)


def test_losses_of_a_measure_of_which_more_is_better_are_turned_round():
    frame = frame_of(loss=lambda change: -truth(change))
    better = pl.element().struct.with_fields(pl.lit(True).alias("higher_is_better"))
    turned = forecast(frame.with_columns(pl.col("measures").list.eval(better)))
    assert turned.at(turned.points[0].change).loss == pytest.approx(truth(turned.points[0].change), rel=0.1)


# How sure it is


def test_intervals_hold_as_many_as_they_say():
    inside, asked = 0, 0
    for seed in range(8):
        points = points_of(24, seed, spread=0.3)
        form, left = best_form(points, 0.001)
        fit, reach = fitted(points, form, 0.001), reach_of(distances(left, 0.001))
        new = [each for each in points_of(40, seed + 100, spread=0.3) if fit.refusal(each.change) is None]
        inside += sum(distance(each.loss, fit.at(each.change), 0.001) <= reach for each in new)
        asked += len(new)
    assert asked > 200
    assert 0.84 <= inside / asked <= 0.97


def test_an_interval_has_its_ends_where_the_distance_says():
    assert distance(moved(0.03, 0.7, 0.001), 0.03, 0.001) == pytest.approx(0.7)
    assert moved(0.03, -0.7, 0.001) < 0.03 < moved(0.03, 0.7, 0.001)


@every("found, reach", [([1, 2, 3, 4, 5, 6, 7, 8, 9], 9), ([1] * 8, float("inf"))])
def test_nine_in_ten_need_nine_points(found: list[float], reach: float):
    assert reach_of(found) == reach


def test_a_policy_that_is_left_out_has_no_say_in_its_own_forecast():
    points = points_of(16, 1, spread=0.0)
    spoilt = [each._replace(loss=9.0) if each.policy == "cumulative" else each for each in points]
    for before, after in zip(leave_out(points, Form(1), 0.001), leave_out(spoilt, Form(1), 0.001), strict=True):
        if before.point.policy == "cumulative":
            assert before.by_others == after.by_others


def test_what_the_other_policies_do_not_reach_is_no_error(made: Forecast):
    """Of one policy alone anything is dropped."""
    rows = {row["policy"]: row for row in by_policy(made)}
    assert rows["drop_below"]["refused"] == rows["drop_below"]["points"] == 6
    assert rows["drop_below"]["error, policy left out"] is None
    assert rows["all"]["points"] == 24


def test_coverage_counts_what_is_refused(made: Forecast):
    held = coverage(made.points)
    assert held.asked + held.refused == 24
    assert held.refused >= 6
    assert f"{held.inside} of {held.asked} live points" in in_words(held)


def test_coverage_of_policies_that_share_nothing_is_unknown():
    changes = {
        "drop": changed(0, 0, 0.1, 0, 0),
        "swap": changed(0, 0.1, 0, 0, 0),
        "lowest_bit": changed(0, 0, 0, 0, 0.1),
    }
    alone = [Point(str(at), policy, change, 0.1, 0.01) for policy, change in changes.items() for at in range(4)]
    assert "none of 12 left-out points" in in_words(coverage(alone))


def test_coverage_leaves_nothing_of_a_policy_to_its_interval():
    """Neither its losses nor its errors: the noise of those of `cumulative` would widen every interval."""
    points = [each._replace(error=0.001 * (1 + at % 4 * at)) for at, each in enumerate(points_of(24, 3, 0.5))]
    inside = []
    for policy in SETTINGS:
        others = [each for each in points if each.policy != policy]
        noise = median(each.error for each in others)
        form, left = best_form(others, noise)
        fit, reach = fitted(others, form, noise), reach_of(distances(left, noise))
        own = [each for each in points if each.policy == policy and not fit.refusal(each.change)]
        inside += [distance(each.loss, fit.at(each.change), noise) <= reach for each in own]
    assert coverage(points)[:2] == (sum(inside), len(inside)) and inside


# What is refused


@every("value", (float("inf"), float("nan")))
def test_a_loss_that_overflowed_is_refused_by_its_set(value: float):
    """A change of KL that is infinite has no interval, and no warning of numpy's."""
    frame = frame_of()
    frame = frame.with_columns(overflowed(frame, frame["set"][1], value))
    (found,) = [each for each in judged(frame) if (each.set, each.measure) == (frame["set"][1], "kl")]
    assert (found.change is not None and not isfinite(found.change)) and found.off is None
    with pytest.raises(ResultError, match=f"kl loss of set {frame['set'][1]}: {value} .* wider --dtype"):
        forecast(frame)


def overflowed(frame: pl.DataFrame, name: str, value: float) -> pl.Series:
    """The examples, with KL of the first of a set replaced."""
    examples = frame["examples"].to_list()
    own = examples[frame["set"].to_list().index(name)]
    next(each for each in own if each["measure"] == "kl")["value"] = value
    return pl.Series("examples", examples, frame.schema["examples"])


def test_more_than_measured_is_refused_with_both_figures(made: Forecast):
    refusal = made.at(changed(9.0, 0.1, 0, 0, 0)).refusal
    assert refusal is not None
    assert refusal.kind == "more variation than measured"
    assert refusal.why == f"variation (variation / mass) is 9, and the live points reach {made.fit.most.variation:.4g}"


def test_a_kind_of_change_that_was_not_measured_is_refused(made: Forecast):
    refusal = made.of(counters_of(changed(0.1, 0.1, 0, 0, 0)), "lowest_bit:bits=4", "miniature").refusal
    assert refusal is not None
    assert refusal.kind == "no rounding was measured"
    assert refusal.why.endswith("is 0.004444, and no live point has any")


def test_another_model_is_refused(made: Forecast):
    refusal = made.of(counters_of(NOTHING), "fetch:bits=0", "mixtral").refusal
    assert refusal == ("another model", "the trace is of mixtral, the live points are of miniature")


def test_a_trace_without_gate_weights_is_refused(made: Forecast):
    refusal = made.of(counters_of(NOTHING) | {"mass": 0}, "fetch:bits=0", "miniature").refusal
    assert refusal is not None and refusal.kind == "no gate weights"


def test_few_points_are_refused():
    with pytest.raises(ResultError, match=r"8 live points of 4 policies .*; a forecast needs 9 of 3: add sets"):
        forecast(frame_of(8))


def test_few_policies_are_refused():
    frame = frame_of(24).filter(~pl.col("set").str.contains("cumulative|substitute"))
    with pytest.raises(ResultError, match="12 live points of 2 policies"):
        forecast(frame)


def test_points_of_which_each_is_beyond_the_others_are_refused():
    alone = [(policy, changed(*[0.001 * 3**at] * 5)) for at, (policy, _) in enumerate(drawn_changes(9))]
    with pytest.raises(ResultError, match="too few live points"):
        forecast(quality_frame(sets_of(alone), {"nll": truth}))


def test_one_example_has_no_error_and_is_refused():
    frame = quality_frame(sets_of(drawn_changes(12)), {"nll": truth}, examples=1)
    with pytest.raises(ResultError, match="no standard errors"):
        forecast(frame)


def test_without_nll_the_measure_is_the_first_by_name_in_every_process():
    sets = sets_of(drawn_changes(12))
    frame = quality_frame(sets, dict.fromkeys(("second", "third", "first", "kl"), truth))
    assert forecast(frame).measure == "first"


def test_a_loss_that_is_no_perplexity_is_shown_in_nats(made: Forecast):
    assert [shown(made, value) for value in (0.1, 1000.0, "all")] == ["10.52%", "1e+03 nats", "all"]


def test_an_interval_that_ends_beyond_every_number_is_refused(made: Forecast):
    wide = replace(made, reach=20.0)
    frame = pl.DataFrame(
        {
            "config": [{"miss": "fetch"}],
            "about": [{"model": "miniature", "policies": {"miss": "fetch:bits=0"}}],
            "totals": [counters_of(made.points[0].change)],
        }
    )
    (found,) = with_forecasts(frame, wide)["forecast"]
    assert found["high"] is None and found["refused"] == "an interval without an end"
    assert with_forecasts(frame, made)["forecast"][0]["refused"] is None


@every(
    "asked, message",
    [({"task": "perplexity:tex.txt"}, f"unknown task .*{TASK}"), ({"measure": "k"}, "unknown measure 'k'")],
)
def test_unknown_names_are_refused(asked: dict[str, str], message: str):
    with pytest.raises(ResultError, match=message):
        forecast(frame_of(12), **asked)


# What the figures are


def test_counters_become_shares():
    change = changed(0.2, 0.1, 0.05, 1.5, 0.0)
    assert change_of(counters_of(change), "fetch:bits=0", 16) == pytest.approx(change)


def test_one_heavy_expert_is_more_lost_than_several_light_ones():
    """A fifth of the gate weight in an eighth of the assignments, or in three eighths."""
    heavy, light = (
        counters_of(NOTHING) | {"mass_kept": round(0.8 * MASS), "assignments_kept": round((1 - share) * ASSIGNMENTS)}
        for share in (1 / 8, 3 / 8)
    )
    assert change_of(heavy, "fetch:bits=0", 16).lost == pytest.approx(0.2 * 0.2 / (1 / 8))
    assert change_of(light, "fetch:bits=0", 16).lost == pytest.approx(0.2 * 0.2 / (3 / 8))


@every(
    "miss, low, rounding",
    [
        ("fetch:bits=0", 0.0, 0),
        ("lowest_bit:bits=16", 0.0, 0),  # as stored
        ("lowest_bit:bits=2", 0.0, 1 / 9),
        ("lowest_bit:bits=16/2", 0.5, 1 / 18),
        ("cascade:bits=4/2:when=importance:below=0.6", 0.5, 0.5 / 9 + 0.5 / 225),
        ("cascade:bits=16/4/2:when=importance:below=0.6/0.3", 0.5, 0.3 / 225 + 0.2 / 9),
    ],
)
def test_rounding_is_told_from_the_bits(miss: str, low: float, rounding: float):
    counters = counters_of(NOTHING, low) | {"mass_below_second": MASS // 5}
    assert change_of(counters, miss, 16).rounding == pytest.approx(rounding)


def test_results_without_counters_of_lower_precisions_have_all_of_it_at_the_last():
    counters = counters_of(NOTHING, 0.5) | {"mass_below_second": None, "mass_below_third": None}
    assert change_of(counters, "cascade:bits=16/8/4/2", 16).rounding == pytest.approx(1 / 18)


def test_stored_bits_are_those_of_the_type():
    found = [stored_bits(name) for name in ("float32", "bfloat16", "bfloat16+bnb-4bit", "float8_e4m3fn")]
    assert found == [32, 16, 4, 8]


def test_tiers_are_read_from_the_full_spelling():
    assert tiers_of("drop_cascade:bits=8/4:keep=2") == [8, 4]
    assert tiers_of("drop:keep=2") == [0]


@every(
    "routing, miss, policy",
    [
        ("standard", "fetch:bits=4", "fetch"),
        ("prune:keep=6", "fetch", "prune"),
        ("max_rank", "drop:keep=2", "max_rank+drop"),
    ],
)
def test_policies_are_called_by_what_changes_the_output(routing: str, miss: str, policy: str):
    assert policy_of({"routing": routing, "miss": miss}) == policy
