"""A platform from measured runs: which figures are fitted on which of them, and what a reader must know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moereplay.calibration.compute_fit import fit_compute, fit_faults, fit_loading
from moereplay.calibration.link_fit import Figure, fit_line, fit_link, waits_of
from moereplay.calibration.prediction import PUBLISHED, Prediction, measured, predicted, summary
from moereplay.calibration.runs import Run
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Calibration, Platform
from moereplay.simulator.platform_files import sealed
from moereplay.traces.geometry import recognised

#: A run whose mean token takes so much more than its median one has outliers that no price describes.
OUTLIERS = 1.15


@dataclass(frozen=True)
class Fitted:
    """A calibrated platform, its figures by name, and how far it is off on the runs that it was fitted on."""

    platform: Platform
    figures: dict[str, Figure]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]

    @property
    def device(self) -> str:
        """What was measured."""
        return self.runs[0].device

    @property
    def on_itself(self) -> list[Prediction]:
        """The runs of the fit, predicted."""
        return [prediction(self.platform, run, "fit") for run in self.runs]


def fit(runs: Sequence[Run], base: Platform, method: str) -> Fitted:
    """Fit the figures of a platform on runs of one device; `method` is kept. Raises ConfigError if they cannot tell."""
    _check(runs, base)
    warnings: list[str] = []
    machine, figures = _fitted(runs, base, warnings)
    warnings += _warnings(runs)
    about = Calibration(device=runs[0].device, method=method, date=_date(runs), cells=len(runs), models=models_of(runs))
    lanes = max(run.lanes or machine.links[0].depth for run in runs)
    links = tuple(link.model_copy(update={"depth": lanes}) for link in machine.links)
    known = {"name": runs[0].device, "summary": _summary(runs), "source": "", "links": links, "calibration": about}
    made = sealed(machine.model_copy(update=known))
    found = Fitted(made, figures, tuple(runs), tuple(warnings))
    error = summary(found.on_itself)["mape"]
    known["calibration"] = about.model_copy(update={"mape": error})
    return Fitted(sealed(machine.model_copy(update=known)), figures, tuple(runs), tuple(warnings))


def models_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the models of runs by name, with the mean bytes that each reads beside its experts, 0 if not known."""
    found: dict[str, list[float]] = {}
    for run in runs:
        name = run.cell.text("model")
        like = recognised(name)
        found.setdefault(like.name if like else name, []).append(run.sizes.dense_bytes or 0)
    return {name: round(sum(sizes) / len(sizes)) for name, sizes in sorted(found.items()) if name}


def _check(runs: Sequence[Run], base: Platform) -> None:
    devices = sorted({run.device for run in runs})
    if not devices:
        raise ConfigError("no run is left to fit on; name runs with a time per token and their hits or bytes")
    if len(devices) > 1:
        raise ConfigError(
            f"the runs to fit are of {', '.join(devices)}; a calibration is of one device: fit each apart"
        )
    if len(base.links) > 1:
        raise ConfigError(f"platform {base.name} has several links; a calibration needs a base with one")


def _fitted(runs: Sequence[Run], base: Platform, warnings: list[str]) -> tuple[Platform, dict[str, Figure]]:
    waits = waits_of(runs)
    if not waits or not any(run.median("compute_ms") and not run.foreign_time for run in runs):
        timed = [run for run in runs if not run.foreign_time]
        warnings.append(
            "no run that reads experts logs what its time is made of: compute and link are the two ends of a line over "
            "bytes"
        )
        return fit_line(timed, base)
    machine, loading = fit_loading(runs, base)
    machine, compute = fit_compute(runs, machine, warnings)
    machine, link = fit_link(waits, machine)
    machine, faults = fit_faults(runs, machine)
    return machine, compute | link | loading | faults


def _date(runs: Sequence[Run]) -> str:
    """Of the latest run."""
    return max(run.cell.text("date") for run in runs)


def _summary(runs: Sequence[Run]) -> str:
    models = ", ".join(sorted({run.cell.text("model") for run in runs}))
    return f"{runs[0].device} as calibrated on {len(runs)} runs of {models}"


def _warnings(runs: Sequence[Run]) -> list[str]:
    said = [f"{run.name}: its time is left out of compute: {run.foreign_time}" for run in runs if run.foreign_time]
    for run in runs:
        mean, median = run.mean("wall_ms"), run.median("wall_ms")
        if mean and median and mean > OUTLIERS * median:
            times = f"{mean / median:.2f} times"
            said.append(f"{run.name}: the mean token took {times} the median one; no price describes such outliers")
        if run.sizes.dense_bytes is None:
            said.append(f"{run.name}: nobody says what it reads beside experts; compute's rate holds for it alone")
    lengths = {run.sizes.expert_bytes for run in runs}
    if len(lengths) == 1:
        said.append("all runs read experts of one size: what smaller or larger ones take is not known")
    return said


def prediction(platform: Platform, run: Run, role: str) -> Prediction:
    """The run on the platform, from what it published."""
    found = predicted(platform, run)
    return Prediction(
        cell=run.name,
        device=run.device,
        role=role,
        basis=PUBLISHED,
        reason=f"its time is not compared: {run.foreign_time}" if run.foreign_time else "",
        predicted=found,
        measured=measured(run, found),
        compared=not run.foreign_time,
    )
