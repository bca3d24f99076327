"""Runs of a trace on real threads, one after the other in the same memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from results.result import Event, Result
from simulator.config import ReplayConfig
from simulator.errors import ConfigError
from simulator.reference import engine as reference
from simulator.replay import Plan, plan, report, source_of
from tracegen.offload.arena import Arena, Slots
from tracegen.offload.compute import Layers, shape_of
from tracegen.offload.decisions import AUTO, Decider, way_of
from tracegen.offload.device import free_memory
from tracegen.offload.durations import Durations, as_machine
from tracegen.offload.machine import RealMachine
from tracegen.offload.slow_tier import SlowTier, Throttled
from traces.schema import Geometry, Trace

SPARE_SLOTS = 2  #: the buffer of a demand that is not admitted, and one to spare
SWITCH_S = 1e-4  #: after which another Python thread may run


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
    return ready.capacity.total // min(ready.layout.tiers[0]) + side + SPARE_SLOTS


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
        size = max(geometry.expert_bytes)
        if slots * size > (free := free_memory(device)):
            raise ConfigError(
                f"the cache needs {slots * size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; take less --capacity"
            )
        return cls(Arena(slots, size, device), Layers(geometry, most_tokens, device), slow, decisions)

    def measured(self, trace: Trace, config: ReplayConfig, throttle: float | None = None) -> tuple[Ran, Durations]:
        """A real run, and how long everything took.

        Raises ConfigError where the slow tier fails, AssertionError for an expert of wrong bytes.
        """
        ready = check_measurable(trace, config)
        way = way_of(ready, self.decisions)
        decider, slow = Decider(trace, ready, way), self._throttled(throttle)
        machine = RealMachine(self.layers, slots := Slots(self.arena, slow), slow)
        try:
            with _undisturbed():
                ran = decider.run(machine.machine, slots)
        except OSError as error:
            raise ConfigError(f"the slow tier failed: {_words(error)}; nothing of this run is kept") from None
        finally:
            machine.close()
        result = report(ran, ready)
        about = result.about | {"label": "MEASURED", "seconds": "measured", "warning": None}
        lasted = machine.durations
        return Ran(replace(result, about=about), np.diff(lasted.passes), way, lasted.gate_ns), lasted

    def _throttled(self, throttle: float | None) -> SlowTier:
        if throttle is None:
            return self.slow
        return Throttled(self.slow, throttle)


def replayed(trace: Trace, config: ReplayConfig, durations: Durations | None = None) -> Ran:
    """The same on the simulated machine: of the configuration's platform, or with durations that were measured."""
    ready = plan(trace, config)
    machine = as_machine(durations) if durations else None
    result = report(reference.run(source_of(trace, ready), ready.spec(True), machine), ready)
    return Ran(result, np.diff([*_pass_begins(result.events), result.totals["time_ns"]]))


def _pass_begins(events: Sequence[Event]) -> list[int]:
    return [event.t0 for event in events if event.kind == "dense" and event.layer == 0]


def _words(error: OSError) -> str:
    """File and reason. SimPy raises a copy of what a thread raised, without the file, and that as its cause."""
    own = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return f"{own.filename}: {own.strerror}" if own.filename else str(own)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No cycle collector; threads change places quickly."""
    before = sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.enable()
