"""`moereplay evidence`: every measured run of a folder, predicted or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.terminal import show, show_json

BASE = "phone-ufs4"  #: a device whose experts lie on flash


def evidence(
    folder: Annotated[Path, typer.Argument(help="A folder with cells.csv.", show_default=False)],
    calibration: Annotated[
        list[str] | None, typer.Option(help="A calibrated platform (.toml); again for other devices.")
    ] = None,
    fit: Annotated[
        list[str] | None, typer.Option(help="Or fit on these cells first: a pattern; again for more.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="With --fit: platform whose other figures are kept; default phone-ufs4.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Predict measured runs by a calibration of their machine, by replay where their routing is there."""
    from analysis.tables import table
    from calibration.evidence import document, from_files, from_fits, predictions
    from calibration.folder import read_folder
    from calibration.report import SPARE, refusal_rows, residual_rows, summary_line
    from simulator.errors import ConfigError
    from simulator.platform_files import platform

    if bool(calibration) == bool(fit):
        raise ConfigError("give either --calibration FILE or --fit PATTERN, each as often as needed")
    if base and calibration:
        raise ConfigError("--base means nothing beside --calibration; leave it out")
    cells = read_folder(folder)
    machines = from_files(calibration) if calibration else from_fits(cells, fit or [], platform(base or BASE))
    found = list(predictions(cells, machines))
    if as_json:
        show_json(document(found))
        return
    for rows in filter(None, (residual_rows(found), refusal_rows(found))):
        show(table(rows, spare=SPARE, more="--json"))
    for role in ("fit", "held_out"):
        show(f"{role.replace('_', ' '):9} {summary_line([each for each in found if each.role == role])}")
