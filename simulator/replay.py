"""Replay a trace under a configuration: check, bind, run, report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from policies.contract import PolicyError
from results.result import Result, Row
from results.settings import setting_kinds
from simulator.capacity import Capacity, cliff, parse_capacity, surplus
from simulator.config import KINDS, SEMANTICS_VERSION, PolicySet, ReplayConfig
from simulator.errors import ConfigError
from simulator.foreknown import check_profile
from simulator.origin import Origin, origin_of
from simulator.platform import Platform, platform, times_of
from simulator.setting import Ran, Setting, Shape
from simulator.source import Source, TraceSource
from traces.schema import Geometry, Trace
from traces.spelling import hint

#: The first is the default. They give the same bytes; the reference is the specification, to be read.
ENGINES = ("compiled", "reference")


@dataclass(frozen=True)
class Plan:
    """A configuration checked against where its demand comes from, ready to run."""

    origin: Origin
    config: ReplayConfig
    chosen: PolicySet
    machine: Platform
    capacity: Capacity
    shape: Shape

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that the four policies use."""
        return frozenset().union(*(getattr(self.chosen, kind).needs for kind in KINDS))

    @property
    def warning(self) -> str | None:
        """What a reader should know of the capacity: that it is below one token's demand, or above everything."""
        geometry = self.shape.geometry
        tiers = self.shape.tiers
        return cliff(self.capacity, geometry, tiers[-1]) or surplus(self.capacity, geometry, tiers)

    def setting(self, log: bool) -> Setting:
        """What an engine needs beside its source."""
        times = times_of(self.machine, self.shape.geometry, self.shape.tiers)
        return Setting(self.config, self.shape, times, self.capacity.pools, log)


def plan(trace: Trace, config: ReplayConfig) -> Plan:
    """Check everything that can be checked before a replay. Raises ConfigError or PolicyError."""
    return plan_for(origin_of(trace), config)


def plan_for(origin: Origin, config: ReplayConfig) -> Plan:
    """`plan` for any origin of demand. Raises ConfigError or PolicyError."""
    chosen, machine = config.policy_set(), platform(config.platform)
    chosen.check(origin.capabilities, origin.lookahead_depth)
    if chosen.miss.policy.uses_cpu(chosen.miss.params) and machine.cpu is None:
        raise PolicyError(
            f"miss {chosen.miss.policy.name} needs a CPU, which platform {machine.name} does not describe"
        )
    tiers = _tiers(origin.geometry, chosen)
    prefetch, side = chosen.prefetch, _side_bytes(chosen, tiers)
    reserved = side if prefetch.policy.side_inside(prefetch.params) else 0
    capacity = parse_capacity(config.capacity, origin.geometry, config.scope, tiers, reserved)
    check_profile(config, chosen.eviction)
    _check_named("profile", config.profile, origin.geometry)
    _check_named("warm", config.warm, origin.geometry)
    _check_warm(config, capacity, tiers[0])
    return Plan(origin, config, chosen, machine, capacity, Shape(origin.geometry, tiers))


def check_engine(name: str) -> None:
    """Raises ConfigError for an engine that does not exist."""
    if name not in ENGINES:
        raise ConfigError(f"no engine called {name!r}: {hint(name, ENGINES)}")


def replay(trace: Trace, config: ReplayConfig, log: bool = False, engine: str = ENGINES[0]) -> Result:
    """Replay `trace`; the same arguments give the same result. Raises ConfigError, PolicyError or TraceError."""
    check_engine(engine)
    ready = plan(trace, config)
    if engine == "reference":
        return replay_source(_source(trace, ready), ready, log)
    return report(_run_compiled(trace, ready, log), ready)


def _source(trace: Trace, ready: Plan) -> TraceSource:
    config = ready.config
    return TraceSource(trace, config.passes, ready.chosen.prefetch, ready.needs, (config.lookahead, config.seed))


def _run_compiled(trace: Trace, ready: Plan, log: bool) -> Ran:
    """In machine code; after a dry run, if there is a user's own policy."""
    from simulator.compiled import engine as compiled  # LLVM takes a moment to import

    setting = ready.setting(log)
    if not ready.chosen.own:
        return compiled.run(trace, setting)
    from simulator.dry_run import dry_run, named_by_machine_code

    dry_run(trace, setting, ready.needs)
    with named_by_machine_code(ready.chosen):
        return compiled.run(trace, setting)


def replay_source(source: Source, ready: Plan, log: bool = False) -> Result:
    """Replay any source of demand, by the reference engine: it can be asked for one gate at a time."""
    from simulator.reference import engine as reference  # and SimPy, which no compiled replay needs

    return report(reference.run(source, ready.setting(log)), ready)


def report(ran: Ran, ready: Plan) -> Result:
    """What a finished run is worth reading for."""
    config = ready.config.model_dump(mode="json") | {kind: getattr(ready.chosen, kind).text() for kind in KINDS}
    ledger, events = ran.ledger, list(ran.events)
    counted = ledger.totals(ran.end_ns), ledger.per_layer(), ledger.per_request()
    return Result(config, setting_kinds(), *counted, _about(ready), events)


def _about(ready: Plan) -> Row:
    """Everything beside the configuration that a reader needs in order to trust a figure."""
    chosen = ready.chosen.priced(times_of(ready.machine, ready.shape.geometry, ready.shape.tiers))
    return {
        "label": _label(ready),
        "identity": ready.config.identity(ready.origin),
        "semantics": SEMANTICS_VERSION,
        "trace": ready.origin.digest,
        "model": ready.origin.model,
        "policies": {kind: getattr(chosen, kind).text(full=True) for kind in KINDS},
        "capacity_bytes": ready.capacity.total,
        "capacity_forms": ready.capacity.forms(),
        "side_bytes": _side_bytes(ready.chosen, ready.shape.tiers),
        "token_cycles": ready.capacity.token_cycles,
        "warning": ready.warning,
    }


def _label(ready: Plan) -> str:
    if ready.origin.live:
        return "LIVE, emulated"
    return "SIMULATED, open-loop" if ready.chosen.open_loop else "SIMULATED"


def _side_bytes(chosen: PolicySet, tiers: tuple[tuple[int, ...], ...]) -> int:
    """What the prefetch policy's own buffers hold, each as large as the largest expert."""
    return chosen.prefetch.policy.side_slots(chosen.prefetch.params) * max(tiers[0])


def _tiers(geometry: Geometry, chosen: PolicySet) -> tuple[tuple[int, ...], ...]:
    bits = chosen.miss.policy.bits(chosen.miss.params)
    if list(bits) != sorted(set(bits), reverse=True):
        raise PolicyError(f"miss {chosen.miss.text()}: bits must fall, the most precise first")
    return tuple(geometry.bytes_at(tier) for tier in bits) or (geometry.expert_bytes,)


def _check_named(setting: str, named: tuple[tuple[int, int], ...], geometry: Geometry) -> None:
    for (layer, expert), times in Counter(named).items():
        if times > 1:
            raise ConfigError(f"{setting} names expert {expert} of layer {layer} {times} times")
        if not (0 <= layer < geometry.layers and 0 <= expert < geometry.experts):
            raise ConfigError(
                f"{setting} names expert {expert} of layer {layer}; "
                f"the model has {geometry.layers} layers of {geometry.experts}"
            )


def _check_warm(config: ReplayConfig, capacity: Capacity, sizes: tuple[int, ...]) -> None:
    filled = [0] * len(capacity.pools)
    for layer, _ in config.warm:
        filled[layer if len(filled) > 1 else 0] += sizes[layer]
    for pool, (given, room) in enumerate(zip(filled, capacity.pools, strict=True)):
        if given > room:
            raise ConfigError(
                f"warm fills pool {pool} with {given:,} bytes, its capacity is {room:,}; name fewer experts"
            )
