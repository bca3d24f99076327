"""Calibrate on logs or on a folder of runs, and predict runs with calibrated platforms.

A run that cannot be predicted is refused with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from moereplay.calibration.files import QUOTED, Evidence, Line, read_folder, within
from moereplay.calibration.fitting import Fitted, fit, prediction
from moereplay.calibration.prediction import REPLAY, Prediction, measured, rounded, summary
from moereplay.calibration.replayed import Replayed, model_routing_of, replayed, routing_of
from moereplay.calibration.runs import MIB, Logged, RefusalError, Run, Sizes, run_of, runs_of_logs, split
from moereplay.policies.errors import PolicyError
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import platform
from moereplay.traces.schema import TraceError
from moereplay.traces.texts import counted

FIT, HELD_OUT = "fit", "held_out"
OPTION = "--fit"
SAME_EXPERT = 0.01  #: experts whose sizes differ by a smaller share count as one format


@dataclass(frozen=True)
class Machines:
    """Calibrated platforms by device, the patterns of the cells they were fitted on, and the failed fits by device."""

    platforms: Mapping[str, Platform]
    globs: Sequence[str]
    failures: Mapping[str, str]

    @property
    def remarks(self) -> list[str]:
        """Warnings about platforms that were edited after their calibration."""
        edited = [machine.name for machine in self.platforms.values() if machine.is_edited]
        reason = "was edited after its calibration; its figures are not the fitted ones"
        return [f"warning: platform {name} {reason}" for name in edited]

    def role(self, cell: Line) -> str:
        """Return FIT for a cell that the calibration used, else HELD_OUT."""
        return FIT if any(fnmatchcase(cell.text("cell"), glob) for glob in self.globs) else HELD_OUT


def method_of(globs: Sequence[str], folder: str) -> str:
    """Return the command that repeats a calibration; `globs_of` reads the patterns back."""
    return shlex.join(
        ["moereplay", "calibrate", "folder", folder, *(word for glob in globs for word in (OPTION, glob))]
    )


def globs_of(method: str) -> list[str]:
    """Return the patterns of `--fit` in a method; empty for a method in other words."""
    try:
        words = shlex.split(method)
    except ValueError:
        return []
    return [after for word, after in pairwise(words) if word == OPTION]


def from_files(names: Sequence[str]) -> Machines:
    """Load calibrated platforms from files or presets. Raises ConfigError for one without a calibration."""
    platforms: dict[str, Platform] = {}
    globs: list[str] = []
    for name in names:
        machine = platform(name)
        about = machine.calibration
        if about is None:
            raise ConfigError(f"platform {name} has no [calibration]; make one with `moereplay calibrate`")
        if about.device in platforms:
            raise ConfigError(f"{name} is a second calibration of device {about.device!r}: pass one per device")
        platforms[about.device] = machine
        globs += globs_of(about.method)
    return Machines(platforms, globs, {})


def from_fits(evidence: Evidence, globs: Sequence[str], base: Platform) -> Machines:
    """Calibrate each device that has runs to fit on. Raises ConfigError if no fit succeeds."""
    platforms: dict[str, Platform] = {}
    failures: dict[str, str] = {}
    runs, _ = runs_of(evidence, evidence.chosen(globs))
    for device in sorted({run.device for run in runs}):
        try:
            platforms[device] = fit_of([run for run in runs if run.device == device], globs, base, evidence).platform
        except ConfigError as wrong:
            failures[device] = str(wrong)
    if not platforms:
        raise ConfigError(next(iter(failures.values()), "no run to fit on: expected runs with a time per token"))
    return Machines(platforms, globs, failures)


def fit_of(runs: Sequence[Run], globs: Sequence[str], base: Platform, evidence: Evidence) -> Fitted:
    """Fit one device's platform on its runs. Raises ConfigError."""
    return fit(runs, base, method_of(globs, evidence.path.name))


def runs_of(evidence: Evidence, cells: Sequence[Line]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs of usable cells, and the reasons for refusing the others by name."""
    runs: list[Run] = []
    refused: dict[str, str] = {}
    for cell in cells:
        try:
            runs.append(run_of(evidence, cell))
        except RefusalError as refusal:
            refused[cell.text("cell")] = str(refusal)
    return runs, refused


def predictions(evidence: Evidence, machines: Machines) -> Iterator[Prediction]:
    """Predict every cell in file order. Raises ConfigError for invalid files."""
    fitted, _ = runs_of(evidence, [cell for cell in evidence.cells if machines.role(cell) == FIT])
    for cell in evidence.cells:
        role = machines.role(cell)
        try:
            yield _predicted(evidence, cell, machines, role, fitted)
        except RefusalError as refusal:
            yield Prediction(cell.text("cell"), cell.text("device"), role, reason=str(refusal))


def _predicted(evidence: Evidence, cell: Line, machines: Machines, role: str, fitted: Sequence[Run]) -> Prediction:
    machine = _machine(cell.text("device"), machines)
    run = run_of(evidence, cell)
    own = [each for each in fitted if each.device == run.device]
    if run.sizes.dense_bytes is None:
        _check_like_the_fit(run, own)
    elif dark := sorted({each.cell.text("model") for each in own if each.sizes.dense_bytes is None}):
        raise RefusalError(f"unknown dense bytes of {', '.join(dark)}, which the calibration used: set dense_mib")
    published = prediction(machine, run, role)
    if not run.cached:
        return published
    try:
        return _by_routing(evidence, machine, run, published)
    except (RefusalError, ConfigError, PolicyError, TraceError) as wrong:
        return replace(published, more={"not_replayed": _reason(evidence, run, wrong)})


def _check_like_the_fit(run: Run, fitted: Sequence[Run]) -> None:
    """Raise RefusalError unless the fit used the run's model with the same experts per token, and nothing else.

    The fitted compute rate then includes the unknown dense bytes of that model. It does not transfer to other experts,
    because dense bytes are then another share of a token's bytes; nor is it that model's if the fit used others.
    """
    model, sizes = run.cell.text("model"), run.sizes
    unknown = f"unknown dense bytes per token of {model}"
    alike = [each.sizes for each in fitted if each.cell.text("model") == model]
    if not alike:
        raise RefusalError(f"{unknown}: set dense_mib")
    if others := sorted({each.cell.text("model") for each in fitted} - {model}):
        raise RefusalError(f"{unknown}: the calibration also used {', '.join(others)}; set dense_mib")
    if any(each.k != sizes.k for each in alike):
        fitted_k = ", ".join(map(str, sorted({each.k for each in alike})))
        raise RefusalError(f"{unknown}: the run has k = {sizes.k}, the calibration k = {fitted_k}; set dense_mib")
    if not all(each.weight_format == sizes.weight_format and _near(each, sizes) for each in alike):
        stored = f"{sizes.weight_format or 'no format'}, {sizes.expert_bytes:,.0f} bytes an expert"
        raise RefusalError(f"{unknown}: the run has {stored}, the calibration others; set dense_mib")


def _near(one: Sizes, other: Sizes) -> bool:
    return abs(one.expert_bytes / other.expert_bytes - 1) <= SAME_EXPERT


def _reason(evidence: Evidence, run: Run, wrong: Exception) -> str:
    """Explain why routing was not replayed, without quoting a file outside the folder."""
    named = run.cell.text("trace_file")
    if named and not within(evidence.path, named):
        return f"trace_file {named[:QUOTED]!r} is outside the folder and is not replayed"
    return str(wrong)


def _by_routing(evidence: Evidence, machine: Platform, run: Run, published: Prediction) -> Prediction:
    """Predict by replay of the run's own routing. Routing of the same model is replayed as additional information."""
    if own := routing_of(evidence.path, run):
        found = replayed(machine, run, own)
        columns = found.columns
        return replace(published, basis=REPLAY, predicted=columns, measured=measured(run, columns), more=found.more)
    if shared := model_routing_of(evidence.path, run):
        about = {"file": str(shared.relative_to(evidence.path)), **rounded(replayed(machine, run, shared).columns)}
        return replace(published, more={"model_routing": about})
    return published


def _machine(device: str, machines: Machines) -> Platform:
    if device in machines.platforms:
        return machines.platforms[device]
    if device in machines.failures:
        raise RefusalError(f"device {device} could not be calibrated: {machines.failures[device]}")
    known = ", ".join(sorted(machines.platforms))
    raise RefusalError(f"no calibration for device {device}: known devices are {known}")


def document(found: Sequence[Prediction]) -> dict[str, object]:
    """Return the document of `moereplay evidence --json`. Its summary covers held-out cells if any has a time."""
    held = [each for each in found if each.role == HELD_OUT]
    over = held if any(each.time_error is not None for each in held) else list(found)
    refused = sum(each.refused for each in found)
    about = {"predicted": len(found) - refused, "refused": refused, "over": HELD_OUT if over is held else FIT}
    return {"cells": [each.document() for each in found], "summary": about | summary(over)}


class Calibrated(NamedTuple):
    """A fitted platform, predictions of the held-out runs, and further entries of the document."""

    fitted: Fitted
    held: list[Prediction]
    more: dict[str, object]


def calibrate_folder(path: Path, globs: Sequence[str], base: Platform) -> Calibrated:
    """Fit on the cells that match, and predict the other runs of the device. Raises ConfigError."""
    evidence = read_folder(path)
    runs, refused = runs_of(evidence, evidence.chosen(globs))
    found = fit_of(runs, globs, base, evidence)
    every = predictions(evidence, Machines({found.device: found.platform}, globs, {}))
    held = [each for each in every if each.role == HELD_OUT and each.device == found.device and not each.refused]
    return Calibrated(found.knowing(held), held, {"left_out": refused})


def calibrate_logs(
    files: Sequence[Path], abouts: Sequence[Logged], hold_out: float, base: Platform, routing: Path | None
) -> Calibrated:
    """Fit on the first tokens of each log, predict the last ones, and replay the routing of a single log.

    Raises ConfigError, and TraceError for routing that cannot be read.
    """
    runs = runs_of_logs(files, abouts)
    first, last = split(runs, hold_out)
    budgets = ", ".join(dict.fromkeys(each.memory for each in abouts))
    logs = f"{counted(len(files), 'log')} of {abouts[0].model} at {budgets}"
    found = fit(first, base, f"{logs}, the last {hold_out:.0%} of tokens held out")
    held = [prediction(found.platform, run, HELD_OUT) for run in last]
    found = found.knowing(held)
    if routing is None:
        return Calibrated(found, held, {})
    again = _replayed_log(found.platform, runs[0], routing)
    return Calibrated(found, held, {"replay": {"columns": dict(again.columns), **again.more}})


def of_log(machine: Platform, run: Run, routing: Path | None) -> Prediction:
    """Predict a run by replay of its routing, else from the bytes of its log. Raises ConfigError or TraceError."""
    published = prediction(machine, run, HELD_OUT)
    if routing is None:
        return replace(published, measured=_measured(run, published.predicted))
    found = _replayed_log(machine, run, routing)
    columns = found.columns
    return replace(published, basis=REPLAY, predicted=columns, measured=_measured(run, columns), more=found.more)


def _replayed_log(machine: Platform, run: Run, routing: Path) -> Replayed:
    try:
        return replayed(machine, run, routing)
    except RefusalError as refusal:
        raise ConfigError(f"--trace {routing}: {refusal}") from None


def _measured(run: Run, names: Iterable[str]) -> dict[str, float]:
    """Return these columns as logged. Hits follow from the bytes that were read."""
    assert run.series is not None  # a log always has a series
    read, wall = float(run.series.read_bytes.mean()), float(run.series.wall_ms.mean())
    hits = {"hit_pct": 100 * (1 - read / run.demand_bytes)} if run.cached else {}
    speed = {"tok_s": 1000 / wall} if wall else {}
    known = {"read_mib_per_token": read / MIB, **hits, **speed, **measured(run, names)}
    return {name: known[name] for name in names if name in known}
