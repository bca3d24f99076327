"""`moereplay evidence`: measured runs of a folder, or single logs, beside what a calibration predicts of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moereplay.commands.log_options import OfLogs, logged, of_each
from moereplay.commands.options import Typed, grouped
from moereplay.commands.terminal import say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from moereplay.calibration.evidence import Machines
    from moereplay.calibration.prediction import Prediction
    from moereplay.simulator.platform import Platform

BASE = "phone-ufs4"  #: a device whose experts lie on flash


@grouped
def evidence(
    sources: Annotated[
        list[Path], typer.Argument(help="A folder with cells.csv, or per-token LOGs (.csv).", show_default=False)
    ],
    *,
    calibration: Annotated[
        list[str] | None, typer.Option(help="A calibrated platform (.toml); again for other devices.")
    ] = None,
    fit: Annotated[
        list[str] | None, typer.Option(help="Folder: or fit on these cells first, a pattern; again for more.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With --fit: platform whose other figures are kept (default: phone-ufs4).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    logs: OfLogs,
    typed: Typed,
) -> None:
    """Predict measured runs by a calibration of their machine, by replay where their routing is there."""
    from moereplay.calibration.evidence import document
    from moereplay.simulator.errors import ConfigError

    for source in sources:
        if not source.exists():
            raise ConfigError(f"cannot read {source}: No such file or directory; check the path")
    if sources[0].is_dir():
        for name in sorted(typed & {*OfLogs._fields}):
            raise ConfigError(f"--{name} is of logs and cannot be combined with a folder, whose cells.csv says it")
        found, machines = _of_folder(sources, calibration, fit, base)
    else:
        for name, given in (("--fit", fit), ("--base", base)):
            if given:
                raise ConfigError(f"{name} cannot be combined with logs; calibrate first, then give --calibration FILE")
        found, machines = _of_logs(sources, calibration, logs)
    for line in machines.remarks:
        say(line)
    if as_json:
        show_json(document(found))
    elif sources[0].is_dir():
        _show_folder(found)
    else:
        _show_logs(found, bool(logs.trace))


def _of_folder(
    sources: list[Path], calibration: list[str] | None, fit: list[str] | None, base: str | None
) -> tuple[list[Prediction], Machines]:
    from moereplay.calibration.evidence import from_files, from_fits, predictions
    from moereplay.calibration.files import read_folder
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform

    if len(sources) > 1:
        raise ConfigError(f"one folder, or logs, are predicted at a time; {sources[1]} is given beside {sources[0]}")
    if bool(calibration) == bool(fit):
        raise ConfigError("give either --calibration FILE or --fit PATTERN, each as often as needed")
    if base and calibration:
        raise ConfigError("--base cannot be combined with --calibration")
    cells = read_folder(sources[0])
    machines = from_files(calibration) if calibration else from_fits(cells, fit or [], platform(base or BASE))
    return list(predictions(cells, machines)), machines


def _of_logs(files: list[Path], calibration: list[str] | None, about: OfLogs) -> tuple[list[Prediction], Machines]:
    from moereplay.calibration.evidence import from_files, of_log
    from moereplay.calibration.runs import runs_of_logs
    from moereplay.simulator.errors import ConfigError

    if not calibration:
        raise ConfigError("missing calibration: logs need --calibration FILE, which `moereplay calibrate` writes")
    if len(calibration) > 1:
        raise ConfigError("--calibration is given more than once; logs are of one machine")
    for file in files:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; give one folder alone, or logs")
    machines = from_files(calibration)
    ((device, machine),) = machines.platforms.items()
    about = about._replace(model=about.model or _only_model(machine))
    runs = runs_of_logs(files, logged(about, files, device), fewest=1)
    routings = of_each(about.trace, files, "--trace") if about.trace else [None] * len(files)
    for routing in routings:
        if routing and not routing.exists():
            raise ConfigError(f"--trace {routing}: No such file or directory; check the path")
    say_when_compiling()
    return [of_log(machine, run, routing) for run, routing in zip(runs, routings, strict=True)], machines


def _only_model(machine: Platform) -> str | None:
    """The model that the calibration was fitted to, where it is one."""
    fitted = list(machine.calibration.models) if machine.calibration else []
    return fitted[0] if len(fitted) == 1 else None


def _show_folder(found: list[Prediction]) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import SPARE, refusal_rows, residual_rows, summary_line

    for rows in filter(None, (residual_rows(found), refusal_rows(found))):
        show(table(rows, spare=SPARE, more="--json"))
    for role in ("fit", "held_out"):
        show(f"{role.replace('_', ' '):9} {summary_line([each for each in found if each.role == role])}")


def _show_logs(found: list[Prediction], replayed: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.evidence import rows

    show(table([row for each in found for row in rows(each)]))
    show("error: predicted / measured - 1; measured hits follow from the bytes that the log says")
    if not replayed:
        show("predicted from the bytes that the log says; add --trace, its routing, to predict hits and bytes too")
