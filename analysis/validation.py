"""A live run beside replays of the same requests: what differs, by how much, and whether that is allowed.

Two replays stand beside each live run. The *closed loop* replays what the live run itself recorded, so it must make
the same decisions to the last event, whatever the policies. The *open loop* replays the baseline trace. Policies that
leave the model's output alone allow it no difference either; for the others it is the error of replaying a recording
that does not react, and has tolerances.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from moereplay.analysis.divergence import Divergence, first_choice, first_divergence
from moereplay.analysis.ratios import RATIOS, quotient
from moereplay.results.result import Result, ResultError, Row
from moereplay.results.spent import spent
from moereplay.results.validation import LAYER_COUNTERS
from moereplay.traces.schema import Frozen, Trace

TIMES = ("TTFT ms", "TPOT ms")


class Tolerances(Frozen):
    """How far an open-loop replay may be from the live run."""

    hit_rate: float = Field(default=0.01, ge=0)  #: absolute
    time: float = Field(default=0.02, ge=0)  #: of TTFT and TPOT, relative to the live run's


class Measure(NamedTuple):
    """One number of both runs; None where there was nothing to measure."""

    name: str
    live: float | None
    replayed: float | None
    relative: bool = False  #: whether `error` and `allowed` are shares of the live number
    allowed: float | None = None  #: None: reported without a limit

    @property
    def error(self) -> float | None:
        """Replayed minus live, as a share of live if `relative`; None if either is missing or live is zero."""
        if self.live is None or self.replayed is None:
            return None
        difference = self.replayed - self.live
        if not self.relative:
            return difference
        return difference / self.live if self.live else None

    @property
    def within(self) -> bool:
        """Whether the error is allowed; numbers that only one of the runs has are not."""
        if self.allowed is None or self.live == self.replayed:
            return True
        return self.error is not None and abs(self.error) <= self.allowed


class Runs(NamedTuple):
    """Results of one configuration on the same requests, all with their event logs or all without."""

    live: Result
    replayed: Result  #: of the baseline trace
    closed: Result | None = None  #: replay of what the live run recorded
    recorded: Trace | None = None  #: what the live run recorded: the model's own choices, given what the policies did


@dataclass(frozen=True)
class Comparison:
    """One policy set, live beside replayed."""

    name: str
    config: Row
    about: Row  #: of the replay
    exact: bool  #: whether the open loop may not differ at all
    measures: tuple[Measure, ...]
    layers: tuple[Row, ...]  #: per layer, LAYER_COUNTERS of either run as `live_*` and `replayed_*`
    events: int  #: that both logs have; 0 without logs
    open_loop: Divergence | None
    closed_loop: Divergence | None
    closed_ran: bool
    quality: Mapping[str, float | None]  #: `results.validation.QUALITY`, or empty if it was not measured

    @property
    def passed(self) -> bool:
        """Whether everything that differs is allowed to."""
        return not self.complaints()

    def complaints(self) -> list[str]:
        """What is not allowed, one line each."""
        wrong = []
        if self.closed_loop is not None:
            wrong.append(f"closed loop: {self.closed_loop.text()}")
        if self.exact and self.open_loop is not None:
            wrong.append(self.open_loop.text())
        outside = [measure for measure in self.measures if not self.exact and not measure.within]
        return wrong + [f"{measure.name} is outside its tolerance of {measure.allowed:g}" for measure in outside]

    def verdict(self) -> str:
        """identical, differs, within tolerance, or outside tolerance."""
        if self.open_loop is None and self.closed_loop is None:
            return "identical"
        if self.exact or self.closed_loop is not None:
            return "differs"
        return "within tolerance" if self.passed else "outside tolerance"

    @property
    def lam(self) -> float | None:
        """How strongly routing follows the cache; None if its policy has no such parameter."""
        found = re.search(r":lam=([^:]+)", str(self.about["policies"]["routing"]))
        return float(found[1]) if found else None


def compare(
    name: str,
    runs: Runs,
    trace: Trace,
    tolerances: Tolerances | None = None,
    quality: Mapping[str, float | None] | None = None,
) -> Comparison:
    """Compare runs of one configuration on the requests of `trace`, which both replays and the live run had.

    Raises ResultError if they are not of one configuration.
    """
    live, replayed, closed, recorded = runs
    for other in (replayed, closed):
        if other is not None and other.config != live.config:
            raise ResultError(f"{name}: the runs have different configurations; compare runs of one")
    choice = recorded and first_choice(recorded, trace, str(live.config["passes"]))
    allowed = tolerances or Tolerances()
    exact = "open-loop" not in replayed.about["label"]
    return Comparison(
        name=name,
        config=replayed.config,
        about=replayed.about,
        exact=exact,
        measures=_measures(live, replayed, Tolerances(hit_rate=0, time=0) if exact else allowed),
        layers=tuple(_layers(live, replayed)),
        events=min(len(live.events), len(replayed.events)),
        open_loop=choice or first_divergence(live, replayed, trace),
        closed_loop=None if closed is None else first_divergence(live, closed, trace),
        closed_ran=closed is not None,
        quality=quality or {},
    )


def _measures(live: Result, replayed: Result, allowed: Tolerances) -> tuple[Measure, ...]:
    ours, theirs = _numbers(live), _numbers(replayed)
    limits = {"hit rate": allowed.hit_rate, "TTFT ms": allowed.time, "TPOT ms": allowed.time}
    return tuple(Measure(name, ours[name], theirs[name], name in TIMES, limits.get(name)) for name in ours)


def _numbers(result: Result) -> dict[str, float | None]:
    """As `analysis.metrics` defines them."""
    totals, (first, decode_ns, passes) = result.totals, spent(result.per_request)
    return {
        "hit rate": RATIOS["hit_rate"].of(totals),
        "collisions": totals["collisions"],
        "GB moved": (totals["bytes_demand"] + totals["bytes_prefetch"]) / 1e9,
        "TTFT ms": quotient(sum(first), len(first) * 1e6),
        "TPOT ms": quotient(decode_ns, passes * 1e6),
    }


def _layers(live: Result, replayed: Result) -> list[Row]:
    """A row per layer, phases summed."""
    ours, theirs = _by_layer(live), _by_layer(replayed)
    nothing = dict.fromkeys(LAYER_COUNTERS, 0)
    return [
        {"layer": layer}
        | {f"live_{name}": count for name, count in ours.get(layer, nothing).items()}
        | {f"replayed_{name}": count for name, count in theirs.get(layer, nothing).items()}
        for layer in sorted({*ours, *theirs})
    ]


def _by_layer(result: Result) -> dict[int, dict[str, int]]:
    sums: dict[int, dict[str, int]] = {}
    for row in result.per_layer:
        found = sums.setdefault(row["layer"], dict.fromkeys(LAYER_COUNTERS, 0))
        for name in LAYER_COUNTERS:
            found[name] += row[name]
    return sums
