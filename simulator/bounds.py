"""Bound on a result: the most hits of any eviction without prefetch, for the same demand and bytes.

It is `FORCED` where every miss is admitted, and `RELAXED` where a miss may stay out of the cache. `curves/optimum.py`
counts both from the demand. Where neither is a bound, the hits are null. Where experts of a pool differ in bytes the
most hits are bracketed (`curves/unequal.py`): the bound is the upper end, and `feasible_hits` the lower one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from moereplay.results.serving import shortened
from moereplay.simulator.config import SEMANTICS_VERSION, ReplayConfig
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.replay import Plan, plan
from moereplay.traces.schema import Trace, canonical

FORCED, RELAXED = "forced", "relaxed"
#: Remarks on a bound that is not forced.
OTHER_DEMAND = "no belady where routing changes the demand"
OTHER_PRECISIONS = "no belady where a pool holds experts at several precisions"
OTHER_TIMES = "no belady where the order of passes depends on when requests arrive"
STAYS_OUT = "belady may keep a miss out of the cache where a policy may"

#: belady_hits, accesses, compulsory; feasible_hits, null where the bound is the most hits itself.
Counted = Mapping[str, int | None]


@dataclass(frozen=True)
class Bound:
    """Everything besides the trace that the count of a bound depends on."""

    admission: str  #: FORCED, RELAXED, or "" where only the compulsory misses are a bound
    passes: str
    reset: str
    scope: str
    contract: str
    slots: tuple[int, ...]  #: experts that fit each pool; where they differ in bytes, as if all had the fewest
    warm: tuple[tuple[int, int], ...]
    pool: int = 0  #: bytes, of one pool of experts that differ in bytes
    sizes: tuple[int, ...] = ()  #: their bytes, by layer; empty if the experts of each pool have equal bytes
    resident: tuple[tuple[int, int], ...] = ()  #: experts outside the pools, which always hit
    parts: tuple[Bound, ...] = ()  #: with scope `per_link` the bound of each link's pool, the other experts outside it

    def identity(self, trace: Trace) -> str:
        """Return a hash of everything that the count depends on."""
        known = {name: value for name, value in asdict(self).items() if self.sizes or name not in ("pool", "sizes")}
        known |= {"resident": self.resident} if known.pop("resident") else {}
        known |= {"parts": [part.identity(trace) for part in self.parts]} if known.pop("parts") else {}
        document = [SEMANTICS_VERSION, trace.digest, "bound", known]
        return hashlib.sha256(canonical(document)).hexdigest()[:16]


class Judged(NamedTuple):
    """A configuration's bound and, unless the bound is forced, a remark and the setting that causes it."""

    bound: Bound | None
    remark: str = ""
    setting: str = ""


def judge(trace: Trace, config: ReplayConfig) -> Judged:
    """Return the bound of a configuration. Raises ConfigError or PolicyError if it cannot be replayed."""
    ready = plan(trace, config)
    eviction, miss = ready.chosen.eviction, ready.chosen.miss
    if config.arrive:
        return Judged(None, OTHER_TIMES, shortened(config.arrivals))
    if ready.chosen.changes_routing:
        return Judged(None, OTHER_DEMAND, config.routing)
    if ready.layout.precisions > 1:
        return Judged(_bound(ready, ""), OTHER_PRECISIONS, config.miss)
    if eviction.policy.admit is not None and eviction.policy.declines(eviction.params):
        return Judged(_bound(ready, RELAXED), STAYS_OUT, config.eviction)
    if not miss.policy.fetches_all:
        return Judged(_bound(ready, RELAXED), STAYS_OUT, config.miss)
    return Judged(_bound(ready, FORCED))


def _bound(ready: Plan, admission: str) -> Bound:
    spec, sizes = ready.spec(log=False), ready.layout.tiers[0]
    if ready.config.scope == "per_link" and admission:
        return _by_link(ready, admission, spec)
    return replace(_beside(ready.config, admission, spec.pools, sizes), resident=ready.resident)


def _by_link(ready: Plan, admission: str, spec: RunSpec) -> Bound:
    """Return the bound of pools by link. They share no expert, so each is counted alone."""
    experts, sizes, parts = ready.layout.geometry.experts, ready.layout.tiers[0], list[Bound]()
    how = (admission, ready.config.schedule, ready.config.reset)
    for link, pool in enumerate(spec.pools):
        others = {divmod(x, experts) for x, home in enumerate(spec.pool_of) if home != link}
        each = sorted({sizes[x // experts] for x, home in enumerate(spec.pool_of) if home == link})
        if not each:
            continue
        warm = tuple(pair for pair in ready.config.warm if pair not in others)
        part = Bound(*how, "global", ready.config.contract, (pool // each[0],), warm)
        part = replace(part, pool=pool, sizes=sizes) if len(each) > 1 else part
        parts.append(replace(part, resident=tuple(sorted(others | set(ready.resident)))))
    return Bound(*how, "per_link", ready.config.contract, (), ready.config.warm, parts=tuple(parts))


def _beside(config: ReplayConfig, admission: str, pools: tuple[int, ...], sizes: tuple[int, ...]) -> Bound:
    """Return the bound of what residents leave of the pools."""
    how = (admission, config.schedule, config.reset, config.scope, config.contract)
    if not admission:
        return Bound(*how, (), config.warm)
    if len(pools) == 1 and len(set(sizes)) > 1:
        return Bound(*how, (pools[0] // min(sizes),), config.warm, pools[0], sizes)
    slots = tuple(pool // size for pool, size in zip(pools, sizes, strict=False))
    return Bound(*how, slots, config.warm)


def bound_of(trace: Trace, config: ReplayConfig) -> Bound | None:
    """Return the bound of a configuration, None if it has none. Raises ConfigError or PolicyError."""
    return judge(trace, config).bound


def remarks(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return the remarks on these configurations' `belady_hit_rate`, each once."""
    settings: dict[str, dict[str, None]] = {}
    for _, remark, setting in (judge(trace, config) for config in configs):
        if remark:
            settings.setdefault(remark, {})[setting] = None
    return [f"{remark}: {', '.join(names)}" for remark, names in settings.items()]


def count(trace: Trace, bound: Bound) -> Counted:
    """Count hits that no eviction exceeds (null if unknown), accesses, and misses that no cache avoids.

    If experts of a pool differ in bytes, `feasible_hits` are those of an eviction that knows the future, under the
    rules of the bound: the maximum lies between the two. It is null if `belady_hits` is the maximum.
    """
    if bound.parts:
        return _sum([count(trace, part) for part in bound.parts])
    from moereplay.simulator.curves import optimum  # LLVM takes a moment to import
    from moereplay.simulator.curves.stream import Cut, demands_of, without
    from moereplay.traces.demand import demand_of

    geometry = trace.geometry
    cut = Cut(geometry.layers, geometry.experts, bound.scope == "per_layer", bound.contract == "atomic")
    first_use = demand_of(trace, bound.passes).first_use
    warm = [layer * geometry.experts + expert for layer, expert in bound.warm]
    slots = bound.slots or (cut.units,) * cut.pools
    every, forced = demands_of(trace, bound.passes, bound.reset), bound.admission == FORCED
    resident = [layer * geometry.experts + expert for layer, expert in bound.resident]
    demands, place = without(every, cut, resident) if resident else (every, None)
    uses = first_use if place is None else place[first_use.clip(max=len(place) - 1)]
    hits, accesses, compulsory = optimum.count(demands, cut, slots, forced, [(x, int(uses[x])) for x in warm])
    always = len(every.expert) - len(demands.expert)
    feasible = None
    if bound.sizes:
        from moereplay.simulator.curves import unequal

        found = unequal.most_hits(demands, cut, bound.sizes, bound.pool, forced, warm)
        hits, feasible = min(hits, found.at_most), found.at_least + always
    known = {"accesses": accesses + always, "compulsory": compulsory, "feasible_hits": feasible}
    return {"belady_hits": hits + always if bound.admission else None} | known


def _sum(parts: Sequence[Counted]) -> Counted:
    """Return the counts of all pools: each part has every access, those of the other pools as hits."""
    accesses = parts[0]["accesses"] or 0
    hits, reached = ([part[name] for part in parts] for name in ("belady_hits", "feasible_hits"))
    others = (len(parts) - 1) * accesses
    feasible = sum(most or 0 if found is None else found for most, found in zip(hits, reached, strict=True)) - others
    return {
        "belady_hits": sum(most or 0 for most in hits) - others,
        "accesses": accesses,
        "compulsory": sum(part["compulsory"] or 0 for part in parts),
        "feasible_hits": feasible if any(each is not None for each in reached) else None,
    }


def misses_of(counted: Counted) -> int:
    """Return the misses of the bound."""
    return (counted["accesses"] or 0) - (counted["belady_hits"] or 0)
