"""Series of measured runs: one or two of them fit a machine, and the others are predicted.

What is fitted is the rate at which misses are served (by the CPU, the link or the disk: what the machine's published
rates leave open) and a fixed step, which is what else a token costs. The result is a platform as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from moereplay.simulator.calibration import WORK, Band, Calibration, Part
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import without_disk
from moereplay.simulator.platform import Platform, Roofline
from moereplay.simulator.platforms import sealed
from moereplay.simulator.wires import Link, LowerTier
from moereplay.sweeps.recommend.answer import Parts
from moereplay.sweeps.recommend.measured import Row, Sample, overfull, spent
from moereplay.sweeps.recommend.settings import slowed
from moereplay.traces.dense import dense_of
from moereplay.traces.texts import hint

LEAST, MOST = 1e-3, 999.0  #: of a factor on the price of misses; the search for one ends beyond
APART = 1.02  #: predicted times of the slowest and the fastest run, below which two runs fit nothing more than one
FIT, HELD_OUT = "fit", "held out"


class Group(NamedTuple):
    """Runs of a series by one engine, in which what a run varies is the same thing."""

    series: str
    question: str
    runs: tuple[Sample, ...]  #: the slowest by prediction first


class Fitted(NamedTuple):
    """The figures that some runs of a group fit."""

    factor: float  #: times the price of a miss
    step: float  #: nanoseconds
    runs: tuple[Sample, ...]

    @property
    def fault(self) -> str:
        """Why the figures are not those of a machine, "" if they may be."""
        if any(overfull(each) for each in self.runs):
            return "the experts of a fitted run do not fit its VRAM"
        if not LEAST < self.factor < MOST:
            return "the runs do not become slower as their misses do: no rate of misses explains them"
        if self.step + _launches(self.runs[0]) < 0:
            return "what is not a miss takes less time than its bytes at the published rates: no step explains it"
        return ""


class Prediction(NamedTuple):
    """A run beside its prediction, in nanoseconds per token."""

    row: Row
    role: str  #: fit or held out
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """predicted / measured - 1, of tokens/s."""
        return self.measured / self.predicted - 1


def fit(slow: Sample, fast: Sample) -> tuple[float, float]:
    """Return the factor on the price of misses, and the step in ns, with which both runs are as measured."""

    def step_of(factor: float) -> float:
        return (fast.measured - fast.time(factor, 0)) / fast.steps

    factor = _factor(lambda each: slow.time(each, step_of(each)) < slow.measured)
    return factor, step_of(factor)


def fit_one(run: Sample) -> tuple[float, float]:
    """Return factor and step by one run: the step, where rates are known and it is not negative, or the factor."""
    step = (run.measured - run.time(1, 0)) / run.steps
    alike = run.time(2, 0) == run.time(1, 0)
    if alike or (step >= 0 and (run.steps > 1 or rates_known(run))):
        return 1, step
    return _factor(lambda each: run.time(each, 0) < run.measured), 0.0


def _launches(run: Sample) -> float:
    """Return the assumed nanoseconds of launches, which a step may replace; a prompt has none."""
    return float(run.run.machine.platform.loading.gate_ns * run.run.geometry.layers) if run.run else 0.0


def _factor(is_short: Callable[[float], bool]) -> float:
    """Return the factor up to which a run takes less time than measured, by bisection."""
    low, high = 1e-6, 1e3
    for _ in range(32):  # to a part in a hundred million
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_short(middle) else (low, middle)
    return low


#: Column in which the rate is published of what a token waits for; how fast a disk serves faults never is.
PUBLISHED = {"cpu": "ram_bw_gbs", "link": "pcie"}


def rates_known(run: Sample) -> bool:
    """Return whether the rates of all that a token of the run waits for are published."""
    if run.run is None:
        return bool(run.row["ram_bw_gbs"])
    parts = spent(run.run)
    waited = [name for name in ("cpu", "link", "disk") if getattr(parts, name)]
    return all(name in PUBLISHED and run.row[PUBLISHED[name]] for name in waited)


def groups(found: Sequence[Sample]) -> list[Group]:
    """Return the runs by series, question, engine and card; decoded tokens also by prompt, prompts by load."""
    by_key: dict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for run in found:
        alike = "series", "question", "engine", "gpu", "prompt_tokens" if run.steps == 1 else "load"
        by_key[tuple(run.row[name] for name in alike)].append(run)
    return [
        Group(key[0], key[1], tuple(sorted(runs, key=lambda run: -run.time(1, 0) / run.steps)))
        for key, runs in by_key.items()
    ]


def fitted(group: Group, chosen: Sequence[Sample] = ()) -> Fitted:
    """Fit the chosen one or two runs, or the slowest and the fastest, or the middle one where two say no more.

    A run whose experts do not fit its VRAM is not chosen: where its experts were is not known.
    """
    runs = [run for run in group.runs if not overfull(run)] or list(group.runs)
    if not chosen:
        two = len(runs) > 2 and apart(runs[0], runs[-1])
        chosen = (runs[0], runs[-1]) if two else (runs[len(runs) // 2],)
    slow, fast = (sorted(chosen, key=lambda run: -run.time(1, 0) / run.steps) * 2)[:2]
    if len(chosen) == 1:
        return Fitted(*fit_one(slow), (slow,))
    return Fitted(*fit(slow, fast), (slow, fast))


def apart(slow: Sample, fast: Sample) -> bool:
    """Return whether the predicted times of two runs differ enough to fit two figures."""
    return slow.time(1, 0) / slow.steps > APART * fast.time(1, 0) / fast.steps


def chosen_of(group: Group, names: Sequence[str]) -> tuple[Sample, ...]:
    """Return the runs of these ids. Raises ConfigError for one that is not in the group, or two that do not differ."""
    by_id = {run.row["id"]: run for run in group.runs}
    for name in names:
        if name not in by_id:
            raise ConfigError(
                f"invalid --fit {name!r}: expected a run of the series that can be predicted: {hint(name, list(by_id))}"
            )
    chosen = tuple(by_id[name] for name in dict.fromkeys(names))
    if len(chosen) > 2:
        raise ConfigError(f"--fit is given {len(chosen)} times: expected one run, or two")
    if len(chosen) == 2 and not (apart(*chosen) or apart(*chosen[::-1])):
        raise ConfigError(
            f"--fit {names[0]} and {names[1]} are predicted to take the same time: they cannot tell the rate of misses "
            "from the fixed step; pass one of them, or runs that differ in what memory holds"
        )
    return chosen


def predictions(group: Group, by: Fitted) -> list[Prediction]:
    """Return every run of the group, in the order of the file's ids, beside its prediction."""
    fitting = {run.row["id"] for run in by.runs}
    order = sorted(group.runs, key=lambda run: run.row["id"])
    return [
        Prediction(run.row, FIT if run.row["id"] in fitting else HELD_OUT, run.told(by.factor, by.step), run.each)
        for run in order
    ]


# -- the platform


def waited(platform: Platform, spent: Iterable[Parts]) -> tuple[Part, ...]:
    """Return the parts of a platform that passes wait for. Without a lower tier, the disk is behind the link."""
    names = {name for each in spent for name in ("cpu", "link", "disk") if getattr(each, name)}
    if "disk" in names:
        names.add("tiers" if platform.tiers else "link")
    return tuple(part for part in WORK if part in names)


class Written(NamedTuple):
    """A platform, and the figures in it that were fitted."""

    platform: Platform
    figures: dict[str, float]


def platform_of(group: Group, by: Fitted) -> Written:
    """Return the machine of a group with the figures that were fitted. Raises ConfigError where there are none."""
    if by.fault:
        raise ConfigError(f"cannot fit a platform to {group.series}: {by.fault}; pass other runs as --fit")
    run, row = by.runs[0].run, by.runs[0].row
    if run is None:
        raise ConfigError(
            f"cannot fit a platform to {group.series}, which measures prompts: pass runs of decoded tokens"
        )
    parts = waited(run.machine.platform, _spent(by))
    # A replay starts with an empty tier: runs that never waited for the disk had all of their experts in main memory.
    in_ram = run.machine.has_main_memory and "tiers" not in parts
    machine = without_disk(run.machine) if in_ram else run.machine
    scaled, figures = _scaled(machine.platform, by.factor, parts)
    # what a layer takes besides its weights, with the launches that no calibrated platform adds
    step = round((_launches(by.runs[0]) + by.step) / run.geometry.layers)
    figures |= {"fixed_step_ns": float(step * run.geometry.layers)}
    others = [each for each in predictions(group, by) if each.role == HELD_OUT]
    mean = fmean(run.geometry.expert_bytes)
    about = Calibration(
        device=", ".join(filter(None, (row["cpu"], row["gpu"]))) or group.series,
        method=_method(group, by),
        date=max(each.row["date"] for each in by.runs),
        cells=len(by.runs),
        mape=sum(abs(each.error) for each in others) / len(others) if others else None,
        models={row["model"]: float(dense_of(run.geometry).read)},
        expert_bytes={row["model"]: (mean, mean)},
        parts=parts,
        held_out=_band(others),
    )
    made = scaled.model_copy(
        update={
            "name": group.series or "measured runs",
            "summary": f"{about.device}, as runs of {row['engine']} fit it",
            "source": row["source"] or "the runs of a table",
            "cpu": scaled.cpu and scaled.cpu.model_copy(update={"tier": scaled.tiers[0].name if scaled.tiers else ""}),
            "loading": scaled.loading.model_copy(update={"gate_ns": step}),
            "calibration": about,
        }
    )
    return Written(sealed(made), figures)


def _spent(by: Fitted) -> list[Parts]:
    """Return what each of the fitted runs waits for per token: only these parts' rates were fitted."""
    return [spent(each.run, by.factor) for each in by.runs if each.run]


def _scaled(platform: Platform, factor: float, parts: Collection[Part]) -> tuple[Platform, dict[str, float]]:
    """Return the platform with the rates of these parts divided by the factor, and their new values."""
    change: dict[str, object] = {}
    figures: dict[str, float] = {}
    if "cpu" in parts and isinstance(platform.cpu, Roofline):
        change["cpu"] = slowed(platform.cpu, factor)
        figures["cpu.memory_bytes_per_s"] = platform.cpu.memory_bytes_per_s / factor
    if "link" in parts:
        change["links"] = tuple(_slowed(each, factor) for each in platform.links)
        figures["link.bytes_per_s"] = platform.links[0].bytes_per_s / factor
    if "tiers" in parts:
        change["tiers"] = tuple(_slowed(each, factor) for each in platform.tiers)
        figures["tiers.bytes_per_s"] = platform.tiers[-1].bytes_per_s / factor
    return platform.model_copy(update=change), figures


def _slowed(wire: Link | LowerTier, factor: float) -> Link | LowerTier:
    return wire.model_copy(update={"bytes_per_s": wire.bytes_per_s / factor})


def _method(group: Group, by: Fitted) -> str:
    names = " and ".join(each.row["id"] for each in by.runs)
    return f"replays of a token, rate of misses and fixed step fitted on {names} of {group.series or 'the table'}"


def _band(others: Sequence[Prediction]) -> Band | None:
    """Return measured over predicted times of the runs that nothing was fitted on."""
    ratios = sorted(each.measured / each.predicted for each in others)
    return Band(runs=len(ratios), least=ratios[0], median=median(ratios), most=ratios[-1]) if ratios else None


# -- the document


def document(
    judged: Sequence[tuple[Group, Fitted]], refused: Sequence[tuple[Row, str]], machine: Written | None
) -> dict[str, Any]:
    """Return every prediction beside its measurement, and every refusal with its reason."""
    told = [(group, by, predictions(group, by)) for group, by in judged]
    errors = [run.error for _, _, runs in told for run in runs if run.role == HELD_OUT]
    return {
        "groups": [_group(*each) for each in told],
        "held_out": {
            "runs": len(errors),
            "median": median(map(abs, errors)) if errors else None,
            "worst": max(errors, key=abs) if errors else None,
        },
        "platform": machine.platform.name if machine else None,
        "figures": machine.figures if machine else {},
        "refused": [{"id": row["id"], "series": row["series"], "reason": why} for row, why in refused],
    }


def _group(group: Group, by: Fitted, runs: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "series": group.series,
        "engine": by.runs[0].row["engine"],
        "question": group.question,
        "fit": [run.row["id"] for run in by.runs],
        "miss_factor": by.factor,
        "step_ns": by.step,
        "fault": by.fault,
        "in_words": in_words(by),
        "runs": [
            {"id": each.row["id"], "source": each.row["source"], "role": each.role}
            | {"predicted_tokens_per_s": 1e9 / each.predicted, "measured_tokens_per_s": 1e9 / each.measured}
            | {"error": each.error}
            for each in runs
        ],
    }


def in_words(by: Fitted) -> str:
    """Return what the fitted runs say of the machine, and on which runs."""
    names = " and ".join(run.row["id"] for run in by.runs)
    if by.fault:
        return f"no figures of the machine: {by.fault} (fitted on {names})"
    if by.runs[0].steps > 1:
        moved = f"streaming takes {by.factor:.3g} times what the published rates give"
        return f"{moved}, and a token {by.step / 1e3:+.3g} us (fitted on {names})"
    rate = f"misses take {by.factor:.3g} times what the published or assumed rates give"
    return f"{rate}, and a token {by.step / 1e6:+.3g} ms more (fitted on {names})"
