"""Replay a trace under a configuration: check, bind, run, report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moereplay import policies
from moereplay.policies.contract import GIVEN_PROFILE, PolicyError
from moereplay.results.counters import MOST_BY_LAYER, PHASES, facts
from moereplay.results.remarks import with_routing
from moereplay.results.result import Result, Row
from moereplay.results.settings import setting_kinds
from moereplay.simulator.arrivals import arrival_times
from moereplay.simulator.calibration import one_token_only, parts_of, unlike_passes
from moereplay.simulator.capacity import (
    Capacity,
    check_experts,
    cliff,
    padded,
    parse_capacity,
    residents,
    sized,
    surplus,
)
from moereplay.simulator.config import KINDS, SEMANTICS_VERSION, Origin, PolicySet, ReplayConfig, origin_of
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import CopyLayout, FinishedRun, RunSpec, Sharing
from moereplay.simulator.platform import Measured, Peak, Platform, peak
from moereplay.simulator.platforms import platform
from moereplay.simulator.source import Source
from moereplay.simulator.times import Times, homes_of, times_of
from moereplay.simulator.wires import REST
from moereplay.traces.dense import assumption
from moereplay.traces.passes import longest_context
from moereplay.traces.schema import Geometry, Provenance, Trace
from moereplay.traces.texts import hint
from moereplay.traces.units import GB

#: The first is the default. Both give the same bytes; the reference is the specification.
ENGINES = ("compiled", "reference")
UNNAMED = Provenance().model  #: what a trace calls a model that has no name


@dataclass(frozen=True)
class Plan:
    """A configuration checked against the origin of its demand, ready to run."""

    origin: Origin
    config: ReplayConfig
    chosen: PolicySet
    machine: Platform
    capacity: Capacity
    layout: CopyLayout
    lower: tuple[int, ...]  #: bytes of the tiers between the fast and the slow one
    resident: tuple[tuple[int, int], ...] = ()  #: (layer, expert) that are in the fast tier for good
    longest: int = 0  #: positions in the KV cache at most, if the platform asks for its peak; 0: unknown
    arrivals: tuple[int, ...] = ()  #: of each request, ns; empty if all are there at the start
    by_layer: bool = False  #: whether rows per request and layer are kept

    @property
    def warning(self) -> str | None:
        """Warnings on the capacity and on unknown costs, or None."""
        return "; ".join(filter(None, (self.capacity_warning, self._shortage(), *self._doubts()))) or None

    @property
    def capacity_warning(self) -> str | None:
        """The part of `warning` that holds on any machine."""
        fewest = self.layout.fewest
        return cliff(self.capacity, self.layout.geometry, fewest, self.origin.per_token) or self.surplus

    @property
    def surplus(self) -> str | None:
        """Warning for a capacity that holds all copies, or None."""
        geometry = self.layout.geometry
        homes = _homes_of_pools(self.config, self.machine, geometry)
        return surplus(self.capacity, geometry, self.layout.taken, homes)

    def _shortage(self) -> str | None:
        """Return a warning if the machine's memory does not hold cache, buffers and dense weights."""
        of = self.peak
        if of is None or not of.will_page:
            return None
        first, total = ("will page: ", f" are {of.total / GB:.4g} GB,") if of.stated else ("", " are")
        each = self.machine.fault_ns
        price = f"cost {each / 1000:g} us each here; no replay knows how many" if each else "no price counts"
        return (
            f"{first}{of.in_words}{total} more than the memory of {self.machine.name}, {of.memory_bytes / GB:.4g} GB: "
            f"a real machine would fault pages, which {price}"
        )

    @property
    def peak(self) -> Peak | None:
        """The most bytes that the machine has to hold, or None if its memory is unknown."""
        side = _side_bytes(self.chosen, self.layout.tiers)
        parts = {"the cache": self.capacity.total, "side buffers": side, "dense weights": self._times.dense.resident}
        return peak(self.machine, parts, self.layout.geometry.kv_held(self.longest))

    def _doubts(self) -> Iterator[str]:
        """Yield what the times leave out or assume as the model's sizes are unknown, and that figures were edited."""
        geometry, machine = self.layout.geometry, self.machine
        if machine.compute.kv_bytes_per_s is not None and not geometry.kv_bytes:
            yield "reading the KV cache takes no time: neither the trace nor its model's name gives its bytes"
        if machine.by_matrix and not geometry.matrices:
            yield (
                "experts are read as three matrices of equal size, which is assumed: neither the trace nor its model's "
                "name says how large they are; import with --matrices"
            )
        if not self.times_everything:
            yield (
                "times leave out the dense layers, whose size the trace does not state: pass --dense 1.2GB, or import "
                "it with --model"
            )
        if machine.is_edited and machine.calibration is not None:
            of = machine.calibration.device
            yield f"{machine.name} is not called calibrated: its file was edited after the calibration of {of}"

    @property
    def times_everything(self) -> bool:
        """True if the dense part has a time: it is measured, or its weights are known."""
        return isinstance(self.machine.compute, Measured) or self._times.dense.read > 0

    @property
    def uncalibrated(self) -> str | None:
        """Reason why a calibrated machine's times do not hold for this model, or None."""
        about = self.machine.calibrated
        if about is None:
            return None
        if not self.times_everything:
            return "not calibrated for this trace: its dense weights are unknown; pass --dense"
        from moereplay.traces.geometry import recognised  # as in traces.dense: few replays need the known models

        name = "" if self.origin.synthetic or self.origin.model == UNNAMED else self.origin.model
        model = recognised(name)
        name = model.name if model else name
        copies = self.layout.own_bytes.reshape(-1, self.layout.precisions).sum(0).tolist()
        own, *converted = (of / self.layout.experts for of in (self.layout.geometry.total_bytes, *copies))
        return (
            about.unlike(name, self._times.dense.read)
            or about.unlike_experts(name, own, converted)
            or unlike_passes(self.machine.compute, self.config.passes, self.config.draft)
        )

    @property
    def assumed_of_dense(self) -> str | None:
        """Assumption on the dense weights' bytes, if times or a warning depend on them."""
        unused = isinstance(self.machine.compute, Measured) and self.machine.memory_bytes is None
        return None if unused else assumption(self.layout.geometry, self.origin.recorded or self.origin.live)

    @property
    def _times(self) -> Times:
        return times_of(self.machine, self.layout.geometry, self.layout.tiers)

    def spec(self, log: bool) -> RunSpec:
        """Return the engine's input, besides the source."""
        return replace(self._spec, log=True) if log else self._spec

    @cached_property
    def _spec(self) -> RunSpec:
        spec = RunSpec(self.config, self.layout, self._times, self.capacity.pools, lower=self.lower)
        return replace(spec.beside(self.resident), arrivals=self.arrivals, by_layer=self.by_layer)


def plan(trace: Trace, config: ReplayConfig, requests: int = 0) -> Plan:
    """Check everything that can be checked before a replay. Raises ConfigError or PolicyError.

    With arrivals so many `requests` arrive, by default those of the trace, which begins anew after its last.
    """
    ready = plan_for(origin_of(trace), config)
    if config.arrive:
        ready.chosen.check_no_future()
        ready = replace(ready, arrivals=arrival_times(config.arrivals, config.seed, requests or trace.requests))
    if ready.machine.reserve_bytes is None:
        return ready
    return _with_rest(replace(ready, longest=longest_context(trace, config.schedule, config.arrive)))


def plan_for(origin: Origin, config: ReplayConfig) -> Plan:
    """Check a configuration against any origin of demand. Raises ConfigError or PolicyError."""
    config = config.stored_at(origin.geometry.expert_bits)
    chosen, machine = config.policy_set(), platform(config.platform)
    chosen.check(origin.capabilities, origin.lookahead_depth)
    if chosen.miss.policy.uses_cpu(chosen.miss.params) and machine.cpu is None:
        raise PolicyError(
            f"miss {chosen.miss.policy.name} requires a CPU; add a table [cpu] to platform {machine.name}"
        )
    if config.slots == "padded" and origin.live:
        raise ConfigError("--slots padded requires a recorded trace: the experts of a live run take their own bytes")
    if config.arrive and origin.live:
        raise ConfigError("--arrivals requires a recorded trace; a live run has all requests at the start")
    _check_one_size(origin.geometry, config, chosen)
    tiers = _tiers(origin.geometry, chosen)
    prefetch, side = chosen.prefetch, _side_bytes(chosen, tiers)
    reserved = side if prefetch.policy.side_inside(prefetch.params) else 0
    homes = _homes_of_pools(config, machine, origin.geometry)
    slots = padded(origin.geometry, config.scope, homes) if config.slots == "padded" else None
    sizes = (slots.expert_bytes,) if slots else tiers, reserved, origin.per_token, homes
    capacity = parse_capacity(config.capacity, slots or origin.geometry, config.scope, *sizes)
    if chosen.profile == GIVEN_PROFILE and not config.profile:
        raise PolicyError(f"missing profile: {chosen.fitted} requires --profile FILE")
    check_experts("profile", config.profile, origin.geometry)
    check_experts("warm", config.warm, origin.geometry)
    lower = _lower_tiers(machine, origin.geometry, tiers, chosen)
    _check_charged(machine)
    geometry = sized(_completed(origin, machine), origin.model, config.dense, config.dense_bits)
    resident = residents(config.resident, geometry)
    tiers = (geometry.rows.sizes,) if geometry.bytes_by_expert else tiers
    layout = CopyLayout(geometry, tiers, slots)
    ready = _with_rest(Plan(origin, config, chosen, machine, capacity, layout, lower, resident))
    _check_warm(ready.spec(log=False))
    return ready


def _completed(origin: Origin, machine: Platform) -> Geometry:
    """Return the geometry with what the machine's prices depend on, as far as the model's name says."""
    if not (machine.depends_on_model or machine.decisions.gates or machine.by_matrix):
        return origin.geometry
    from moereplay.traces.geometry import as_known, with_hidden, with_matrices

    geometry = as_known(origin.geometry, origin.model) if machine.depends_on_model else origin.geometry
    geometry = with_hidden(geometry, origin.model) if machine.decisions.gates else geometry
    return with_matrices(geometry, origin.model) if machine.by_matrix else geometry


def _check_one_size(geometry: Geometry, config: ReplayConfig, chosen: PolicySet) -> None:
    """Raises PolicyError for copies at several precisions where experts of a layer differ, or in padded slots."""
    if chosen.miss.policy.bits(chosen.miss.params) and (geometry.bytes_by_expert or config.slots == "padded"):
        where = "--slots padded" if config.slots == "padded" else "experts of a layer that differ in bytes"
        raise PolicyError(
            f"miss {chosen.miss.policy.name} caches copies at a precision of its own, which cannot be combined with "
            f"{where}: choose another miss policy"
        )


def _homes_of_pools(config: ReplayConfig, machine: Platform, geometry: Geometry) -> tuple[int, ...]:
    """Return the link of every expert x if each link has a pool, else ()."""
    return homes_of(machine, geometry) if config.scope == "per_link" else ()


def _check_charged(machine: Platform) -> None:
    """Raises ConfigError if a decision is charged to a policy that does not exist."""
    every = {name for kind in policies.NAMES for name in policies.names(kind)}
    if not every.issuperset(machine.decisions.by_policy):
        every.update(name for kind in policies.NAMES for name in policies.all_names(kind))
    for name in machine.decisions.by_policy:
        if name not in every:
            raise ConfigError(
                f"platform {machine.name}: unknown policy {name!r} in decisions.by_policy: {hint(name, sorted(every))}"
            )


def check_engine(name: str) -> None:
    """Raises ConfigError for an engine that does not exist."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: {hint(name, ENGINES)}")


def replay(
    trace: Trace,
    config: ReplayConfig,
    log: bool = False,
    engine: str = ENGINES[0],
    sharing: Sharing | None = None,
    requests: int = 0,
    by_layer: bool | None = False,
) -> Result:
    """Replay `trace`; the same arguments give the same result. Raises ConfigError, PolicyError or TraceError.

    With `sharing`, consecutive replays that differ only in their platform share decisions that do not depend on time.
    `requests` is that of `plan`. `by_layer` keeps rows per request and layer; None: if they are few.
    """
    check_engine(engine)
    ready = plan(trace, config, requests)
    few = (requests or trace.requests) * trace.geometry.layers <= MOST_BY_LAYER
    ready = replace(ready, by_layer=few if by_layer is None else by_layer)
    if engine == "reference":
        return replay_source(ready.spec(log).source_of(trace), ready, log)
    return report(_run_compiled(trace, ready, log, sharing), ready)


def counters_of(trace: Trace, config: ReplayConfig) -> tuple[Row, list[Row]]:
    """Replay `trace`; return totals and a row per request alone, for those that make no results of many replays."""
    ran = _run_compiled(trace, plan(trace, config), False, None)
    return ran.counters.totals(ran.end_ns), ran.counters.per_request()


def _run_compiled(trace: Trace, ready: Plan, log: bool, sharing: Sharing | None) -> FinishedRun:
    """Run in machine code, after a dry run of user policies."""
    from moereplay.simulator.compiled import engine as compiled  # LLVM takes a moment to import

    spec = ready.spec(log)
    if not ready.chosen.own:
        return compiled.run(trace, spec, sharing)
    from moereplay.simulator.dry_run import dry_run, named_by_machine_code

    dry_run(trace, spec)
    with named_by_machine_code(ready.chosen):
        return compiled.run(trace, spec)


def replay_source(source: Source, ready: Plan, log: bool = False) -> Result:
    """Replay any source of demand on the reference engine, which reads one gate at a time."""
    from moereplay.simulator.reference import engine as reference  # and SimPy, which no compiled replay needs

    return report(reference.run(source, ready.spec(log)), ready)


def report(ran: FinishedRun, ready: Plan) -> Result:
    """Return the result of a finished run: counters, configuration and provenance."""
    config = ready.config.model_dump(mode="json") | {kind: getattr(ready.chosen, kind).text() for kind in KINDS}
    counters, events = ran.counters, list(ran.events)
    counted = counters.totals(ran.end_ns), counters.per_layer(), counters.per_request()
    return Result(config, setting_kinds(), *counted, _about(ready, *counted[:2]), events, counters.request_layers())


def report_measured(ran: FinishedRun, ready: Plan) -> Result:
    """Return the result of a run on real threads, without the platform's times."""
    result = report(ran, ready)
    label = with_routing("LIVE, measured" if ready.origin.live else "MEASURED", ready.origin.synthetic)
    seconds: Row = {"seconds": "measured", "calibration": None, "uncalibrated": None, "assumed": None}
    seconds |= {"warning": ready.capacity_warning}
    config = result.config | {"platform": "this machine"}
    about = {name: value for name, value in result.about.items() if not name.startswith(("band", "power"))}
    return replace(result, config=config, about=about | {"label": label, **seconds})


def _about(ready: Plan, totals: Row, layers: list[Row]) -> Row:
    """Return everything besides the configuration that is needed to trust a figure."""
    chosen = ready.chosen.priced(times_of(ready.machine, ready.layout.geometry, ready.layout.tiers))
    return {
        "label": _label(ready),
        **_seconds(ready, totals, layers),
        "identity": ready.config.identity(ready.origin),
        "semantics": SEMANTICS_VERSION,
        "trace": ready.origin.digest,
        "model": ready.origin.model,
        "policies": {kind: getattr(chosen, kind).text(full=True) for kind in KINDS},
        "capacity_bytes": ready.capacity.total,
        "capacity_forms": ready.capacity.forms(),
        "side_bytes": _side_bytes(ready.chosen, ready.layout.tiers),
        "token_cycles": ready.capacity.token_cycles,
        "warning": ready.warning,
        "synthetic": ready.origin.synthetic or None,
        **({"memory": ready.peak.document()} if ready.peak and ready.peak.stated else {}),
        **facts(ready.machine.power and ready.machine.power.model_dump()),
    }


def _seconds(ready: Plan, totals: Row, layers: list[Row]) -> Row:
    """Return whether times are calibrated, and by which runs; without the dense part they are estimated."""
    about, wrong = ready.machine.calibrated, ready.uncalibrated
    if about and wrong is None:
        wrong = about.unmeasured(parts_of(totals))
    line = about.in_one_line() if about and wrong is None else None
    has_prompts = any(row["phase"] == PHASES[0] and row["accesses"] for row in layers)
    if line and has_prompts and one_token_only(ready.machine.compute):
        line += ", decoded tokens only"
    seconds = "estimated" if line is None else "calibrated"
    known: Row = {"seconds": seconds, "calibration": line, "uncalibrated": wrong, "assumed": ready.assumed_of_dense}
    band = ready.machine.band if wrong is None else None
    if band is None:
        return known
    return known | {"band": band.in_words(), "band_least": band.least, "band_most": band.most}


def _label(ready: Plan) -> str:
    if ready.origin.live:
        return "LIVE, emulated"
    label = "SIMULATED, open-loop" if ready.chosen.open_loop else "SIMULATED"
    return with_routing(label, ready.origin.synthetic)


def _side_bytes(chosen: PolicySet, tiers: tuple[tuple[int, ...], ...]) -> int:
    """Return the bytes of the prefetch policy's side buffers, each as large as the largest expert."""
    return chosen.prefetch.policy.side_slots(chosen.prefetch.params) * max(tiers[0])


def _tiers(geometry: Geometry, chosen: PolicySet) -> tuple[tuple[int, ...], ...]:
    bits = chosen.miss.policy.bits(chosen.miss.params)
    return tuple(geometry.bytes_at(tier) for tier in bits) or (geometry.expert_bytes,)


def _lower_tiers(
    machine: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...], chosen: PolicySet
) -> tuple[int, ...]:
    """Return the bytes of each lower tier.

    Raises ConfigError if one holds no expert, or if the CPU is not told which one to read.
    """
    if machine.tiers and machine.cpu_tier < 0 and chosen.miss.policy.uses_cpu(chosen.miss.params):
        names = ", ".join(tier.name for tier in machine.tiers)
        raise ConfigError(
            f"platform {machine.name}: miss {chosen.miss.policy.name} computes on the CPU; say which tier it reads, "
            f"as in [cpu] tier = {machine.tiers[0].name!r} (one of {names}), or choose another miss policy"
        )
    sizes = []
    for tier in machine.tiers:
        try:
            sizes += (0,) if tier.capacity == REST else parse_capacity(tier.capacity, geometry, "global", tiers).pools
        except ConfigError as error:
            raise ConfigError(f"platform {machine.name}, tier {tier.name}: {error}") from None
    return tuple(sizes)


def _with_rest(ready: Plan) -> Plan:
    """Return the plan whose tier of capacity `rest` has what the memory leaves. Raises ConfigError for no expert."""
    tiers, peak = ready.machine.tiers, ready.peak
    if peak is None or REST not in (tier.capacity for tier in tiers):
        return ready
    left = int(peak.memory_bytes) - peak.total
    if left < max(ready.layout.tiers[0]):
        raise ConfigError(
            f"platform {ready.machine.name} has {peak.memory_bytes / GB:.4g} GB of memory: {peak.in_words} leave no "
            f"expert to {next(tier.name for tier in tiers if tier.capacity == REST)}; lower --capacity"
        )
    sizes = zip(tiers, ready.lower, strict=True)
    return replace(ready, lower=tuple(left if tier.capacity == REST else size for tier, size in sizes))


def _check_warm(spec: RunSpec) -> None:
    """Raises ConfigError for an expert that is resident as well, and for more experts than the tiers hold."""
    if not spec.config.warm:
        return
    start = np.concatenate(spec.start)
    for x in start[np.isin(start * spec.layout.precisions, spec.resident)].tolist():
        layer, expert = divmod(x, spec.layout.geometry.experts)
        raise ConfigError(f"--warm lists expert {expert} of layer {layer}, which --resident has; name it once")
