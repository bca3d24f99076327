"""Fit a platform of this machine for one model, from runs of the runtime; and measure the link by size and by lanes."""

from __future__ import annotations

import datetime
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from moereplay.simulator.calibration import Calibration, Part
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.platform import Contention, Link, Measured, Platform
from moereplay.simulator.platforms import as_toml, sealed
from moereplay.simulator.rates import Loading
from moereplay.tracegen.offload.bench import Bench, SlowTiers, check_measurable, replayed
from moereplay.tracegen.offload.compute import layout_of
from moereplay.tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu
from moereplay.tracegen.offload.memory import BITS_PER_WEIGHT, Format
from moereplay.tracegen.offload.slow_tier import SlowTier
from moereplay.traces.dense import dense_of
from moereplay.traces.geometry import KnownModel
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.units import MB, SECOND

PROMPT, DECODED = 8, 12  #: tokens of a run
REUSE = 0.31  #: OLMoE's
FITTED, HELD_OUT = "50%", ("25%", "75%")  #: capacities
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  #: bytes of a read
LANES = (2, 4)
READS = 24


class Calibrated(NamedTuple):
    """A fitted platform with the link's further figures, and errors of the time per token by capacity."""

    fitted: Fitted
    figures: dict[str, Figure]
    on_itself: float
    held_out: dict[str, float]


def configs() -> list[ReplayConfig]:
    """Return the configurations of a calibration, the fitted one first.

    They use LRU without prefetch, whose decisions do not depend on durations.
    """
    return [configure(capacity=capacity, eviction="lru") for capacity in (FITTED, *HELD_OUT)]


#: Real runs of a calibration.
RUNS = 4 + len(HELD_OUT)


def bench_of(geometry: Geometry, slow: SlowTiers, device: str) -> Bench:
    """Open a bench for all configurations. Raises ConfigError if they do not fit into this machine's memory."""
    trace = trace_of(geometry, 1)
    return Bench.of([check_measurable(trace, config) for config in configs()], slow, max(TOKENS), device)


def trace_of(geometry: Geometry, seed: int) -> Trace:
    """Return a trace of a prompt and decoded tokens with the reuse of a real model."""
    made = Synthetic(
        kind="markov",
        reuse=REUSE,
        geometry=geometry,
        prompt_tokens=PROMPT,
        decode_tokens=DECODED,
        seed=seed,
        logits=False,
    )
    return synthesise(made)


def about_of(device: str, slow_tier: str, throttle: float | None, model: KnownModel | None = None) -> Calibration:
    """Return the provenance of a calibration made today; `slow_tier` is disk, disk:buffered or pinned."""
    method, today = "moereplay calibrate machine", datetime.date.today().isoformat()
    models = {model.name: float(dense_of(model.geometry).read)} if model else {}
    mean = fmean(model.geometry.expert_bytes) if model else 0
    experts = {model.name: (mean, mean)} if model else {}
    about = Calibration(
        device=device, method=method, date=today, slow_tier=slow_tier, models=models, expert_bytes=experts
    )
    return about.model_copy(update={"throttle_bytes_per_s": throttle})


def calibrate(
    bench: Bench, geometry: Geometry, about: Calibration, folder: Path, done: Callable[[], None]
) -> Calibrated:
    """Fit on two runs before and two after the runs that are held out, under the throttle of `about`.

    `done` is called after each run. Raises ConfigError where the slow tier fails.
    """
    (config, *others), throttle = configs(), about.throttle_bytes_per_s
    before, _ = _run(bench, geometry, config, (1, 2), throttle, done)
    held = [_run(bench, geometry, other, (5,), throttle, done) for other in others]
    after, ran = _run(bench, geometry, config, (3, 4), throttle, done)
    tokens = by_tokens(bench, geometry)
    found = _curved(fit([*before, *after], about.model_copy(update={"cells": 4}), throttle), tokens)
    file = folder / "calibrated.toml"
    file.write_text(as_toml(found.platform), "utf-8")
    own = fmean(abs(_error(trace, ns, config, file)) for trace, ns in ran)
    errors = {other.capacity: _error(*runs[0], other, file) for other, (_, runs) in zip(others, held, strict=True)}
    fitted = found.platform.calibration
    assert fitted is not None  # `fit` wrote it
    known = found.platform.model_copy(update={"calibration": fitted.model_copy(update={"mape": own})})
    formats = {name: _format(bench, geometry, bits) for name, bits in BITS_PER_WEIGHT.items() if bits <= 16}
    figures = found.figures | _named(tokens, formats)
    figures |= link_figures(bench.slow[geometry.expert_bytes])
    return Calibrated(found._replace(platform=sealed(known)), figures, own, errors)


def _curved(found: Fitted, tokens: dict[str, dict[int, Figure]]) -> Fitted:
    """Replace the straight line over tokens with the measured times of several tokens."""
    compute = found.platform.compute
    assert isinstance(compute, Measured)
    curves = {
        "expert_ns": compute.expert_ns + compute.expert_ns_per_token,
        "expert_ns_per_token": 0,
        "dense_by_tokens": in_times(tokens["dense_ns"]),
        "expert_by_tokens": in_times(tokens["expert_ns"]),
    }
    return found._replace(platform=found.platform.model_copy(update={"compute": compute.model_copy(update=curves)}))


def _named(tokens: dict[str, dict[int, Figure]], formats: dict[str, Figure]) -> dict[str, Figure]:
    """Return the figures under the names that are printed."""
    named = {f"{what[:-3]}.{n}_tokens_ns": figure for what, by in tokens.items() for n, figure in by.items()}
    return named | {f"expert.{name}_ns": figure for name, figure in formats.items()}


def _run(
    bench: Bench,
    geometry: Geometry,
    config: ReplayConfig,
    seeds: Sequence[int],
    throttle: float | None,
    done: Callable[[], None],
) -> tuple[list[Durations], list[tuple[Trace, float]]]:
    """Return the durations, and each trace with its nanoseconds per decoded token."""
    durations, runs = [], []
    for seed in seeds:
        trace = trace_of(geometry, seed)
        ran, lasted = bench.measured(trace, config, throttle)
        durations.append(lasted)
        runs.append((trace, float(ran.pass_ns[1:].mean())))
        done()
    return durations, runs


def _error(trace: Trace, measured: float, config: ReplayConfig, platform: Path) -> float:
    again = replayed(trace, config.model_copy(update={"platform": str(platform)}))
    return float(again.pass_ns[1:].mean()) / measured - 1


def link_figures(slow: SlowTier) -> dict[str, Figure]:
    """Measure the bytes per second of one reader by size of read, and of several by their number."""
    largest = slow.layout.size(0)
    by_size = {f"link.read_{size}": _alone(slow, size) for size in SIZES if size < largest}
    return by_size | {f"link.lanes_{lanes}": _together(slow, lanes) for lanes in LANES}


def _alone(slow: SlowTier, size: int) -> Figure:
    into = slow.buffer()
    took = []
    for read in range(READS):
        begin = time.perf_counter_ns()
        slow.read_bytes(slow.layout.offset(_spread(slow, read)), into[:size])
        took.append(time.perf_counter_ns() - begin)
    each = figure_of(took)
    rate = size / each.value * SECOND
    return Figure(rate, rate * (each.spread or 0.0) / each.value, READS)


def _together(slow: SlowTier, lanes: int) -> Figure:
    """Measure reads of whole experts by several threads at once."""
    buffers = [slow.buffer() for _ in range(lanes)]
    begin = time.perf_counter_ns()
    threads = [threading.Thread(target=_reads, args=(slow, buffer, lane, lanes)) for lane, buffer in enumerate(buffers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Figure(READS * slow.layout.size(0) / (time.perf_counter_ns() - begin) * SECOND, None, READS)


def _reads(slow: SlowTier, into: torch.Tensor, lane: int, lanes: int) -> None:
    for read in range(lane, READS, lanes):
        y = _spread(slow, read)
        slow.read_bytes(slow.layout.offset(y), into[: slow.layout.padded(y)])


def _spread(slow: SlowTier, read: int) -> int:
    """Return experts that are far from each other, so that no reader benefits from the one before."""
    return read * 37 % slow.layout.count


def document(found: Calibrated, device: str) -> dict[str, Any]:
    """Return the document that `calibrate --json` prints."""
    worst = max(found.held_out.values(), key=abs)
    mape = fmean(map(abs, found.held_out.values()))
    held = {"cells": len(found.held_out), "mape": mape, "bias": fmean(found.held_out.values()), "worst": worst}
    about = found.fitted.platform.calibration
    return {
        "method": about.method if about else "",
        "device": device,
        "platform": found.fitted.platform.name,
        "figures": {name: figure._asdict() for name, figure in found.figures.items()},
        "fit": {"cells": 4, "mape": found.on_itself},
        "held_out": held,
        "warnings": list(found.fitted.warnings),
    }


# -- Times of dense parts and experts by token count, and of experts by format, each timed alone.

TOKENS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 12  #: of all token counts in turns, so that a machine that changes changes all of them
COLD = 8  #: experts in turns: more than a processor's caches hold


def by_tokens(bench: Bench, geometry: Geometry) -> dict[str, dict[int, Figure]]:
    """Measure the nanoseconds of a layer's dense part and of an expert, by tokens."""
    stored, layers = layout_of(geometry).format(0), max(1, geometry.layers - 1)
    slots = _slots(bench, stored)
    turns = list(enumerate(TOKENS * ROUNDS))  # never the same weights twice in a row: a cache would have them
    dense = [lambda n=n, at=at: bench.layers.dense(geometry.layers - 1 - at % layers, n) for at, n in turns]
    expert = [lambda n=n, at=at: bench.layers.expert(slots[at % len(slots)], stored.dtype, n) for at, n in turns]
    return {"dense_ns": _timed(dense), "expert_ns": _timed(expert)}


def _format(bench: Bench, geometry: Geometry, bits: int) -> Figure:
    """Measure the nanoseconds of an expert for one token at these bits; integers are unpacked first."""
    stored = layout_of(geometry, bits).format(0)
    slots = _slots(bench, stored)
    timed = [lambda at=at: bench.layers.expert(slots[at % len(slots)], stored.dtype, 1) for at in range(ROUNDS)]
    return figure_of([_took(each) for each in timed])


def _slots(bench: Bench, stored: Format) -> list[torch.Tensor]:
    """Return random bytes of small numbers, on the device."""
    device = bench.layers.device
    bench.layers.warm_up([stored])
    return [torch.randint(0, 60, (stored.size,), dtype=torch.uint8).to(device) for _ in range(COLD)]


def _timed(calls: Sequence[Callable[[], object]]) -> dict[int, Figure]:
    """Time the calls in turns; the first turn warms up and is not counted."""
    for call in calls[: len(TOKENS)]:
        call()
    took = [_took(call) for call in calls]
    return {tokens: figure_of(took[at :: len(TOKENS)]) for at, tokens in enumerate(TOKENS)}


def _took(call: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def in_times(figures: dict[int, Figure]) -> tuple[tuple[int, float], ...]:
    """Return the points of a platform, relative to one token and never falling."""
    times = accumulate((figure.value / figures[1].value for figure in figures.values()), max)
    return tuple(zip(figures, times, strict=True))


# -- A platform from the durations of measured runs: what this machine and this runtime cost. Figures are means, trimmed
# -- by 2 % at both ends, and no medians: waits add up, tails included.


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
            expert_by_size=tuple((size, each.value / by_size[max(by_size)].value) for size, each in by_size.items()),
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
    many = [expert for expert in experts if expert.tokens > 1]
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
    alone = [expert for expert in experts if not expert.beside_link and expert.tokens == 1]
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
    return figure_of([value(item) for item in items])


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
