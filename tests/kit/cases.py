"""Small cases written by hand: a source of demand made of lists, and one call that replays it.

A case is requests of tokens of cells: a cell is what one token's router said at one MoE layer. Weights and look-ahead
scores are in UNITs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from moereplay.policies.contract import UNIT, Miss
from moereplay.results.counters import BY_LAYER
from moereplay.results.result import Columns, Event
from moereplay.results.result import Row as Counts
from moereplay.simulator.capacity import padded, parse_size, residents
from moereplay.simulator.config import configure
from moereplay.simulator.interface import CopyLayout, FinishedRun, RunSpec
from moereplay.simulator.platform import Contention, Link, LowerTier, Measured, Platform, Roofline, Wire
from moereplay.simulator.rates import Decisions, Drafting, Loading
from moereplay.simulator.reference.engine import run
from moereplay.simulator.source import Gate, Mixture, Pass, Row
from moereplay.simulator.times import Times, homes_of
from moereplay.traces import routers
from moereplay.traces.demand import Union, union_of
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Geometry, Router
from moereplay.traces.units import DECODE, NEVER
from tests.kit.schedules import Guess, laid

ENGINES = ("reference", "compiled")


@dataclass(frozen=True)
class Cell:
    """One token at one layer."""

    ids: Sequence[int]  #: chosen experts in rank order, -1 none
    weights: Sequence[int] = ()  #: of the chosen
    look: Sequence[Sequence[int]] = ()  #: [d - 1][expert]: scores of layer + d
    logits: Sequence[float] = ()  #: [expert]


Token = Sequence[Cell]  # one cell per layer


@dataclass(frozen=True)
class Prompted:
    """One request: its tokens, of which the first `prompt` are the prompt."""

    tokens: Sequence[Token]
    prompt: int = 0


def tokens(*rows: Sequence[Sequence[int]]) -> list[Token]:
    """Tokens of ids alone: rows[t][layer] are the chosen experts."""
    return [[Cell(ids) for ids in row] for row in rows]


def naming(experts: int, best: Sequence[int]) -> list[int]:
    """Look-ahead scores that rank `best` first, in that order."""
    return [UNIT // (2 + best.index(e)) if e in best else 0 for e in range(experts)]


def sizes(layers: int, experts: int, k: int = 2, expert_bytes: Sequence[int] | int = 1, **more: object) -> Geometry:
    """A geometry; `expert_bytes` for all layers or per layer."""
    per_layer = (expert_bytes,) * layers if isinstance(expert_bytes, int) else tuple(expert_bytes)
    fields = {"layers": layers, "experts": experts, "k": k, "expert_bytes": per_layer}
    return Geometry.model_validate(fields | {"router": Router(family="topk_softmax")} | more)


def machine(
    bytes_per_ns: float = 1.0,
    latency_ns: int = 0,
    depth: int = 1,
    cpu_ns: int = 0,
    cpu: Mapping[str, Any] = MappingProxyType({}),
    left: float = 1,
    share: float | None = None,
    layers: str = "",
    more: Sequence[Link] = (),
    tiers: Sequence[LowerTier] = (),
    prices: Mapping[str, Any] = MappingProxyType({}),
    **spent: int,
) -> Platform:
    """A platform of constant times: `dense_ns`, `expert_ns`, `expert_ns_per_token`, `pass_ns`; `cpu_ns` per expert,
    `cpu` what else [cpu] says.

    `left` is the share of their rates that CPU and link keep while both work. `more` are the links after the first,
    behind which lies `share` of the experts, or all of `layers`; `tiers` are the lower tiers. `prices` are `overlap`,
    figures by the name of their table, and a `roofline` of accelerator and CPU in place of their times.
    """
    of = {table: dict(prices.get(table, {})) for table in ("link", "compute", "contention")}
    link = Link(bytes_per_s=1, latency_ns=latency_ns, depth=depth, share=share, layers=layers, **of["link"])
    link = at_rate(link, bytes_per_ns * 1e9)
    kind, roofline = Roofline if "roofline" in prices else Measured, prices.get("roofline", {})
    compute = kind.model_validate({**(roofline or spent), **of["compute"]})
    of_cpu = kind.model_validate({**(roofline or {"expert_ns": cpu_ns}), **cpu})
    return Platform(
        name="by hand",
        links=(link, *more),
        tiers=tuple(tiers),
        compute=compute,
        cpu=of_cpu,
        contention=Contention(cpu=left, link=left, **of["contention"]),
        loading=Loading.model_validate(prices.get("loading", {})),
        decisions=Decisions.model_validate(prices.get("decisions", {})),
        draft=Drafting.model_validate(prices.get("draft", {})),
        overlap=prices.get("overlap", "arrival"),
    )


Wired = TypeVar("Wired", bound=Wire)


def at_rate(link: Wired, bytes_per_s: float) -> Wired:
    """The link at any rate: an infinite one, which no file may have, takes no time."""
    return link.model_copy(update={"bytes_per_s": bytes_per_s})


class ListSource:
    """A `simulator.source.Source` over lists; keeps what the policies made of each gate."""

    def __init__(
        self,
        geometry: Geometry,
        requests: Sequence[Prompted],
        passes: str | Sequence[Sequence[Row]] = "recorded",
        guess: Guess | None = None,
        arrive: bool = False,
        rejected: Sequence[Sequence[Cell]] = (),
    ) -> None:
        """`passes` is a name, or the rows of every pass; a row's token counts through all requests.

        `rejected`: layers of rows that rejected drafts read, which count on after all tokens.

        `arrive`: the passes are shares of requests, which fall in passes by time, so that the future is unknown.
        """
        self.geometry, self.requests, self.guess, self.arrive = geometry, requests, guess, arrive
        lengths = [(request.prompt, len(request.tokens)) for request in requests]
        self._plan = laid(lengths, passes, guess) if isinstance(passes, str) else passes
        self._tokens = [*(token for request in requests for token in request.tokens), *rejected]
        unions = [self._union(rows, layer) for rows in self._plan for layer in range(geometry.layers)]
        self._unions, self._first = _with_future(unions, geometry)
        self.executed: list[list[list[int]]] = []  #: per step, per token, the experts it ran

    def passes(self) -> Iterator[Pass]:
        return (Pass(index, rows) for index, rows in enumerate(self._plan))

    def _cells(self, rows: Sequence[Row], layer: int) -> list[Cell]:
        return [self._tokens[row.routed][layer] for row in rows]

    def _union(self, rows: Sequence[Row], layer: int) -> Union:
        cells = self._cells(rows, layer)
        return union_of([cell.ids for cell in cells], _mass(cells))

    def gate(self, step: Pass, layer: int) -> Gate:
        cells = self._cells(step.rows, layer)
        look = [[list(cell.look[d]) for cell in cells] for d in range(len(cells[0].look))]
        return Gate(
            ids=[list(cell.ids) for cell in cells],
            demand=self._demand(step, layer),
            mass=_mass(cells),
            look_order=[[_descending(scores) for scores in rows] for rows in look],
            look_score=look,
            **self._scores(cells),
        )

    def _demand(self, step: Pass, layer: int) -> Union:
        return self._union(step.rows, layer) if self.arrive else self._unions[step.index * self.geometry.layers + layer]

    def _scores(self, cells: Sequence[Cell]) -> dict[str, list]:
        if not cells[0].logits:
            return {}
        logits = np.array([cell.logits for cell in cells], np.float32)
        scores = to_units(routers.scores(self.geometry.router, logits)).tolist()
        return {"logits": logits.tolist(), "choice": logits.tolist(), "scores": scores}

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        cells = self._cells(step.rows, layer)
        logits = np.array([cell.logits for cell in cells], np.float32)
        return to_units(routers.weigh(self.geometry.router, logits, np.asarray(ids))).tolist()

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        self.executed.append([list(row) for row in mixture.run])

    def first_uses(self) -> Sequence[int]:
        return () if self.arrive else self._first

    def pass_of(self, position: int) -> int:
        ends = accumulate(len(union.expert) for union in self._unions)
        return NEVER if position == NEVER else sum(end <= position for end in ends) // self.geometry.layers

    def popularity(self, tokens: int) -> list[int]:
        tokens_of_all = [token for request in self.requests for token in request.tokens]
        chosen = [
            layer * self.geometry.experts + e
            for token in tokens_of_all[: tokens or None]
            for layer, cell in enumerate(token)
            for e in cell.ids
            if e >= 0
        ]
        return [chosen.count(x) for x in range(self.geometry.layers * self.geometry.experts)]


@dataclass(frozen=True)
class Outcome:
    """The result of a replay, and its event log."""

    totals: Counts
    layers: list[Counts]
    requests: list[Counts]
    events: list[Event]
    by_layer: Columns

    def __getitem__(self, name: str) -> int:
        return self.totals[name]

    def counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.totals[name] for name in names)

    def spans(self, kind: str, cause: str = "") -> list[tuple[int, int, int, int]]:
        """(t0, t1, layer, expert) of the events of a kind, in the order in which they happened."""
        chosen = [event for event in self.events if event.kind == kind and cause in ("", event.cause)]
        return [(event.t0, event.t1, event.layer, event.expert) for event in chosen]


def replay_lists(
    source: ListSource,
    pools: int | tuple[int, ...],
    where: Platform,
    log: bool = True,
    engine: str | None = None,
    arrivals_ns: Sequence[int] = (),
    **settings: object,
) -> Outcome:
    """Replay under pools given in bytes: one number is a global pool, several are one per layer, or per link if
    `settings` say so.

    `engine` is one of ENGINES. Without it both replay, and must agree on every number, event and executed expert. With
    `arrivals_ns` the passes of `source` are shares of its requests, one request after the other.
    """
    spec = replace(spec_of(source.geometry, pools, where, log, **settings), arrivals=tuple(arrivals_ns))
    if engine:
        return _by(engine, source, spec)
    found, executed = _by("reference", source, spec), list(source.executed)
    assert _by("compiled", source, spec) == found, "the engines differ"
    assert source.executed == executed, "the engines executed different experts"
    return found


def _by(engine: str, source: ListSource, spec: RunSpec) -> Outcome:
    source.executed.clear()
    return outcome_of(run(source, spec) if engine == "reference" else compiled_run(source, spec))


def spec_of(
    geometry: Geometry, pools: int | tuple[int, ...], where: Platform, log: bool = True, **settings: object
) -> RunSpec:
    """Return an engine's inputs other than the source, for `replay_lists`."""
    pools = (pools,) if isinstance(pools, int) else pools
    config = configure(**{"scope": "per_layer" if len(pools) > 1 else "global"} | settings)
    miss = config.policy_set().miss
    assert isinstance(miss.policy, Miss)
    bits = miss.policy.bits(miss.params)
    tiers = tuple(geometry.bytes_at(tier) for tier in bits) or (geometry.rows.sizes,)
    lower = tuple(int(parse_size(tier.capacity) or 0) for tier in where.tiers)
    homes = homes_of(where, geometry) if config.scope == "per_link" else ()
    slots = padded(geometry, config.scope, homes) if config.slots == "padded" else None
    layout = CopyLayout(geometry, tiers, slots)
    spec = RunSpec(config, layout, Times(where, geometry, tiers), pools, log, lower, by_layer=True)
    return spec.beside(residents(config.resident, geometry))


def outcome_of(ran: FinishedRun) -> Outcome:
    """Every number of a finished run."""
    check_sums(ran)
    return Outcome(
        ran.counters.totals(ran.end_ns),
        ran.counters.per_layer(),
        ran.counters.per_request(),
        list(ran.events),
        ran.counters.request_layers(),
    )


def check_sums(ran: FinishedRun) -> None:
    """Rows per request and layer add up to those per layer and phase, and to those per request."""
    columns = ran.counters.request_layers()
    whole = {("layer", row["layer"], row["phase"]): row for row in ran.counters.per_layer()}
    whole |= {("request", row["request"]): row for row in ran.counters.per_request()}
    sums = {key: dict.fromkeys(BY_LAYER, 0) for key in whole}
    for request, layer, phase, *counts in zip(*columns.values(), strict=True):
        for name, amount in zip(BY_LAYER, counts, strict=True):
            sums["layer", layer, phase][name] += amount
            sums["request", request][name] += amount
    assert sums == {key: {name: row[name] for name in BY_LAYER} for key, row in whole.items()}


def compiled_run(source: ListSource, spec: RunSpec) -> FinishedRun:
    """The compiled engine; the source gets what every token ran, as the reference does.

    Without that and without the log it may take the fast path, whose counters must be the same.
    """
    from moereplay.simulator.compiled.engine import run_source

    ran, kept, lengths, tokens = run_source(source, spec)
    short = run_source(source, replace(spec, log=False), keep=False).ran
    assert short.end_ns == ran.end_ns
    assert short.counters.totals(short.end_ns) == ran.counters.totals(ran.end_ns)
    assert short.counters.per_layer() == ran.counters.per_layer()
    assert short.counters.per_request() == ran.counters.per_request()
    assert short.counters.request_layers() == ran.counters.request_layers()
    first, steps = 0, source.passes() if not spec.arrivals else as_passes(lengths, tokens)
    for step in steps:
        for layer in range(source.geometry.layers):
            gate = source.gate(step, layer)
            rows = kept[first : first + step.tokens, layer].tolist()
            ids = [row[: len(own)] for row, own in zip(rows, gate.ids, strict=True)]
            source.used(step, layer, Mixture(gate, ids, ids, {}))
        first += step.tokens
    return ran


def as_passes(lengths: Sequence[int], tokens: Sequence[int]) -> Iterator[Pass]:
    """Yield the passes that a run decided on, by their tokens alone."""
    ends = accumulate(lengths)
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        yield Pass(index, [Row(0, token, DECODE) for token in tokens[end - length : end]])


def _mass(cells: Sequence[Cell]) -> list[list[int]]:
    return [list(cell.weights) for cell in cells] if cells[0].weights else []


def _with_future(unions: list[Union], geometry: Geometry) -> tuple[list[Union], list[int]]:
    """Each union with its `next_use`, and every expert's first use: one walk backwards."""
    following = [NEVER] * (geometry.layers * geometry.experts)
    position = sum(len(union.expert) for union in unions)
    known = []
    for step in range(len(unions) - 1, -1, -1):
        base, found = step % geometry.layers * geometry.experts, []
        for e in reversed(unions[step].expert):
            position -= 1
            found.append(following[base + e])
            following[base + e] = position
        known.append(unions[step]._replace(next_use=found[::-1]))
    return known[::-1], following


def _descending(scores: Sequence[int]) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))
