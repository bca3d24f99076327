"""Measure the error of a quality FORECAST: `make study-forecast` runs policy sets live on the miniature, then this.

Last changed in commit 0a7c2f56. How wrong is a FORECAST of quality?
Answer: docs/forecast.md.

Perplexity and KL, each: which counters carry the signal, errors with the policy or the point left out, how often
intervals held. Then refusals: the harshest live point of each kind of change, forecast from points without it and
from points with less of it. Then, with --new, held-out live points beside their forecasts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from moereplay.analysis.forecast import KL, NLL, Answer, Forecast, document, forecast, page, points_of
from moereplay.analysis.forecast_fit import Change, Point, Refusal, fitted
from moereplay.analysis.quality import judged
from moereplay.analysis.tables import console, table
from moereplay.results.quality import load
from moereplay.results.result import Row
from moereplay.traces.documents import json_text


def main() -> None:
    """Print, and keep all figures in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of `moereplay quality --out`")
    parser.add_argument("--new", type=Path, help="a folder of other sets of the same task")
    options = parser.parse_args()
    folder: Path = options.folder
    made = {measure: forecast(load(folder), measure=measure) for measure in (NLL, KL)}
    show = console().print
    for each in made.values():
        show("\n".join([*page(each), ""]))
    refused = list(refusals(made[KL]))
    show(table(refused, title="refused"))
    new = {name: list(beside(each, options.new)) for name, each in made.items() if options.new}
    for measure, rows in new.items():
        show(table(rows, title=f"held-out sets, {measure}"))
    kept = {"new": new, "forecasts": {measure: document(each) for measure, each in made.items()}, "refused": refused}
    (folder / "forecast_study.json").write_text(json_text(kept, indent=1))


def refusals(made: Forecast) -> Iterator[Row]:
    """Yield a row for each kind of change, forecast from points without it and from points with less."""
    for name in Change._fields:
        harshest = max(made.points, key=lambda each: getattr(each.change, name))
        for others, fewer in (("none", _without(made.points, name)), ("less", [*{*made.points} - {harshest}])):
            if len(fewer) > 1:
                refusal = fitted(fewer, made.fit.form, made.fit.noise).refusal(harshest.change)
                answer = _why(refusal) or "is forecast"
                yield {"live points have": f"{others} of {name}", "asked": harshest.set, "answer": answer}


def beside(made: Forecast, folder: Path) -> Iterator[Row]:
    """Yield a row for each live point of another folder: its loss and its forecast."""
    rows = load(folder)
    for each in points_of(rows, [found for found in judged(rows) if found.change is not None], made.measure):
        answer = made.at(each.change)
        said = {"forecast": answer.loss, "low": answer.low, "high": answer.high}
        yield {"set": each.set, "live": each.loss} | said | {"inside": _inside(answer, each.loss)}


def _inside(answer: Answer, loss: float) -> str:
    if answer.low is None or answer.high is None:
        return f"refused: {_why(answer.refusal)}"
    return "yes" if answer.low <= loss <= answer.high else "no"


def _why(refusal: Refusal | None) -> str:
    return refusal.why if refusal else ""


def _without(points: Sequence[Point], name: str) -> list[Point]:
    return [each for each in points if getattr(each.change, name) == 0]


if __name__ == "__main__":
    main()
