"""Run a trace on real threads, one configuration after the other in the same memory."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moereplay.results.counters import PHASES
from moereplay.results.result import Result, Row
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.replay import Plan, plan, report, report_measured
from moereplay.tracegen.offload.compute import Layers, experts_only, format_at, layers_of, shape_of
from moereplay.tracegen.offload.durations import Durations, Step, as_machine
from moereplay.tracegen.offload.machine import Decider, RealMachine, undisturbed
from moereplay.tracegen.offload.memory import Arena, Slots, arenas_of
from moereplay.tracegen.offload.part import AUTO, planned, way_of
from moereplay.tracegen.offload.slow_tier import Copies, SlowTier, faults_named, throttled
from moereplay.traces.schema import Trace

SPARE_SLOTS = 2  #: the buffer of a demand that is not admitted, and one to spare
#: Slow tiers by the bytes of an expert at each layer: one for each precision.
SlowTiers = Mapping[tuple[int, ...], SlowTier]


class Ran(NamedTuple):
    """One run: what its engine counted, and when each pass ended."""

    result: Result
    pass_ns: np.ndarray  #: (passes,) nanoseconds
    decisions: str = ""  #: of a real run: who decided, one of `decisions.WAYS`
    gate_ns: float = 0.0  #: and what that took at a gate, mean
    engine_ns: float = 0.0  #: of compute's time per pass: threads handed over, the engine decided


def check_measurable(trace: Trace, config: ReplayConfig) -> Plan:
    """Raises ConfigError or PolicyError for what no real run can do."""
    ready = planned(trace, config)
    check_computable(ready)
    return ready


def check_computable(ready: Plan) -> None:
    """Raise ConfigError for experts or precisions that torch cannot compute."""
    shape_of(ready.origin.geometry)
    for bits in bits_of(ready):
        format_at(bits)


def bits_of(ready: Plan) -> tuple[float, ...]:
    """Return the bits of the precisions of a run, the most precise first."""
    miss = ready.chosen.miss
    return tuple(miss.policy.bits(miss.params)) or (ready.origin.geometry.expert_bits,)


def bits_of_all(plans: Iterable[Plan]) -> list[float]:
    """Return the bits of all precisions of some runs, the most precise first."""
    return sorted({bits for ready in plans for bits in bits_of(ready)}, reverse=True)


def slots_needed(ready: Plan, precision: int = 0) -> int:
    """Return the maximum number of copies of each precision in the fast tier."""
    side = ready.chosen.prefetch.policy.side_slots(ready.chosen.prefetch.params)
    geometry = ready.layout.geometry
    fit = ready.capacity.total // min(ready.layout.tiers[precision])
    return min(fit, geometry.layers * geometry.experts) + side + SPARE_SLOTS


def slots_of(plans: Iterable[Plan]) -> dict[int, int]:
    """Return the maximum number of slots that any of these runs needs, by bytes of a copy."""
    needed: dict[int, int] = {}
    for ready in plans:
        for precision, sizes in enumerate(ready.layout.tiers):
            size = max(sizes)
            needed[size] = max(needed.get(size, 0), slots_needed(ready, precision))
    return needed


@dataclass(frozen=True)
class Bench:
    """Memory, weights and slow tier that all runs share."""

    arenas: Mapping[int, Arena]  #: by bytes of a copy
    layers: Layers
    on_cpu: Layers  #: the CPU's computations, in parallel with the accelerator
    slow: SlowTiers
    decisions: str = AUTO

    @classmethod
    def of(cls, plans: Sequence[Plan], slow: SlowTiers, most_tokens: int, device: str, decisions: str = AUTO) -> Bench:
        """Open the bench of these runs. Raises ConfigError if their slots do not fit into this machine's memory."""
        arenas, geometry = arenas_of(slots_of(plans), device), plans[0].origin.geometry
        layers, on_cpu = layers_of(geometry, most_tokens, device), Layers(experts_only(geometry), most_tokens, "cpu")
        return cls(arenas, layers, on_cpu, slow, decisions)

    @property
    def label(self) -> str:
        """Label of the slow tier in rows of results."""
        return next(iter(self.slow.values())).label

    def measured(self, trace: Trace, config: ReplayConfig, throttle: float | None = None) -> tuple[Ran, Durations]:
        """Run with real reads and compute, and return the result with the duration of every activity.

        Raises ConfigError if the slow tier fails, AssertionError for an expert of wrong bytes.
        """
        ready = check_measurable(trace, config)
        way = way_of(ready, self.decisions)
        decider, tiers = Decider(trace, ready, way), ready.layout.tiers
        copies = Copies([throttled(self.slow[sizes], throttle) for sizes in tiers])
        slots = Slots([self.arenas[max(sizes)] for sizes in tiers], copies)
        machine = RealMachine(self.layers, self.on_cpu, slots, copies)
        gc.collect()
        try:
            with faults_named(), undisturbed():
                ran = decider.run(machine.machine, slots)
                machine.end(ran.end_ns)
        finally:
            machine.close()
        lasted, of_passes = machine.durations, ready.spec(True).source_of(trace).passes()
        result = _settled(report_measured(ran, ready), lasted.steps(), [each.leader for each in of_passes])
        pass_ns = np.diff(lasted.passes)
        return Ran(result, pass_ns, way, lasted.gate_ns, lasted.engine_ns / len(pass_ns)), lasted


def _settled(result: Result, steps: Sequence[Step], leaders: Sequence[tuple[int, int]]) -> Result:
    """Charge dense parts, experts and stalls as in a replay of the run's durations; `leaders` by pass.

    The engine measures only the threads' work, and would charge its own time as stalls.
    """
    layers, requests = defaultdict[tuple[int, str], Counter[str]](Counter), defaultdict[int, Counter[str]](Counter)
    for step in steps:
        request, phase = leaders[step.step_pass]
        parts = {"dense_ns": step.dense, "expert_ns": step.expert, "stall_ns": step.stall}
        layers[step.layer, PHASES[phase]].update(parts)
        requests[request].update(parts)
    per_layer = [row | layers[row["layer"], row["phase"]] for row in result.per_layer]
    per_request = [_with(row, requests[row["request"]]) for row in result.per_request]
    totals = result.totals | {
        name: sum(row[name] for row in per_layer) for name in ("dense_ns", "expert_ns", "stall_ns")
    }
    return replace(result, totals=totals, per_layer=per_layer, per_request=per_request)


def _with(row: Row, parts: Mapping[str, int]) -> Row:
    return row | {name: value for name, value in parts.items() if name in row}


def replayed(trace: Trace, config: ReplayConfig, durations: Durations | None = None) -> Ran:
    """Replay a run on the simulated machine: of the configuration's platform, or with the measured durations."""
    ready = plan(trace, config)
    spec, machine = ready.spec(True), as_machine(durations) if durations else None
    result = report(reference.run(spec.source_of(trace), spec, machine), ready)
    begins = [event.t0 for event in result.events if event.kind == "dense" and event.layer == 0]
    return Ran(result, np.diff([*begins, result.totals["time_ns"]]))
