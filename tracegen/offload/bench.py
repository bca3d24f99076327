"""Runs of a trace on real threads, one after the other in the same memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from results.result import Event, Result
from simulator.config import ReplayConfig
from simulator.errors import ConfigError
from simulator.reference import engine as reference
from simulator.replay import Plan, plan, report, report_measured, source_of
from tracegen.offload.arena import Arena, Slots, arena_of
from tracegen.offload.clock import undisturbed
from tracegen.offload.compute import Layers, shape_of
from tracegen.offload.decisions import AUTO, Decider, way_of
from tracegen.offload.durations import Durations, as_machine
from tracegen.offload.machine import RealMachine
from tracegen.offload.slow_tier import SlowTier, faults_named, throttled
from traces.schema import Geometry, Trace

SPARE_SLOTS = 2  #: the buffer of a demand that is not admitted, and one to spare


class Ran(NamedTuple):
    """One run: what its engine counted, and when each pass ended."""

    result: Result
    pass_ns: np.ndarray  #: (passes,) nanoseconds
    decisions: str = ""  #: of a real run: who decided, one of `decisions.WAYS`
    gate_ns: float = 0.0  #: and what that took at a gate, mean


def check_measurable(trace: Trace, config: ReplayConfig) -> Plan:
    """Raises ConfigError or PolicyError for what no real run can do."""
    ready = plan(trace, config)
    chosen = ready.chosen
    if chosen.miss.policy.uses_cpu(chosen.miss.params):
        raise ConfigError(
            f"miss {chosen.miss.text()}: a measured run has no CPU beside its accelerator; choose another"
        )
    if len(ready.layout.tiers) > 1:
        raise ConfigError(f"miss {chosen.miss.text()}: a measured run has experts at one precision; choose another")
    if len(ready.machine.links) > 1 or ready.machine.tiers:
        raise ConfigError(f"platform {ready.machine.name}: a measured run has one link and no lower tier")
    shape_of(trace.geometry)
    return ready


def slots_needed(ready: Plan) -> int:
    """As many copies as lie in the fast tier at most."""
    side = ready.chosen.prefetch.policy.side_slots(ready.chosen.prefetch.params)
    geometry = ready.layout.geometry
    fit = ready.capacity.total // min(ready.layout.tiers[0])
    return min(fit, geometry.layers * geometry.experts) + side + SPARE_SLOTS


@dataclass(frozen=True)
class Bench:
    """Memory, weights and slow tier that all runs share."""

    arena: Arena
    layers: Layers
    slow: SlowTier
    decisions: str = AUTO

    @classmethod
    def of(
        cls, geometry: Geometry, slow: SlowTier, slots: int, most_tokens: int, device: str, decisions: str = AUTO
    ) -> Bench:
        """Raises ConfigError where the slots do not fit this machine's memory."""
        arena = arena_of(slots, max(geometry.expert_bytes), device)
        return cls(arena, Layers(geometry, most_tokens, device), slow, decisions)

    def measured(self, trace: Trace, config: ReplayConfig, throttle: float | None = None) -> tuple[Ran, Durations]:
        """A real run, and how long everything took.

        Raises ConfigError where the slow tier fails, AssertionError for an expert of wrong bytes.
        """
        ready = check_measurable(trace, config)
        way = way_of(ready, self.decisions)
        decider, slow = Decider(trace, ready, way), throttled(self.slow, throttle)
        machine = RealMachine(self.layers, slots := Slots(self.arena, slow), slow)
        gc.collect()
        try:
            with faults_named(), undisturbed():
                ran = decider.run(machine.machine, slots)
        finally:
            machine.close()
        lasted = machine.durations
        return Ran(report_measured(ran, ready), np.diff(lasted.passes), way, lasted.gate_ns), lasted


def replayed(trace: Trace, config: ReplayConfig, durations: Durations | None = None) -> Ran:
    """The same on the simulated machine: of the configuration's platform, or with durations that were measured."""
    ready = plan(trace, config)
    machine = as_machine(durations) if durations else None
    result = report(reference.run(source_of(trace, ready), ready.spec(True), machine), ready)
    return Ran(result, np.diff([*_pass_begins(result.events), result.totals["time_ns"]]))


def _pass_begins(events: Sequence[Event]) -> list[int]:
    return [event.t0 for event in events if event.kind == "dense" and event.layer == 0]
