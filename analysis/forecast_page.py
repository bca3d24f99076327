"""A forecast as text: what it rests on and how good it is."""

from __future__ import annotations

from math import exp
from typing import Any

from moereplay.analysis.forecast import Forecast
from moereplay.analysis.forecast_errors import by_policy, coverage, in_words, points, shown, signal
from moereplay.analysis.left_out import LEVEL
from moereplay.analysis.tables import cell, table


def page(made: Forecast) -> list[str]:
    """Lines for a terminal: what carries the signal, errors policy by policy, how often intervals held."""
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
        "beyond what was measured, and of any other model, there is no forecast",
    ]


def document(made: Forecast) -> dict[str, Any]:
    """All of it and every live point, JSON-ready; losses in the measure's units."""
    named = {name: getattr(made, name) for name in ("model", "dtype", "task", "measure", "reach")}
    fit = {**made.fit.form._asdict(), "noise": made.fit.noise, "figures": signal(made)}
    held = coverage(made.points)._asdict()
    return named | fit | {"errors": by_policy(made), "coverage": held, "points": points(made)}


def _form(made: Forecast) -> str:
    through = ", weights those of KL times one factor" if made.fit.form.through_kl else ""
    return f"loss = sum of weight * figure ** {made.fit.form.power:g}{through}"
