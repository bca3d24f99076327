"""`moereplay calibrate series`: one or two measured runs of a machine fit it, and the other runs are predicted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moereplay.commands.calibrate import Written
from moereplay.commands.options import grouped
from moereplay.commands.terminal import say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moereplay.sweeps.recommend.measured import Row
    from moereplay.sweeps.recommend.series import Fitted, Group
    from moereplay.sweeps.recommend.series import Written as Machine

    Judged = tuple[Group, Fitted]


@grouped
def calibrate_series(
    table: Annotated[
        Path, typer.Argument(metavar="RUNS", help="Table of measured runs (.csv), a row per run.", show_default=False)
    ],
    *,
    series: Annotated[str, typer.Option(help="Only this series of the table.")] = "",
    fit: Annotated[
        list[str] | None,
        typer.Option(help="Id of a run to fit, once or twice (default: the slowest and the fastest by prediction)."),
    ] = None,
    written: Written,
) -> None:
    """Fit a machine's rate of misses and its fixed step to one or two runs of a series, and predict its other runs."""
    from moereplay.calibration.files import read_runs
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import as_toml
    from moereplay.sweeps.recommend.measured import samples
    from moereplay.sweeps.recommend.series import chosen_of, fitted, groups, platform_of

    written.check()
    rows = _of_series(read_runs(table), series)
    say_when_compiling()
    found, refused = samples(rows, {}, strict=False)
    judged = [(group, fitted(group, chosen_of(group, fit or ()))) for group in _with(groups(found), fit or [], refused)]
    if not judged:
        raise ConfigError(f"{table}: no run can be expressed: {'; '.join(_reason(*each) for each in refused[:3])}")
    if written.out and len(judged) > 1:
        names = ", ".join(sorted({group.series for group, _ in judged}))
        raise ConfigError(
            f"--out requires one group of runs, and these are {len(judged)} of {names}: pass --series, --fit, or both"
        )
    machine = platform_of(*judged[0]) if written.out or (len(judged) == 1 and judged[0][1].runs[0].run) else None
    shown = partial(_show, judged, refused, machine, written.as_json)
    written.finish(as_toml(machine.platform) if machine else "", machine.warnings if machine else (), shown)


def _of_series(rows: Sequence[Row], series: str) -> list[Row]:
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.texts import hint

    kept = [row for row in rows if not series or row["series"] == series]
    if not kept:
        raise ConfigError(f"unknown series {series!r}: {hint(series, sorted({row['series'] for row in rows}))}")
    return kept


def _with(found: Sequence[Group], names: list[str], refused: Sequence[tuple[Row, str]]) -> list[Group]:
    """Return the groups that hold a named run, or all. Raises ConfigError for a run that is refused or in no group."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.texts import hint

    for row, why in refused:
        if row["id"] in names:
            raise ConfigError(f"--fit {row['id']} cannot be expressed: {why}")
    known = [run.row["id"] for group in found for run in group.runs]
    for name in names:
        if name not in known:
            raise ConfigError(f"invalid --fit {name!r}: expected the id of a run: {hint(name, known)}")
    kept = [group for group in found if not names or {run.row["id"] for run in group.runs} & set(names)]
    if names and len(kept) > 1:
        raise ConfigError(f"--fit {names[0]} and {names[1]} belong to groups of their own: {', '.join(_about(kept))}")
    return kept


def _about(groups: Sequence[Group]) -> list[str]:
    return [f"{group.series} ({group.runs[0].row['engine']}, {group.question or 'decoding'})" for group in groups]


def _reason(row: Row, why: str) -> str:
    return f"{row['id']}: {why}"


def _show(judged: Sequence[Judged], refused: Sequence[tuple[Row, str]], machine: Machine | None, as_json: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import figure_row, warning_lines
    from moereplay.sweeps.recommend.series import document

    said = document(judged, refused, machine)
    if as_json:
        show_json(said)
        return
    for each in said["groups"]:
        show(f"{each['series'] or 'runs'}, {each['engine']}: {each['in_words']}")
        show(table([_row(run) for run in each["runs"]]))
    if machine:
        show(table([figure_row(name, value, None, len(judged[0][1].runs)) for name, value in machine.figures.items()]))
        show(*warning_lines(machine.warnings))
    held = said["held_out"]
    if held["runs"]:
        show(f"held out  {held['runs']} runs: median |error| {held['median']:.1%}, worst {held['worst']:+.1%}")
    if refused:
        show(table([{"run": row["id"], "not expressed because": why} for row, why in refused]))
    show(f"{sum(len(group.runs) for group, _ in judged)} runs are expressed, {len(refused)} are not")


def _row(run: dict[str, object]) -> dict[str, object]:
    return {
        "run": run["id"],
        "role": run["role"],
        "predicted tokens/s": run["predicted_tokens_per_s"],
        "measured": run["measured_tokens_per_s"],
        "error": f"{run['error']:+.1%}",
    }
