"""Predict a run from the bytes that it read, in closed form, by the rules of docs/semantics.md.

Published runs state how many bytes a token read, not which experts. So the misses of a step are modelled as binomial:
each of k demanded experts misses with the token's share of missed bytes, and every expert has the mean size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, floor, inf
from typing import NamedTuple

import numpy as np

from moereplay.calibration.files import Series
from moereplay.calibration.runs import Run, Sizes
from moereplay.simulator.calibration import Band
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Roofline
from moereplay.simulator.rates import MIB, NS, curve
from moereplay.simulator.step_time import compute_ends, landings
from moereplay.simulator.wires import Link
from moereplay.traces.units import MS

#: Times by which a run is compared: the first one that was measured.
TIMES = ("tpot_median_ms", "tpot_ms")
PUBLISHED, REPLAY = "published", "replay"
Columns = Mapping[str, float]


class StepPrices(NamedTuple):
    """Times of one step of a model on a machine, in nanoseconds."""

    k: int  #: experts demanded
    load: float  #: compute time per fetched expert
    latency: float  #: of a transfer; latencies of up to `depth` transfers overlap
    start: float  #: additional latency on an idle link
    wire: float  #: transmission of an expert
    depth: int  #: concurrent transfers
    expert: float  #: compute of one expert
    waits_for_all: bool  #: no overlap: reads begin after all requests, compute after all arrivals
    #: Shares of an expert's matrices in the order of reading; empty where experts cross the link whole.
    matrices: tuple[int, ...] = ()
    batches: tuple[float, ...] = ()  #: [m] transmission of a batch of m experts, matrix by matrix


def waiting(prices: StepPrices) -> np.ndarray:
    """Return the stall of a step with 0, 1, ... k fetched experts, without loading and compute, (k + 1,) ns."""
    k, missed = prices.k, np.arange(prices.k, -1, -1)  # the most first
    ready, loaded = prices.latency + prices.start, missed * float(prices.load)
    if prices.matrices and prices.waits_for_all:
        stalls = ready + np.array(prices.batches)[missed]
    elif prices.matrices:
        stalls = _batch_ends(prices, ready, np.array(prices.batches)[missed]) - k * prices.expert
    else:
        issued = [loaded if prices.waits_for_all else np.full(k + 1, (i + 1) * prices.load) for i in range(k)]
        lands = landings(issued, prices.depth, prices.latency, prices.wire, prices.start)
        if prices.waits_for_all:
            stalls = np.array(lands)[missed - 1, range(k + 1)] - loaded
        else:
            hits = loaded + (k - missed) * prices.expert
            stalls = compute_ends(hits, missed, lambda i, n: lands[i][:n], lambda i, n: prices.expert)
            stalls = stalls - loaded - k * prices.expert
    return np.where(missed > 0, stalls, 0)[::-1]


def miss_ns(prices: StepPrices) -> tuple[float, float]:
    """Return what the first miss of a step costs, and each further one where all miss, loading included."""
    costs = waiting(prices) + np.arange(prices.k + 1) * prices.load
    return float(costs[1]), float(costs[-1] - costs[1]) / max(1, prices.k - 1)


def _batch_ends(prices: StepPrices, ready: float, wire: np.ndarray) -> np.ndarray:
    """Return when a step ends whose misses cross as one batch after loading; compute follows in stages."""
    computed, now, done, whole = prices.k * prices.expert, np.zeros(len(wire)), 0, sum(prices.matrices)
    for matrix in prices.matrices:
        done += matrix
        now = np.maximum(now, ready + wire * done / whole) + computed * matrix / whole
    return now


def mean_waiting(prices: StepPrices, share: np.ndarray) -> np.ndarray:
    """Return the expected stall of a step, (T,) ns, if each demanded expert misses with probability share (T,)."""
    k = prices.k
    counts = np.arange(k + 1)
    ways = np.array([comb(k, missed) for missed in range(k + 1)], float)
    miss = np.clip(share, 0, 1)[:, None]
    return (ways * miss**counts * (1 - miss) ** (k - counts)) @ waiting(prices)


# -- a platform as a run used it


def as_run(platform: Platform, run: Run) -> Platform:
    """Return the platform with the lanes and overlap of the run, and the rate at which such a run reads.

    A run without a cache has no loading cost.
    """
    figures: dict[str, object] = {} if run.lanes is None else {"depth": run.lanes}
    about = platform.calibration
    if run.serial and about is not None and about.serial_bytes_per_s is not None:
        figures["bytes_per_s"] = about.serial_bytes_per_s
    changed: dict[str, object] = {
        "links": tuple(link.model_copy(update=figures) for link in platform.links),
        "overlap": "none" if run.serial else platform.overlap if not run.cell.text("overlap") else "arrival",
        "calibration": None,
    }
    if not run.cached:
        changed["loading"] = platform.loading.model_copy(update={"ns_per_expert": 0, "ns_per_mib": 0})
    return platform.model_copy(update=changed)


def step_prices(machine: Platform, sizes: Sizes) -> StepPrices:
    """Return the times of one step on the machine. Raises ConfigError for several links."""
    if len(machine.links) > 1:
        raise ConfigError(
            f"platform {machine.name} has several links: expected one, because byte counts do not name the link"
        )
    link = next(iter(machine.links))
    size = round(sizes.expert_bytes)
    matrices = sizes.matrices if link.by_matrix else ()
    return StepPrices(
        k=sizes.k,
        load=machine.loading.ns(size),
        latency=link.idle_ns,
        start=link.start_ns + link.start_ns_per_mib * first_read(link, sizes) / MIB,
        wire=link.wire_ns(size),
        depth=link.depth,
        expert=expert_ns(machine, sizes),
        waits_for_all=machine.overlap == "none",
        matrices=matrices,
        batches=_batches(link, sizes) if matrices else (),
    )


def first_read(link: Link, sizes: Sizes) -> float:
    """Return the bytes of the first read of a transfer: an expert's first matrix, else one of its equal reads."""
    if link.by_matrix:
        return sizes.expert_bytes * sizes.matrices[0] / sum(sizes.matrices)
    return sizes.expert_bytes / link.reads


def _batches(link: Link, sizes: Sizes) -> tuple[float, ...]:
    """Return the transmission of 0 to k experts in ns; few reads occupy few lanes."""
    parts = len(sizes.matrices)
    sized = curve(link.by_size).at(floor(sizes.expert_bytes / parts)) if link.by_size else None
    rate = sized[0] / sized[1] if sized else link.bytes_per_s
    lane = link.lane_bytes_per_s or inf
    each = [min(rate, min(link.depth, missed * parts) * lane) for missed in range(1, sizes.k + 1)]
    return (0.0, *(missed * sizes.expert_bytes / speed * NS for missed, speed in enumerate(each, 1)))


def expert_ns(machine: Platform, sizes: Sizes) -> float:
    """Return the compute time of one expert for one token in ns, at the rate of its weight format."""
    compute = machine.compute
    if not isinstance(compute, Roofline):
        return compute.expert_ns + compute.expert_ns_per_token
    return sizes.expert_bytes / compute.expert_rate(sizes.weight_format) * NS + compute.launch_ns


def compute_ms(machine: Platform, run: Run) -> float:
    """Return the compute of a token in ms: dense weights, demanded experts and gate decisions."""
    sizes, compute = run.sizes, machine.compute
    experts = run.demand_bytes / sizes.expert_bytes * expert_ns(machine, sizes)
    gates = sizes.layers * machine.loading.gate_ns
    if not isinstance(compute, Roofline):
        return (compute.pass_ns + sizes.layers * compute.dense_ns + experts + gates) / MS
    dense = (sizes.dense_bytes or 0) / compute.memory_bytes_per_s * NS + sizes.layers * compute.launch_ns
    return (dense + experts + gates) / MS


def waiting_ms(machine: Platform, run: Run) -> np.ndarray:
    """Return the stall of each token, (T,) ms."""
    return run.sizes.layers * mean_waiting(step_prices(machine, run.sizes), run.missed_share) / MS


def loading_ms(machine: Platform, run: Run) -> np.ndarray:
    """Return the loading time of each token, (T,) ms."""
    each = machine.loading.ns(round(run.sizes.expert_bytes))
    return run.missed_bytes / run.sizes.expert_bytes * each / MS


# -- predictions


@dataclass(frozen=True)
class Prediction:
    """One cell: predicted and measured columns, or the reason for refusing it."""

    cell: str
    device: str
    role: str  #: fit, held_out
    basis: str = ""  #: published, replay
    reason: str = ""  #: for refusing the cell, or for not comparing its time
    predicted: Columns = field(default_factory=dict)
    measured: Columns = field(default_factory=dict)
    compared: bool = True  #: its time counts in summaries
    more: Mapping[str, object] = field(default_factory=dict)  #: entries that only this basis has

    @property
    def refused(self) -> bool:
        """True if nothing is predicted."""
        return not self.predicted

    @property
    def error(self) -> dict[str, float]:
        """predicted / measured - 1 by column, where both are known and the measured value is not 0."""
        both = {name: (value, self.measured[name]) for name, value in self.predicted.items() if name in self.measured}
        return {name: value / was - 1 for name, (value, was) in both.items() if was}

    @property
    def time_error(self) -> float | None:
        """Error of the time per token; None if it was not measured or is not compared."""
        errors = self.error
        return next((errors[name] for name in TIMES if name in errors), None) if self.compared else None

    def document(self) -> dict[str, object]:
        """Return the cell as `moereplay evidence --json` prints it."""
        return {
            "cell": self.cell,
            "device": self.device,
            "status": "refused" if self.refused else "predicted",
            "reason": self.reason,
            "basis": self.basis,
            "role": self.role,
            "measured": rounded(self.measured),
            "predicted": rounded(self.predicted),
            "error": rounded(self.error),
            **self.more,
        }


def rounded(columns: Columns) -> dict[str, float]:
    """Round to six digits, as documents print numbers."""
    return {name: float(f"{value:.6g}") for name, value in columns.items()}


def predicted(platform: Platform, run: Run) -> dict[str, float]:
    """Predict columns from published hits or bytes: means per token, and the time of the median token."""
    machine = as_run(platform, run)
    compute, waiting, loading = compute_ms(machine, run), waiting_ms(machine, run), loading_ms(machine, run)
    each = compute + waiting + loading
    return columns(run, compute, waiting, loading) | {"tpot_median_ms": float(np.median(each))}


def columns(run: Run, compute: float, waiting: np.ndarray, loading: np.ndarray) -> dict[str, float]:
    """Return means per token: times in ms, and tokens per second."""
    tpot = compute + float(waiting.mean()) + float(loading.mean())
    waited = {"io_ms" if run.serial else "stall_ms": float(waiting.mean())}
    speed = {"tok_s": 1000 / tpot} if tpot else {}
    return {"tpot_ms": tpot, **speed, "compute_ms": compute, **waited, "mgmt_ms": float(loading.mean())}


def measured(run: Run, names: Iterable[str]) -> dict[str, float]:
    """Return the measured values of these columns, from the row, else from the log."""
    known = {name: run.cell.amount(name) for name in names}
    logged = {} if run.series is None else _logged(run, run.series)
    found = {name: logged.get(name) if value is None else value for name, value in known.items()}
    return {name: value for name, value in found.items() if value is not None}


def _logged(run: Run, series: Series) -> dict[str, float | None]:
    """Return columns from a log: means per token, and the time of the median token."""
    parts = {name: run.mean(name) for name in ("compute_ms", "io_ms", "stall_ms", "mgmt_ms")}
    return parts | {"tpot_ms": float(series.wall_ms.mean()), "tpot_median_ms": float(np.median(series.wall_ms))}


def band_of(predictions: Sequence[Prediction]) -> Band | None:
    """Return the range of measured / predicted over the compared times; None without any."""
    ratios = [1 / (1 + error) for each in predictions if (error := each.time_error) is not None and error > -1]
    if not ratios:
        return None
    least, median, most = np.quantile(ratios, [0, 0.5, 1]).tolist()
    return Band(runs=len(ratios), least=least, median=median, most=most)


def summary(predictions: Sequence[Prediction]) -> dict[str, object]:
    """Summarise the errors of compared times; values are None without any."""
    known = [(error, each.cell) for each in predictions if (error := each.time_error) is not None]
    if not known:
        return {"cells": 0, "median_abs_error": None, "mape": None, "bias": None, "worst": None, "worst_cell": None}
    values = np.array([error for error, _ in known])
    worst, worst_cell = max(known, key=lambda each: abs(each[0]))
    return {
        "cells": len(known),
        "median_abs_error": float(np.median(np.abs(values))),
        "mape": float(np.abs(values).mean()),
        "bias": float(values.mean()),
        "worst": worst,
        "worst_cell": worst_cell,
    }
