"""How good a forecast is, in figures: which counters carry it, its errors policy by policy, and how often it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1, isinf
from statistics import median
from typing import Any, NamedTuple

from moereplay.analysis.changes import COUNTED, Change
from moereplay.analysis.forecast import LARGEST_EXPONENT, NLL, Forecast, middling_error
from moereplay.analysis.left_out import Left, best_form, distances, reach_of
from moereplay.analysis.rising import Point, distance, fitted
from moereplay.analysis.statistics import spearman
from moereplay.results.result import Row


class Coverage(NamedTuple):
    """Of live points forecast by other policies, with intervals that these made."""

    inside: int
    asked: int
    refused: int


def coverage(points: Sequence[Point]) -> Coverage:
    """Every policy left out in turn, and all made anew by the others: noise, form, weights, width of the intervals."""
    found = [each for policy in dict.fromkeys(each.policy for each in points) for each in _without(points, policy)]
    asked = [each for each in found if each is not None]
    return Coverage(sum(asked), len(asked), len(found) - len(asked))


def signal(forecast: Forecast) -> list[Row]:
    """A row for each figure: how it ranks points beside their losses, its weight and share in them, and its range."""
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
    """A row for each policy, and one for all: medians over its points, in the measure's units."""
    groups = {name: [each for each in forecast.left if each.point.policy == name] for name in _policies(forecast)}
    return [_row(name, left) for name, left in (groups | {"all": list(forecast.left)}).items()]


def points(forecast: Forecast) -> list[Row]:
    """A row for each live point: what was measured, what is forecast of it, and what others forecast."""
    return [_point(forecast, each) for each in forecast.left]


def in_words(held: Coverage) -> str:
    """How often the intervals held what was measured."""
    if not held.asked:
        none = f"none of {held.refused} points of policies that are left out has an interval by the others"
        return f"{none}: out of their reach, or they are too few; so it is not known how often intervals hold"
    share = f"{held.inside} of {held.asked} live points ({held.inside / held.asked:.0%})"
    return f"held {share} of policies that were left out, {held.refused} more were refused"


def shown(forecast: Forecast, value: Any) -> Any:
    """A value of a table for reading: a loss of `nll` is the change of perplexity in percent."""
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


def _without(points: Sequence[Point], policy: str) -> Iterator[bool | None]:
    """Whether each point of a policy lies in the interval that the others make; None where they refuse it."""
    own, others = ([each for each in points if (each.policy == policy) is is_own] for is_own in (True, False))
    noise = middling_error(others) if others else 0.0
    if noise <= 0:  # nothing to compare errors with
        yield from (None for _ in own)
        return
    form, left = best_form(others, noise, whole=False)
    reach, fit = reach_of(distances(left, noise)), fitted(others, form, noise)
    for each in own:
        known = fit.refusal(each.change) is None and not isinf(reach)
        yield distance(each.loss, fit.at(each.change), noise) <= reach if known else None
