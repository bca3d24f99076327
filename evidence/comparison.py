"""The table of predictions and measurements: every run in folders of evidence, with the source of its prediction.

A run appears once for each calibration (or preset) that predicts it; one that no calibration covers appears once with
the reason. Every run has an error, even if its time is not the machine's; such errors are left out of summaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moereplay.calibration.evidence import HELD_OUT, Machines, from_fits, predictions, runs_of
from moereplay.calibration.files import Evidence, Line
from moereplay.calibration.fitting import prediction
from moereplay.calibration.prediction import REPLAY, TIMES, Prediction
from moereplay.calibration.rows import HITS, MEDIAN, PRESET, TIME, Row
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform

REFUSED = "refused"
#: Compared quantities besides the time per token, where routing was replayed.
COUNTS = {"hit_pct": HITS, "read_mib_per_token": "read per token, MiB"}
WORDS = {"tpot_median_ms": MEDIAN, "tpot_ms": TIME} | COUNTS
BOUNDS = (0.10, 0.25)  #: of |error|, whose shares a summary gives


class Plan(NamedTuple):
    """One calibration of a device: the base platform for values that are not fitted, and the cells of the fit.

    Without cells the platform is used unchanged; `only` restricts the predicted cells to models.
    """

    device: str
    base: Platform
    cells: Sequence[str] = ()
    only: Sequence[str] = ()

    def source(self, runs: Mapping[str, str]) -> str:
        """Return in words what predicts; `runs` are the models of the runs of the fit by name."""
        if not self.cells:
            return f"preset {self.base.name}, not fitted"
        models = ", ".join(sorted(set(runs.values())))
        return f"{len(runs)} run{'s' if len(runs) > 1 else ''} of {models}"


def is_timed(row: Row) -> bool:
    """Return True for a time per token that counts."""
    return row.compared and row.quantity not in COUNTS.values() and row.error is not None


def leave_one_model_out(evidence: Evidence, device: str, base: Platform) -> list[Plan]:
    """Return a plan per model of a device: fitted on the clean runs of its other models."""
    runs, _ = runs_of(evidence, [cell for cell in evidence.cells if cell.text("device") == device])
    known = [run for run in runs if run.sizes.dense_bytes and not run.foreign_time]
    clean = {run.name: run.cell.text("model") for run in known}
    models = sorted(set(clean.values()))
    if len(models) < 2:
        return []
    return [Plan(device, base, [name for name in clean if clean[name] != model], [model]) for model in models]


def rows_of(evidence: Evidence, plans: Sequence[Plan]) -> list[Row]:
    """Predict the cells of a folder by each plan of their device. Raises ConfigError for an invalid file."""
    every = [row for plan in plans for row in _by_plan(evidence, plan)]
    predicted = {row.id for row in every if row.role != REFUSED}
    rows = [row for row in every if row.role != REFUSED or row.id not in predicted]
    devices = {plan.device for plan in plans}
    others = [cell for cell in evidence.cells if cell.text("device") not in devices]
    return [*rows, *(_uncovered(cell) for cell in others)]


def _by_plan(evidence: Evidence, plan: Plan) -> Iterator[Row]:
    cells = [cell for cell in evidence.cells if cell.text("device") == plan.device]
    own = replace(evidence, cells=tuple(cells))
    by_name = {cell.text("cell"): cell for cell in cells}
    if not plan.cells:
        for run in runs_of(own, cells)[0]:
            yield from _rows(by_name[run.name], prediction(plan.base, run, PRESET), plan.source({}))
        return
    fitted = {cell.text("cell"): cell.text("model") for cell in own.chosen(plan.cells)}
    try:
        machines = from_fits(own, plan.cells, plan.base)
    except ConfigError as wrong:
        yield from (_refused(cell, str(wrong)) for cell in cells if cell.text("cell") in fitted)
        return
    used = {run.name: run.cell.text("model") for run in runs_of(own, own.chosen(plan.cells))[0]}
    for each in _predictions(own, machines, plan):
        if each.refused:
            yield _refused(by_name[each.cell], each.reason)
        else:
            yield from _rows(by_name[each.cell], each, plan.source(used))


def _predictions(evidence: Evidence, machines: Machines, plan: Plan) -> Iterator[Prediction]:
    """Predict the plan's cells; from published bytes alone where it leaves a model out."""
    if not plan.only:
        yield from predictions(evidence, machines)
        return
    cells = [cell for cell in evidence.cells if cell.text("model") in plan.only]
    for run in runs_of(evidence, cells)[0]:
        yield prediction(machines.platforms[plan.device], run, HELD_OUT)


def _rows(cell: Line, each: Prediction, source: str) -> Iterator[Row]:
    time = next((name for name in TIMES if name in each.measured), None)
    for name in [*([time] if time else []), *(COUNTS if each.basis == REPLAY else ())]:
        if name in each.predicted and name in each.measured:
            count = name in COUNTS
            yield replace(
                _row(cell, WORDS[name]),
                predicted_from=source,
                role=each.role.replace("_", " "),
                basis=each.basis,
                predicted=each.predicted[name],
                measured=each.measured[name],
                compared=count or each.compared,
                remark="" if count else each.reason,
            )


def _row(cell: Line, quantity: str) -> Row:
    """Return a row without values."""
    about = (cell.text("cell"), cell.text("source"), cell.text("device"), cell.text("model"))
    return Row(*about, quantity, "", REFUSED, "", None, None, False, "")


def _refused(cell: Line, reason: str) -> Row:
    return replace(_row(cell, WORDS["tpot_ms"]), measured=cell.amount("tpot_ms"), remark=reason)


def _uncovered(cell: Line) -> Row:
    return _refused(cell, "no calibration of this machine: too few of its runs can be predicted")


# -- summaries


class Summary(NamedTuple):
    """Errors of the counted times of one machine and source."""

    machine: str
    predicted_from: str
    role: str
    rows: int
    median: float  #: of |error|
    within: tuple[float, ...]  #: shares of rows by BOUNDS
    worst: float


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Summarise times per token by machine, source and role, in order of appearance."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if is_timed(row) and row.error is not None:
            groups.setdefault((row.machine, row.predicted_from, row.role), []).append(row.error)
    return [_summary(key, np.array(errors)) for key, errors in groups.items()]


def _summary(key: tuple[str, str, str], errors: np.ndarray) -> Summary:
    sizes = np.abs(errors)
    within = tuple(float((sizes <= bound).mean()) for bound in BOUNDS)
    return Summary(*key, len(errors), float(np.median(sizes)), within, float(errors[sizes.argmax()]))


# -- page


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of the page: summary by machine, times, counts, and refusals by reason."""
    times = [row for row in rows if row.error is not None and row.quantity not in COUNTS.values()]
    counts = [row for row in rows if row.error is not None and row.quantity in COUNTS.values()]
    parts = ["## By machine", _summary_table(rows), "## Times per token", *_times(times)]
    if counts:
        parts += [
            "## Hits and bytes of replayed routing",
            markdown_table(("run", "quantity", "predicted", "measured"), map(_count, counts)),
        ]
    return "\n\n".join([*parts, "## Not predicted", refusals(rows)]) + "\n"


def _summary_table(rows: Sequence[Row]) -> str:
    heads = (
        "machine",
        "predicted from",
        "role",
        "runs",
        "median error",
        *(f"within {bound:.0%}" for bound in BOUNDS),
        "worst",
    )
    return markdown_table(
        heads,
        (
            [*each[:4], f"{each.median:.1%}", *(f"{share:.0%}" for share in each.within), f"{each.worst:+.1%}"]
            for each in summaries(rows)
        ),
    )


def _times(rows: Sequence[Row]) -> Iterator[str]:
    for machine, source in dict.fromkeys((row.machine, row.predicted_from) for row in rows):
        own = [row for row in rows if (row.machine, row.predicted_from) == (machine, source)]
        yield f"### {machine}, from {source}"
        yield markdown_table(
            ("run", "model", "role", "predicted ms", "measured ms", "error", "not counted because"), map(_time, own)
        )


def _time(row: Row) -> list[object]:
    remark = "" if row.compared else row.remark.removeprefix("its time is not compared: ")
    return [row.id, row.model, row.role, _ms(row.predicted), _ms(row.measured), f"{row.error or 0:+.1%}", remark]


def _count(row: Row) -> list[object]:
    return [row.id, row.quantity, _ms(row.predicted), _ms(row.measured)]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def refusals(rows: Sequence[Row]) -> str:
    """Return the table of refusals by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.role == REFUSED:
            reasons.setdefault(row.remark, {})[row.id] = None
    listed = ([len(ids), reason, ", ".join(ids)] for reason, ids in reasons.items())
    return markdown_table(("runs", "reason", "which"), listed)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a bar inside a cell becomes a slash."""
    lines = [" | ".join(str(cell).replace("|", "/") for cell in row) for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {line} |" for line in lines)])
