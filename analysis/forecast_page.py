"""Output of forecasts: the text and document of `forecast`, and columns of a frame of replays.

Losses of replays are changes of perplexity as shares: 0.01 is one percent more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, expm1, isinf
from statistics import median
from typing import Any, NamedTuple

from moereplay.analysis.forecast import LARGEST_EXPONENT, NLL, Forecast, middling_error
from moereplay.analysis.forecast_fit import (
    COUNTED,
    LEVEL,
    Change,
    Left,
    Point,
    best_form,
    distance,
    distances,
    fitted,
    reach_of,
)
from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import cell, table
from moereplay.results.result import Row


def page(made: Forecast) -> list[str]:
    """Return lines for a terminal: weights of the counters, errors by policy, and coverage of the intervals."""
    live = f"{len(made.points)} live points of {len({each.policy for each in made.points})} policies"
    errors = [{name: shown(made, value) for name, value in row.items()} for row in by_policy(made)]
    held = in_words(coverage(made.points))
    return [
        f"FORECAST: {made.model}, {made.dtype}; {made.task}, {made.measure}; from {live}",
        "",
        table(signal(made), _form(made), spare=["counter"], more="--json"),
        table(errors, "medians of |forecast - live|, each point forecast by the others", more="--json"),
        f"intervals of {LEVEL:.0%}: the loss times {exp(made.reach):.3g} either way where it is far above the noise "
        f"({cell(shown(made, made.fit.noise))}); {held}",
        "no forecast for changes beyond the measured range, or for another model",
    ]


def document(made: Forecast) -> dict[str, Any]:
    """Return the fit, its errors and every live point, JSON-ready; losses are in the measure's units."""
    named = {name: getattr(made, name) for name in ("model", "dtype", "task", "measure", "reach")}
    fit = {**made.fit.form._asdict(), "noise": made.fit.noise, "figures": signal(made)}
    held = coverage(made.points)._asdict()
    return named | fit | {"errors": by_policy(made), "coverage": held, "points": point_rows(made)}


def _form(made: Forecast) -> str:
    through = ", weights those of KL times one factor" if made.fit.form.through_kl else ""
    return f"loss = sum of weight * figure ** {made.fit.form.power:g}{through}"


def signal(forecast: Forecast) -> list[Row]:
    """Return a row per figure: rank correlation with the loss, weight, share of the loss, and measured range."""
    losses = [each.loss for each in forecast.points]
    terms = [forecast.fit.terms(each.change) for each in forecast.points]
    shares = [Change(*(value / (sum(each) or 1.0) for value in each)) for each in terms]
    return [
        {
            "figure": name,
            "counter": COUNTED[name],
            "rank correlation": spearman([getattr(each.change, name) for each in forecast.points], losses),
            "weight": getattr(forecast.fit.weights, name),
            "share of the loss": sum(getattr(each, name) for each in shares) / len(shares),
            "measured to": getattr(forecast.fit.most, name),
        }
        for name in Change._fields
    ]


def by_policy(forecast: Forecast) -> list[Row]:
    """Return a row per policy and one for all: medians over its points, in the measure's units."""
    groups = {name: [each for each in forecast.left if each.point.policy == name] for name in _policies(forecast)}
    return [_row(name, left) for name, left in (groups | {"all": list(forecast.left)}).items()]


def point_rows(forecast: Forecast) -> list[Row]:
    """Return a row per live point: its measured loss, its forecast, and the forecasts from other points."""
    return [_point(forecast, each) for each in forecast.left]


def in_words(held: Coverage) -> str:
    """Return the coverage as a sentence."""
    if not held.asked:
        none = f"none of {held.refused} left-out points has an interval from the other policies"
        return f"{none}, so the coverage is unknown"
    share = f"{held.inside} of {held.asked} live points ({held.inside / held.asked:.0%})"
    return f"covered {share} of left-out policies, {held.refused} more were refused"


def shown(forecast: Forecast, value: Any) -> Any:
    """Format a value for reading: a loss of `nll` becomes a change of perplexity in percent."""
    if forecast.measure != NLL or not isinstance(value, float):
        return value
    return f"{expm1(value):.2%}" if value <= LARGEST_EXPONENT else f"{value:.3g} nats"


def _point(forecast: Forecast, left: Left) -> Row:
    answer, own = forecast.at(left.point.change), left.point
    said = {"forecast": answer.loss, "low": answer.low, "high": answer.high}
    by = {"by_other_policies": left.by_others, "by_other_points": left.by_rest}
    return (
        {"set": own.set, "policy": own.policy, "live": own.loss, "error": own.error} | said | by | own.change._asdict()
    )


def _policies(forecast: Forecast) -> Sequence[str]:
    return list(dict.fromkeys(each.policy for each in forecast.points))


def _row(policy: str, left: Sequence[Left]) -> Row:
    by_others = [(each.point.loss, each.by_others) for each in left if each.by_others is not None]
    by_rest = [(each.point.loss, each.by_rest) for each in left if each.by_rest is not None]
    return {
        "policy": policy,
        "points": len(left),
        "live loss": median(each.point.loss for each in left),
        "error, policy left out": _middling(by_others),
        "refused": len(left) - len(by_others),
        "error, point left out": _middling(by_rest),
        "refused then": len(left) - len(by_rest),
    }


def _middling(pairs: Sequence[tuple[float, float]]) -> float | None:
    return median(abs(said - live) for live, said in pairs) if pairs else None


class Coverage(NamedTuple):
    """Counts of left-out points: inside their interval, forecast, and refused."""

    inside: int
    asked: int
    refused: int


def coverage(points: Sequence[Point]) -> Coverage:
    """Leave out every policy in turn, and repeat the whole fit on the others: noise, form, weights, interval width."""
    found = [each for policy in dict.fromkeys(each.policy for each in points) for each in _without(points, policy)]
    asked = [each for each in found if each is not None]
    return Coverage(sum(asked), len(asked), len(found) - len(asked))


def _without(points: Sequence[Point], policy: str) -> Iterator[bool | None]:
    """Tell for each point of a policy whether the interval from the others holds it; None if they refuse it."""
    own, others = ([each for each in points if (each.policy == policy) is is_own] for is_own in (True, False))
    noise = middling_error(others) if others else 0.0
    if noise <= 0:  # errors have no scale
        yield from (None for _ in own)
        return
    form, left = best_form(others, noise, whole=False)
    reach, fit = reach_of(distances(left, noise)), fitted(others, form, noise)
    for each in own:
        known = fit.refusal(each.change) is None and not isinf(reach)
        yield distance(each.loss, fit.at(each.change), noise) <= reach if known else None
