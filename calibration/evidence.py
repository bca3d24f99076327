"""Every run of a folder of evidence: predicted by the calibration of its device, or refused with the reason."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from moereplay.calibration.files import QUOTED, Evidence, Line, within
from moereplay.calibration.fitting import Fitted, fit, prediction
from moereplay.calibration.prediction import REPLAY, Prediction, measured, rounded, summary
from moereplay.calibration.replayed import model_routing_of, replayed, routing_of
from moereplay.calibration.runs import MIB, RefusalError, Run, Sizes, run_of
from moereplay.policies.errors import PolicyError
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import platform
from moereplay.traces.schema import TraceError

FIT, HELD_OUT = "fit", "held_out"
OPTION = "--fit"
SAME_EXPERT = 0.01  #: experts whose bytes differ by less are stored in one way


@dataclass(frozen=True)
class Machines:
    """Calibrated platforms by device, the patterns of what they were fitted on, and devices that could not be."""

    platforms: Mapping[str, Platform]
    globs: Sequence[str]
    failures: Mapping[str, str]

    @property
    def remarks(self) -> list[str]:
        """What a reader must know of platforms that were edited after their calibration."""
        edited = [machine.name for machine in self.platforms.values() if machine.is_edited]
        said = "was edited after its calibration; its figures are not the fitted ones"
        return [f"warning: platform {name} {said}" for name in edited]

    def role(self, cell: Line) -> str:
        """Whether the cell is one of those that were fitted on."""
        return FIT if any(fnmatchcase(cell.text("cell"), glob) for glob in self.globs) else HELD_OUT


def method_of(globs: Sequence[str], folder: str) -> str:
    """How a calibration on these runs is made again; `globs_of` reads it."""
    return shlex.join(["moereplay", "calibrate", folder, *(word for glob in globs for word in (OPTION, glob))])


def globs_of(method: str) -> list[str]:
    """The patterns of a method, none if it is said in other words."""
    try:
        words = shlex.split(method)
    except ValueError:
        return []
    return [after for word, after in pairwise(words) if word == OPTION]


def from_files(names: Sequence[str]) -> Machines:
    """Calibrated platforms as files or presets. Raises ConfigError for one without a calibration."""
    platforms: dict[str, Platform] = {}
    globs: list[str] = []
    for name in names:
        machine = platform(name)
        about = machine.calibration
        if about is None:
            raise ConfigError(f"platform {name} has no [calibration]; make one with `moereplay calibrate`")
        if about.device in platforms:
            raise ConfigError(
                f"{name} is of device {about.device!r}, as another --calibration is; give one of each device"
            )
        platforms[about.device] = machine
        globs += globs_of(about.method)
    return Machines(platforms, globs, {})


def from_fits(evidence: Evidence, globs: Sequence[str], base: Platform) -> Machines:
    """A calibration of each device that has runs to fit on. Raises ConfigError if none can be made."""
    platforms: dict[str, Platform] = {}
    failures: dict[str, str] = {}
    runs, _ = runs_of(evidence, evidence.chosen(globs))
    for device in sorted({run.device for run in runs}):
        try:
            platforms[device] = fit_of([run for run in runs if run.device == device], globs, base, evidence).platform
        except ConfigError as wrong:
            failures[device] = str(wrong)
    if not platforms:
        raise ConfigError(next(iter(failures.values()), "no run is left to fit on; name runs with a time per token"))
    return Machines(platforms, globs, failures)


def fit_of(runs: Sequence[Run], globs: Sequence[str], base: Platform, evidence: Evidence) -> Fitted:
    """The calibration on these runs. Raises ConfigError."""
    return fit(runs, base, method_of(globs, evidence.path.name))


def runs_of(evidence: Evidence, cells: Sequence[Line]) -> tuple[list[Run], dict[str, str]]:
    """The cells that can be priced, and the reasons of the others by name."""
    runs: list[Run] = []
    refused: dict[str, str] = {}
    for cell in cells:
        try:
            runs.append(run_of(evidence, cell))
        except RefusalError as refusal:
            refused[cell.text("cell")] = str(refusal)
    return runs, refused


def predictions(evidence: Evidence, machines: Machines) -> Iterator[Prediction]:
    """One for every cell, in the order of the file. Raises ConfigError for files that are wrong."""
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
    if run.sizes.dense_bytes is None and role != FIT:
        _check_like_the_fit(run, fitted)
    published = prediction(machine, run, role)
    if not run.cached:
        return published
    try:
        return _by_routing(evidence, machine, run, published)
    except (RefusalError, ConfigError, PolicyError, TraceError) as wrong:
        return replace(published, more={"not_replayed": _reason(evidence, run, wrong)})


def _check_like_the_fit(run: Run, fitted: Sequence[Run]) -> None:
    """Raises RefusalError unless the fit has the run's model with the same experts per token.

    Compute's rate then holds what that model reads beside them; with other experts the share of that differs.
    """
    model, sizes = run.cell.text("model"), run.sizes
    unknown = f"unknown dense bytes per token of {model}"
    alike = [each.sizes for each in fitted if (each.cell.text("model"), each.device) == (model, run.device)]
    if not alike:
        raise RefusalError(f"nobody says what {model} reads beside its experts; give its dense_mib")
    if sizes.k not in (known := sorted({each.k for each in alike})):
        said = f"it ran k = {sizes.k}, the calibration was fitted with k = {', '.join(map(str, known))}"
        raise RefusalError(f"{unknown}: {said}; give its dense_mib")
    if not any(each.weight_format == sizes.weight_format and _near(each, sizes) for each in alike if each.k == sizes.k):
        stored = f"{sizes.weight_format or 'no format'}, {sizes.expert_bytes:,.0f} bytes an expert"
        raise RefusalError(f"{unknown}: it ran with {stored}, the calibration's runs with others; give its dense_mib")


def _near(one: Sizes, other: Sizes) -> bool:
    return abs(one.expert_bytes / other.expert_bytes - 1) <= SAME_EXPERT


def _reason(evidence: Evidence, run: Run, wrong: Exception) -> str:
    """Why routing was not replayed; a file outside of the folder, which a row may name, is not quoted."""
    named = run.cell.text("trace_file")
    if named and not within(evidence.path, named):
        return f"trace_file {named[:QUOTED]!r} lies outside of the folder, and cannot be replayed"
    return str(wrong)


def _by_routing(evidence: Evidence, machine: Platform, run: Run, published: Prediction) -> Prediction:
    """By replay of the run's own routing; that of its model is replayed beside what the run published."""
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
    raise RefusalError(f"no calibration is of device {device}; there is one of {known}")


def document(found: Sequence[Prediction]) -> dict[str, object]:
    """As `moereplay evidence --json` prints it. The summary is over held-out cells, if there are any with a time."""
    held = [each for each in found if each.role == HELD_OUT]
    over = held if any(each.time_error is not None for each in held) else list(found)
    refused = sum(each.refused for each in found)
    about = {"predicted": len(found) - refused, "refused": refused, "over": HELD_OUT if over is held else FIT}
    return {"cells": [each.document() for each in found], "summary": about | summary(over)}


# -- Single runs, each a per-token log: predicted by a calibration, by replay where their routing is given.

ROLE = "held_out"
#: What is printed of a run: column, words and decimals.
PRINTED = (
    ("tpot_ms", "time per token, mean", "ms"),
    ("tpot_median_ms", "time per token, median", "ms"),
    ("tok_s", "tokens per second", ""),
    ("hit_pct", "hits", "%"),
    ("read_mib_per_token", "read per token", "MiB"),
    ("compute_ms", "compute", "ms"),
    ("io_ms", "waiting for reads", "ms"),
    ("stall_ms", "waiting for reads", "ms"),
    ("mgmt_ms", "loading", "ms"),
)


def of_log(machine: Platform, run: Run, routing: Path | None) -> Prediction:
    """Predict a run by replay of its routing, else from the bytes of its log. Raises ConfigError or TraceError."""
    published = prediction(machine, run, ROLE)
    if routing is None:
        return replace(published, measured=_measured(run, published.predicted))
    try:
        found = replayed(machine, run, routing)
    except RefusalError as refusal:
        raise ConfigError(f"--trace {routing}: {refusal}") from None
    columns = found.columns
    return replace(published, basis=REPLAY, predicted=columns, measured=_measured(run, columns), more=found.more)


def _measured(run: Run, names: Iterable[str]) -> dict[str, float]:
    """What the log says of these columns; hits and bytes follow from the bytes that it read."""
    assert run.series is not None  # or it is no log
    read, wall = float(run.series.read_bytes.mean()), float(run.series.wall_ms.mean())
    hits = {"hit_pct": 100 * (1 - read / run.demand_bytes)} if run.cached else {}
    speed = {"tok_s": 1000 / wall} if wall else {}
    known = {"read_mib_per_token": read / MIB, **hits, **speed, **measured(run, names)}
    return {name: known[name] for name in names if name in known}


def rows(found: Prediction) -> list[dict[str, object]]:
    """One row per quantity: predicted beside measured."""
    error = found.error
    return [
        {
            "log": found.cell,
            "what": f"{words}, {unit}" if unit else words,
            "predicted": found.predicted[name],
            "measured": found.measured.get(name),
            "error": _error(name, found, error.get(name)),
        }
        for name, words, unit in PRINTED
        if name in found.predicted
    ]


def _error(name: str, found: Prediction, error: float | None) -> str:
    """Of hits in points, of the others in percent."""
    if name == "hit_pct" and name in found.measured:
        return f"{found.predicted[name] - found.measured[name]:+.1f} points"
    return "-" if error is None else f"{error:+.1%}"
