"""Everything that limits a configuration, each null where its premise fails, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moereplay.simulator.bounds import FORCED, RELAXED, count, judge, misses_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.limits.choices import Freedom
from moereplay.simulator.limits.fixed import FixedSet, fixed_set
from moereplay.simulator.limits.least_time import LeastTime, least_time
from moereplay.simulator.limits.routed import Bracket, fewest_misses
from moereplay.simulator.replay import Plan, plan
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace

NOT_FETCHED = "no least time where a miss may be dropped, substituted or computed on the CPU: its bytes need not cross"
OTHER_PRECISIONS = "no least time where misses are fetched at several precisions: a copy's bytes are not known"
BESIDE = "no least time with side buffers: they hold experts beside the cache"
OTHER_DEMAND = "no least time where routing changes the demand"
NOTHING_DECODED = "no tokens/s: nothing is decoded; see --passes"


@dataclass(frozen=True)
class Limits:
    """Misses and times that no configuration of the same demand, machine and bytes undercuts; None where not known."""

    accesses: int
    compulsory: int | None  #: misses of any cache without prefetch
    relaxed: int | None  #: misses of the relaxed bound
    forced: int | None  #: likewise, where every miss is admitted
    fixed: FixedSet | None  #: hits
    routed: Bracket | None  #: misses
    least: LeastTime | None
    reasons: tuple[str, ...] = field(default=())  #: why something is not known


def limits(trace: Trace, config: ReplayConfig, free: Freedom | None = None) -> Limits:
    """All of a configuration; what routing could do only if `free` says how far. Raises ConfigError or PolicyError."""
    ready, found = plan(trace, config), judge(trace, config)
    reasons = list(_no_least_time(ready))
    bound = found.bound
    if bound is None or not bound.admission:
        counted = {} if bound is None else count(trace, bound)
        why = f"{found.remark}: {found.setting}"
        unknown = dict.fromkeys(("relaxed", "forced", "fixed", "routed", "least"))
        return Limits(_accesses(trace, config), counted.get("compulsory"), **unknown, reasons=(why, *reasons))
    relaxed = replace(bound, admission=RELAXED)
    counted = count(trace, relaxed)
    fewest = misses_of(counted)
    least = None if reasons else least_time(trace, ready, relaxed)
    if least is not None and not least.decode_passes:
        reasons.append(NOTHING_DECODED)
    return Limits(
        counted["accesses"] or 0,
        counted["compulsory"],
        fewest,
        misses_of(count(trace, replace(bound, admission=FORCED))) if ready.chosen.miss.policy.fetches_all else None,
        fixed_set(trace, relaxed),
        fewest_misses(trace, relaxed, free, fewest) if free else None,
        least,
        tuple(reasons),
    )


def _accesses(trace: Trace, config: ReplayConfig) -> int:
    return len(demand_of(trace, config.passes).expert)


def _no_least_time(ready: Plan) -> Iterator[str]:
    """Which premises of the least time fail."""
    chosen = ready.chosen
    if chosen.changes_routing:
        yield f"{OTHER_DEMAND}: {ready.config.routing}"
    if not chosen.miss.policy.fetches_all:
        yield f"{NOT_FETCHED}: {ready.config.miss}"
    elif ready.layout.precisions > 1:
        yield f"{OTHER_PRECISIONS}: {ready.config.miss}"
    if chosen.prefetch.policy.side_slots(chosen.prefetch.params):
        yield f"{BESIDE}: {ready.config.prefetch}"
