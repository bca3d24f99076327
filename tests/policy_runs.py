"""Small replays for tests of policies: traces full of ties, nanosecond times, and what the engine decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.contract import Miss
from policies.grammar import Chosen
from simulator.config import ReplayConfig, configure
from simulator.platform import Link, Measured, Platform, Times
from simulator.reference.bound import Shape
from simulator.reference.engine import Setting, run
from simulator.result import Event, Row
from simulator.source import Pass, TraceSource
from traces.routers import weigh
from traces.schema import Geometry, Header, Request, Router, Trace, memory_trace

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

    def used(self, step: Pass, layer: int, ids: Sequence[Sequence[int]], tiers: Mapping[int, int]) -> None:
        """Steps -> tokens -> ids."""
        self.ran.append([list(row) for row in ids])


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
    """What things take."""

    dense: int = 3
    expert: int = 2
    latency: int = 0
    cpu: int = 4


def replayed(trace: Trace, slots: int, times: Nanoseconds | None = None, **settings: object) -> Outcome:
    """Replay with pools of `slots` experts each, at one byte per nanosecond."""
    config, geometry = configure(**settings), trace.geometry
    chosen = config.policy_set()
    chosen.check(trace.capabilities | {"future"}, trace.header.lookahead_depth)
    tiers = _tiers(chosen.miss, geometry)
    needs = frozenset().union(*(part.needs for part in vars(chosen).values()))
    source = Recording(trace, config.passes, chosen.prefetch, needs)
    source.ran = []
    machine = Times(_platform(times or Nanoseconds()), geometry, tiers)
    pools = _pools(config, geometry, slots)
    ledger, end, events = run(source, Setting(config, Shape(geometry, tiers), machine, pools, log=True))
    return Outcome(ledger.totals(end), events, source.ran)


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
        link=Link(bytes_per_s=1e9, latency_ns=times.latency),
        compute=Measured(dense_ns=times.dense, expert_ns=times.expert),
        cpu=Measured(expert_ns=times.cpu),
    )
