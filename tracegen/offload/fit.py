"""A platform from the durations of measured runs: what this machine and this runtime cost.

Means, trimmed by 2 % at both ends, and no medians: waits add up, tails included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moereplay.simulator.calibration import Calibration, Part
from moereplay.simulator.platform import Contention, Link, Measured, Platform
from moereplay.simulator.platforms import sealed
from moereplay.simulator.rates import Loading, Points
from moereplay.tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu
from moereplay.traces.units import MB, SECOND

TRIM = 0.02
APART = 0.05  #: two halves of a calibration differ by more: say so


class Figure(NamedTuple):
    """A price, half of what its two halves of samples differ by, and the number of samples."""

    value: float
    spread: float | None
    n: int

    @property
    def apart(self) -> float:
        """Difference between the two halves as a share of the figure."""
        return 2 * (self.spread or 0) / self.value if self.value else 0.0


class Fitted(NamedTuple):
    """A calibrated platform and its figures."""

    platform: Platform
    figures: dict[str, Figure]
    warnings: tuple[str, ...]


def fit(runs: Sequence[Durations], about: Calibration, throttle: float | None) -> Fitted:
    """Fit the figures of a platform to runs under one throttle; `about` is their provenance."""
    computed = [each for run in runs for each in run.computed]
    moved = [each for run in runs for each in run.moved]
    sizes = {y: size for run in runs for y, size in run.sizes.items()}
    largest = max(sizes.values(), default=0)
    figures = _link(moved) | _compute([each for each in computed if sizes.get(each.y, largest) == largest])
    by_size = _by_size(computed, sizes)
    warnings = [
        f"{name}: the halves of its samples differ by {figure.apart:.0%}; the machine was not quiet, or is not steady"
        for name, figure in figures.items()
        if figure.apart > APART
    ]
    if not moved:
        warnings.append("no expert crossed the link: its rate is not known; calibrate with less memory")
    figures |= _on_cpu([each for run in runs for each in run.on_cpu])
    figures |= {f"expert.{size}_bytes_ns": each for size, each in by_size.items()}
    values = {name: each.value for name, each in figures.items()}
    return Fitted(sealed(_platform(values, by_size, about, throttle)), figures, tuple(warnings))


def _platform(
    value: dict[str, float], by_size: Mapping[int, Figure], about: Calibration, throttle: float | None
) -> Platform:
    links = (Link(bytes_per_s=value.get("bytes_per_s", 1e12), latency_ns=round(value.get("latency_ns", 0))),)
    share = value.get("contention", 1.0)
    parts: dict[Part, bool] = {"cpu": "cpu.expert_ns" in value, "link": "bytes_per_s" in value}
    return Platform(
        name="this-machine",
        summary=f"measured: {about.device}" + (f", throttled to {throttle / MB:g} MB/s" if throttle else ""),
        source="moereplay, real offloading on this machine",
        links=links,
        compute=Measured(
            dense_ns=round(value["dense_ns"]),
            pass_ns=round(value["pass_ns"]),
            expert_ns=round(value["expert_ns"]),
            expert_ns_per_token=round(value["expert_ns_per_token"]),
            expert_by_size=_in_times(by_size),
        ),
        cpu=Measured(
            expert_ns=round(value["cpu.expert_ns"]), expert_ns_per_token=round(value["cpu.expert_ns_per_token"])
        )
        if "cpu.expert_ns" in value
        else None,
        contention=Contention(compute=share) if share < 1 else None,
        loading=Loading(gate_ns=round(value["gate_ns"])),
        calibration=about.model_copy(update={"parts": tuple(part for part, known in parts.items() if known)}),
    )


def _on_cpu(experts: Sequence[OnCpu]) -> dict[str, Figure]:
    """Fit the time of misses that the CPU computed from the slow tier; empty without any."""
    if not experts:
        return {}
    one = _figure([each for each in experts if each.tokens == 1] or experts, lambda each: each.spent)
    many = [each for each in experts if each.tokens > 1]
    tokens = sum(each.tokens for each in many) / len(many) if many else 2
    more = max(0.0, (_figure(many, lambda each: each.spent).value - one.value) / (tokens - 1)) if many else 0.0
    return {
        "cpu.expert_ns": _less(one, Figure(more, None, 0)),
        "cpu.expert_ns_per_token": Figure(more, None, len(many)),
    }


def _by_size(computed: Sequence[Computed], sizes: Mapping[int, int]) -> dict[int, Figure]:
    """Fit the time of a token in a copy by its bytes; empty if all copies have one size."""
    by_size = defaultdict[int, list[Computed]](list)
    for each in computed:
        if each.y in sizes and each.tokens == 1:
            by_size[sizes[each.y]].append(each)
    return {size: _figure(by_size[size], _until_next) for size in sorted(by_size)} if len(by_size) > 1 else {}


def _in_times(by_size: Mapping[int, Figure]) -> Points:
    """Return times as multiples of the largest copy's."""
    return tuple((size, each.value / by_size[max(by_size)].value) for size, each in by_size.items())


def _link(moved: Sequence[Moved]) -> dict[str, Figure]:
    """Rate of the reading thread; everything else that a transfer costs is its latency."""
    if not moved:
        return {}
    read = _figure(moved, lambda each: each.read / each.size)
    software = _figure(moved, lambda each: max(0, each.spent - each.read))
    rate = SECOND / read.value
    return {"bytes_per_s": Figure(rate, rate * read.apart / 2, read.n), "latency_ns": software}


def _compute(computed: Sequence[Computed]) -> dict[str, Figure]:
    """Fit dense parts, experts and gates. Without prompts, n tokens are assumed to take n times as long as one."""
    dense = [each for each in computed if each.y == DENSE]
    inner, first = ([each for each in dense if (each.layer == 0) is outer] for outer in (False, True))
    experts = [each for each in computed if each.y != DENSE]
    alone = [each for each in experts if not each.beside_link and each.tokens == 1]
    beside = [each for each in experts if each.beside_link and each.tokens == 1]
    one = _figure(alone or beside or experts, _until_next)
    base = _figure(inner or first, lambda each: each.spent)
    figures = {
        "dense_ns": base,
        "pass_ns": _less(_figure(first or inner, lambda each: each.spent), base),
        "gate_ns": _figure(dense, lambda each: each.decided),
        "expert_ns": one,
        "expert_ns_per_token": _per_token([each for each in experts if each.tokens > 1], one),
    }
    figures["expert_ns"] = _less(one, figures["expert_ns_per_token"])
    if alone and beside:
        slow = _figure(beside, _until_next)
        share = min(1.0, one.value / slow.value)
        figures["contention"] = Figure(share, share * slow.apart / 2, slow.n)
    return figures


def _until_next(each: Computed) -> int:
    return each.over - each.begun


def _per_token(many: Sequence[Computed], one: Figure) -> Figure:
    if not many:
        return Figure(0.0, None, 0)
    tokens = sum(each.tokens for each in many) / len(many)
    mean = _figure(many, _until_next)
    spread = None if mean.spread is None else mean.spread / (tokens - 1)
    return Figure(max(0.0, (mean.value - one.value) / (tokens - 1)), spread, mean.n)


def _less(of: Figure, part: Figure) -> Figure:
    return Figure(max(0.0, of.value - part.value), of.spread, of.n)


def _figure(items: Sequence[Computed] | Sequence[Moved] | Sequence[OnCpu], value: Callable) -> Figure:
    return figure_of([value(each) for each in items])


def figure_of(samples: Sequence[float]) -> Figure:
    """Return the trimmed mean of samples in the order in which they were taken; 0 without samples."""
    half = len(samples) // 2
    first, last = trimmed_mean(samples[:half]), trimmed_mean(samples[half:])
    return Figure(trimmed_mean(samples), abs(first - last) / 2 if half else None, len(samples))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest 2 %; 0 without samples."""
    ordered = sorted(values)
    cut = int(len(ordered) * TRIM)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0
