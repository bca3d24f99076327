"""Conformance cases of machines with a CPU, lower tiers and residents (docs/conformance.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moereplay.policies.contract import PolicyError
from moereplay.results.counters import COUNTERS
from moereplay.simulator.config import FUTURE, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Contention, Link, LowerTier, Measured, Platform
from moereplay.simulator.rates import Drafting
from moereplay.traces.passes import Slots, slots_of
from moereplay.traces.schema import TraceError
from tests.kit.cases import ListSource, Outcome, replay_lists, sizes
from tests.kit.conformance_format import AMOUNT, COUNT, LONGEST, Shape, Strict
from tests.kit.schedules import Guess

Amount = Annotated[int, AMOUNT]
SETTINGS = ("eviction", "prefetch", "miss", "contract", "scope", "passes", "reset", "prefetch_at", "seed")
CAPABILITIES = frozenset({"ids", "weights", "lookahead", FUTURE})
NS = 1_000_000_000


class Wired(Strict):
    """A link."""

    latency_ns: Amount
    bytes_per_ns: Annotated[float, Field(gt=0, le=LONGEST)]
    depth: int = COUNT

    def figures(self) -> dict[str, Any]:
        """Return them as a platform has them."""
        return {"bytes_per_s": self.bytes_per_ns * NS, "latency_ns": self.latency_ns, "depth": self.depth}


class Tier(Wired):
    """A lower tier and the link that fills it."""

    name: str
    capacity_bytes: Amount


class Cpu(Strict):
    """The CPU, and which tier it reads."""

    ns_per_token: Amount
    tier: str | None


class Draft(Strict):
    """Draft tokens."""

    n: Amount
    accept: list[Annotated[float, Field(ge=0, le=1)]]
    rejected: Literal["other", "own"]


class Shares(Strict):
    """Share of its rate that contention leaves to each."""

    cpu: Annotated[float, Field(gt=0, le=1)]
    link: Annotated[float, Field(gt=0, le=1)]


class MachineCase(Shape):
    """One replay."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    eviction: str
    prefetch: str
    miss: str
    contract: Literal["atomic", "sequential"]
    scope: Literal["global"]
    capacity_bytes: Amount
    link: Wired
    tiers: list[Tier]
    cpu: Cpu | None
    contention: Shares
    dense_ns: Amount
    pass_ns: Amount
    expert_ns_per_token: Amount
    draft_ns: Amount
    passes: str
    reset: str
    prefetch_at: Literal["gate", "after_demand"]
    draft: Draft | None
    arrivals_ns: list[Amount] | None
    resident: list[Annotated[list[int], Field(min_length=2, max_length=2)]]

    @model_validator(mode="before")
    @classmethod
    def _look_may_be_absent(cls, document: Any) -> Any:
        """A cell of the last layer may have null for its scores."""
        for request in document.get("requests", ()) if isinstance(document, dict) else ():
            for token in request.get("tokens", ()) if isinstance(request, dict) else ():
                for cell in token if isinstance(token, list) else ():
                    if isinstance(cell, dict) and cell.get("look", 0) is None:
                        cell["look"] = {}
        return document


# -- a replay, and its result


def result(case: MachineCase, engine: str) -> dict[str, Any]:
    """Return a case's result, or why it is refused."""
    try:
        source = ListSource(
            sizes(case.layers, case.experts, case.k, case.expert_bytes),
            [request.prompted() for request in case.requests],
            case.passes if case.arrivals_ns is None else _slots(case.passes).alone,
            case.draft and Guess(case.draft.n, case.draft.accept, case.draft.rejected, case.seed),
            arrive=case.arrivals_ns is not None,
        )
        found = _outcome(case, source, engine)
    except (ConfigError, PolicyError, TraceError, ValueError) as error:
        return {"name": case.name, "refused": " ".join(str(error).split())}
    return {"name": case.name, "refused": None, **_figures(found)}


def _outcome(case: MachineCase, source: ListSource, engine: str) -> Outcome:
    _check(case)
    settings = {name: getattr(case, name) for name in SETTINGS if name != "scope"}
    chosen = configure(**settings).policy_set()
    chosen.check(CAPABILITIES, 1)
    if case.arrivals_ns is not None:
        chosen.check_no_future()
    where = _platform(case)
    _check_cpu(where, chosen.miss.policy.uses_cpu(chosen.miss.params), case.miss)
    resident = tuple((layer, expert) for layer, expert in case.resident)
    return replay_lists(
        source,
        case.capacity_bytes,
        where,
        engine=engine,
        arrivals_ns=case.arrivals_ns or (),
        resident=resident,
        **settings,
    )


def _slots(passes: str) -> Slots:
    """Raises ConfigError for a schedule without slots."""
    if (slots := slots_of(passes)) is None:
        raise ConfigError("arrivals require passes batch:N")
    return slots


def _check(case: MachineCase) -> None:
    """Raises ConfigError for what no replay has yet, and for pools that hold no expert."""
    if case.arrivals_ns is not None and len(case.arrivals_ns) != len(case.requests):
        raise ConfigError(f"{len(case.arrivals_ns)} arrivals of {len(case.requests)} requests")
    largest = max(case.expert_bytes)
    holds = {"the pool": case.capacity_bytes} | {f"tier {tier.name}": tier.capacity_bytes for tier in case.tiers}
    for where, capacity in holds.items():
        if capacity < largest:
            raise ConfigError(f"{where} has {capacity} bytes, less than one expert of {largest}")


def _check_cpu(where: Platform, uses_cpu: bool, miss: str) -> None:
    if uses_cpu and where.cpu is None:
        raise ConfigError(f"miss {miss} requires a CPU")
    if uses_cpu and where.tiers and where.cpu_tier < 0:
        raise ConfigError(f"miss {miss} requires [cpu] tier beside [[tiers]]")


def _platform(case: MachineCase) -> Platform:
    cpu = case.cpu
    return Platform(
        name="case",
        links=(Link(**case.link.figures()),),
        tiers=tuple(
            LowerTier(name=tier.name, capacity=f"{tier.capacity_bytes}B", **tier.figures()) for tier in case.tiers
        ),
        compute=Measured(dense_ns=case.dense_ns, pass_ns=case.pass_ns, expert_ns_per_token=case.expert_ns_per_token),
        cpu=cpu and Measured(expert_ns_per_token=cpu.ns_per_token, tier=cpu.tier or ""),
        draft=Drafting(ns_per_token=case.draft_ns),
        contention=Contention(cpu=case.contention.cpu, link=case.contention.link),
    )


def _figures(found: Outcome) -> dict[str, Any]:
    return {
        "totals": {name: found[name] for name in COUNTERS},
        "per_request": [_request(row) for row in sorted(found.requests, key=lambda row: row["request"])],
        "time_ns": found["time_ns"],
        "events": [
            [event.t0, event.t1, event.kind, event.step_pass, event.layer, event.expert, event.cause]
            for event in found.events
        ],
    }


def _request(row: dict[str, Any]) -> dict[str, Any]:
    names = ("ttft_ns", "decode_ns", "decode_passes", "decode_tokens", "arrival_ns", "queued_ns")
    return {name: row[name] for name in names}
