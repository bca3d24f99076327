"""Small replays for tests of policies: traces full of ties, nanosecond times, and what the engines decided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.policies.contract import Miss
from moereplay.policies.grammar import Chosen
from moereplay.results.result import Event, Row
from moereplay.simulator.compiled.engine import run_inputs
from moereplay.simulator.compiled.inputs import inputs_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.interface import CopyLayout, FinishedRun, RunSpec, oracle_of
from moereplay.simulator.platform import Link, Measured, Platform
from moereplay.simulator.reference.engine import run
from moereplay.simulator.source import Mixture, Pass, TraceSource
from moereplay.simulator.times import Times
from moereplay.traces.routers import weigh
from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from moereplay.traces.writer import write_trace
from tests.kit.cases import at_rate

SIZE = 5  # bytes of an expert
VERDICTS = ("hits", "late", "compulsory", "collisions", "capacity")
RENORMALISED = Router(renormalise=True)


class Sizes(NamedTuple):
    """A small model and the length of its trace."""

    layers: int = 3
    experts: int = 6
    k: int = 2
    tokens: int = 24
    prompt: int = 0
    requests: int = 1
    depth: int = 0  #: of look-ahead
    size: int = SIZE


class Access(NamedTuple):
    """One access in the order of the event log."""

    step_pass: int
    layer: int
    expert: int
    hit: bool


def random_trace(seed: int, sizes: Sizes) -> Trace:
    """Logits in quarters, so that ties abound; the recorded order breaks them at random, as models do."""
    rng = np.random.Generator(np.random.PCG64(seed))
    header = Header(geometry=geometry_of(sizes), lookahead_depth=sizes.depth)
    return memory_trace(header, [_request(rng, sizes) for _ in range(sizes.requests)])


def stored_trace(path: Path, sizes: Sizes) -> Path:
    """A random trace in a file."""
    made = random_trace(1, sizes)
    write_trace(path, made.header, [made.request(at) for at in range(made.requests)], made.router_bias)
    return path


def geometry_of(sizes: Sizes) -> Geometry:
    """Equal experts."""
    return Geometry(
        layers=sizes.layers,
        experts=sizes.experts,
        k=sizes.k,
        expert_bytes=(sizes.size,) * sizes.layers,
        expert_bits=8,
        router=RENORMALISED,
    )


def _request(rng: np.random.Generator, sizes: Sizes) -> Request:
    shape = (sizes.tokens, sizes.layers, sizes.experts)
    logits = rng.integers(-8, 9, shape).astype(np.float32) / 4
    chosen = np.lexsort((rng.random(shape), -logits), axis=-1)[..., : sizes.k]
    looks = tuple(rng.integers(-8, 9, shape).astype(np.float32) / 4 for _ in range(sizes.depth))
    return Request(chosen, sizes.prompt, weigh(RENORMALISED, logits, chosen), logits, looks)


def trace_of(steps: Sequence[Sequence[Sequence[int]]], experts: int, weights: Sequence | None = None) -> Trace:
    """A trace of tokens -> layers -> chosen ids written out by hand, all decode."""
    chosen = np.array(steps)
    _, layers, k = chosen.shape
    header = Header(geometry=geometry_of(Sizes(layers, experts, k)))
    given = None if weights is None else np.array(weights, np.float32)
    return memory_trace(header, [Request(chosen, 0, given)])


class Recording(TraceSource):
    """A trace that remembers what each token ran."""

    ran: list[list[list[int]]]

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        """Steps -> tokens -> ids."""
        self.ran.append([list(row) for row in mixture.run])


class Outcome(NamedTuple):
    """A finished small replay; equal outcomes made the same decisions at the same times."""

    totals: Row
    events: list[Event]
    ran: list[list[list[int]]]  #: steps -> tokens -> ids

    @property
    def accesses(self) -> list[Access]:
        """Every access in order; a late one is no hit."""
        log = [event for event in self.events if event.kind in VERDICTS]
        return [Access(event.step_pass, event.layer, event.expert, event.kind == "hits") for event in log]

    @property
    def hits(self) -> int:
        """Accesses that hit."""
        return sum(access.hit for access in self.accesses)

    @property
    def misses(self) -> int:
        """Accesses that did not."""
        return len(self.accesses) - self.hits


class Nanoseconds(NamedTuple):
    """Durations."""

    dense: int = 3
    expert: int = 2
    latency: int = 0
    cpu: int = 4
    bandwidth: float = 1.0  #: bytes per nanosecond


def replayed(trace: Trace, slots: int, times: Nanoseconds | None = None, **settings: object) -> Outcome:
    """Replay with pools of `slots` experts each, at one byte per nanosecond, by both engines."""
    source, spec = _prepared(trace, slots, times, configure(**settings))
    found = _referred(source, spec)
    assert _compiled(source, trace, spec) == found, "the engines differ"
    return found


def replayed_by_reference(trace: Trace, slots: int, **settings: object) -> Outcome:
    """Replay with the reference engine only, for tests that observe hook calls, which only Python allows."""
    return _referred(*_prepared(trace, slots, None, configure(**settings)))


def replayed_by_compiled(trace: Trace, slots: int, **settings: object) -> Outcome:
    """Replay with the compiled engine only, for thousands of accesses, which take the reference engine seconds."""
    source, spec = _prepared(trace, slots, None, configure(**settings))
    return _compiled(source, trace, spec)


def _prepared(trace: Trace, slots: int, times: Nanoseconds | None, config: ReplayConfig) -> tuple[Recording, RunSpec]:
    geometry = trace.geometry
    chosen = config.policy_set()
    chosen.check(trace.capabilities | {"future"}, trace.header.lookahead_depth)
    tiers = _tiers(chosen.miss, geometry)
    needs = frozenset().union(*(part.needs for part in vars(chosen).values()))
    machine = Times(_platform(times or Nanoseconds()), geometry, tiers)
    spec = RunSpec(config, CopyLayout(geometry, tiers), machine, _pools(config, geometry, slots), log=True)
    source = Recording(trace, config.schedule, chosen.prefetch, needs, (config.lookahead, config.seed))
    return source, spec


def _referred(source: Recording, spec: RunSpec) -> Outcome:
    """Replay with the reference engine."""
    source.ran = []
    return _outcome(run(source, spec), source.ran)


def _compiled(source: Recording, trace: Trace, spec: RunSpec) -> Outcome:
    """Replay with the compiled engine."""
    chosen = spec.config.policy_set()
    needs = frozenset().union(*(part.needs for part in vars(chosen).values()))
    inputs = inputs_of(trace, spec.config, needs, chosen.reads)
    ended = run_inputs(inputs, oracle_of(source, spec.config, chosen.eviction), spec, keep=True)
    steps = [(step, layer) for step in source.passes() for layer in range(trace.geometry.layers)]
    return _outcome(
        ended.ran, [ended.kept[step.start : step.start + step.tokens, layer].tolist() for step, layer in steps]
    )


def _outcome(ran: FinishedRun, executed: list[list[list[int]]]) -> Outcome:
    return Outcome(ran.counters.totals(ran.end_ns), list(ran.events), executed)


def _tiers(miss: Chosen, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    assert isinstance(miss.policy, Miss)
    bits = miss.policy.bits(miss.params)
    return tuple(geometry.bytes_at(tier) for tier in bits) or (geometry.expert_bytes,)


def _pools(config: ReplayConfig, geometry: Geometry, slots: int) -> tuple[int, ...]:
    pools = 1 if config.scope == "global" else geometry.layers
    return (slots * geometry.expert_bytes[0],) * pools


def _platform(times: Nanoseconds) -> Platform:
    return Platform(
        name="tiny",
        links=(at_rate(Link(bytes_per_s=1, latency_ns=times.latency), times.bandwidth * 1e9),),
        compute=Measured(dense_ns=times.dense, expert_ns=times.expert),
        cpu=Measured(expert_ns=times.cpu),
    )
