"""Options that say of per-token logs what these do not say themselves: of `calibrate` and `evidence`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moereplay.calibration.runs import Logged

Value = TypeVar("Value")


class OfLogs(NamedTuple):
    """What a row of cells.csv says of a run in a folder."""

    model: Annotated[str | None, typer.Option(help="Logs: a known model; `moereplay models` lists them.")] = None
    memory: Annotated[
        list[str] | None, typer.Option(help="Logs: the expert cache, as 4000MiB, or 0; once, or once per log.")
    ] = None
    k: Annotated[int | None, typer.Option(min=1, help="Logs: experts per token (default: the model's).")] = None
    lanes: Annotated[int, typer.Option(min=1, help="Logs: reads at once.")] = 4
    serial: Annotated[bool, typer.Option("--serial", help="Logs: the engine reads, then computes.")] = False
    quant: Annotated[str, typer.Option(help="Logs: weight format of the file.")] = "Q4_K_M"
    dense: Annotated[str | None, typer.Option(help="Logs: all that is no routed expert, as stored: 1816MiB.")] = None
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Logs: their routing, a trace or another tool's file; once, or once per log."),
    ] = None


def logged(about: OfLogs, files: Sequence[Path], device: str) -> list[Logged]:
    """Return what is known of each log. Raises ConfigError naming an option that is missing, or given too often."""
    from moereplay.calibration.runs import Logged
    from moereplay.simulator.errors import ConfigError

    if about.model is None:
        raise ConfigError("missing model: logs need --model NAME; `moereplay models` lists the names")
    if about.memory is None:
        raise ConfigError("missing memory: logs need --memory, the size of the expert cache, as 4000MiB, or 0")
    rest = (about.k, about.lanes, about.serial, about.quant, about.dense, device)
    return [Logged(about.model, budget, *rest) for budget in of_each(about.memory, files, "--memory")]


def of_each(values: Sequence[Value], files: Sequence[Path], option: str) -> list[Value]:
    """Return one value for every log. Raises ConfigError unless one is given, or as many as there are logs."""
    from moereplay.simulator.errors import ConfigError

    if len(values) not in (1, len(files)):
        raise ConfigError(f"{option} is given {len(values)} times for {len(files)} logs; give it once, or once per log")
    return list(values) * (1 if len(values) == len(files) else len(files))
