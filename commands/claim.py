"""`moereplay claim`: replay both values of the one setting that a claim is about, and say whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moereplay.analysis.comparisons import CONFIRMED, OPEN, REFUTED, changed, claimed, compared, estimate
from moereplay.analysis.ranking import heading
from moereplay.analysis.tables import table
from moereplay.analysis.verdict import FORESEES, assumed
from moereplay.commands import options
from moereplay.commands.options import CORES
from moereplay.commands.terminal import keeping, progress, say_when_compiling, show, show_json
from moereplay.policies.grammar import foresight
from moereplay.results.errors import ResultError
from moereplay.results.remarks import seconds_in_words, synthetic_of
from moereplay.results.result import Result
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.claim import Claim, read_claim, traces_of
from moereplay.sweeps.grid import run_grid
from moereplay.traces.texts import between, percent

NO_FIGURE = "no request has the figure under both, or it is 0 in the base"
OF_DRAWS = "the routing is synthetic: the answer is about other requests of the same draw, not about a real model"


def claim(
    file: Annotated[Path, typer.Argument(help="Claim, TOML (see docs/statistics.md).", show_default=False)],
    *,
    policy_file: options.PolicyFiles = None,
    workers: options.Workers = CORES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Test a hypothesis about one setting: confirmed, refuted, or cannot tell, with 95 % intervals. SIMULATED."""
    stated = read_claim(file)
    try:
        compared(stated.figure)
    except ResultError as wrong:
        raise ConfigError(f"{file}: figure: {wrong}") from None
    configs, rows, said = stated.configs(), list[dict[str, Any]](), list[str]()
    traces = traces_of(stated, file)
    say_when_compiling()
    with keeping(lambda: "nothing was answered"), progress(len(configs) * len(traces), "replays") as advance:
        for name, trace in traces:
            base, variant = (result for result, _ in run_grid(trace, configs, workers, bounded=False, done=advance))
            rows.append(_row(stated, name, base, variant))
            said += heading(trace, [base, variant])
    answer = _answer([row["answer"] for row in rows])
    knows = foresight()
    settings = [config.model_dump() for config in configs]
    remarks = [f"{each[stated.variable]} {FORESEES}" for each in settings if knows(each)]
    remarks += [assumed(settings)] if any(row["low"] is not None for row in rows) else []
    remarks += [OF_DRAWS] if any(row["synthetic"] for row in rows) else []
    if as_json:
        show_json({**stated.model_dump(mode="json"), "answer": answer, "remarks": remarks, "rows": rows})
        return
    asked = (
        f"asked: does {stated.figure} change by {stated.gate} from {stated.variable} {stated.base} to {stated.variant}?"
    )
    shown = table([_shown(row) for row in rows], spare=["requests"], more="--json")
    show(f"claim: {stated.claim}", asked, *filter(None, dict.fromkeys(said)), "", shown, *remarks, f"answer: {answer}")


def _row(stated: Claim, name: str, base: Result, variant: Result) -> dict[str, Any]:
    sides, (gate, at_most) = (variant.per_request, base.per_request), stated.limit
    found, figures = changed(*sides, stated.figure, gate), [estimate(side, stated.figure) for side in sides]
    return {
        "trace": name,
        "digest": base.about["trace"],
        "label": variant.about["label"],
        "seconds": seconds_in_words(variant.about),
        "synthetic": synthetic_of(base.about),
        "base": figures[1] and figures[1].value,
        "variant": figures[0] and figures[0].value,
        "change": found and found.value,
        "low": found and found.low,
        "high": found and found.high,
        "requests": found.requests if found else 0,
        "answer": claimed(found, gate, at_most),
        "why": found.why if found else NO_FIGURE,
    }


def _answer(answers: list[str]) -> str:
    """Return refuted if any trace refutes the claim, confirmed if all confirm it."""
    if REFUTED in answers:
        return REFUTED
    return CONFIRMED if set(answers) == {CONFIRMED} else OPEN


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    change, *ends = (
        "-" if row[name] is None else percent(row[name], signed=True) for name in ("change", "low", "high")
    )
    interval = f"none: {row['why']}" if row["why"] else between(*ends)
    shown = {name: row[name] for name in ("trace", "base", "variant", "answer", "requests")}
    return shown | {"change": change, "95% CI": interval}
