"""All limits of a configuration, each null where its premise fails, with the reason.

A fixed set of residents is chosen with hindsight: accesses of its experts are hits, so the best set of a pool has the
experts of most accesses, or the most in its bytes. `preloaded`: the set is resident before the run and after each
reset, without a transfer. `loaded_once`: the first access of each of its experts after the start and after each reset
is a miss; this is one way to evict, so it hits no more than the relaxed bound. If eviction and admissible routing both
know the future, the fewest misses lie within a `Bracket`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from moereplay.simulator.bounds import FORCED, RELAXED, Bound, Counted, count, judge, misses_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.curves.complete import most_complete
from moereplay.simulator.curves.stream import Cut, demands_of, resets
from moereplay.simulator.curves.unequal import Bracket
from moereplay.simulator.limits.choices import Choices, Freedom, choices, sharpened
from moereplay.simulator.limits.least_time import LeastTime, least_time
from moereplay.simulator.limits.relaxation import Pools, Relaxation, unit_of
from moereplay.simulator.limits.strategy import Strategy
from moereplay.simulator.replay import Plan, plan
from moereplay.traces.demand import demand_of
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace


class FixedSet(NamedTuple):
    """Hits of the best fixed sets; the two sets may differ."""

    preloaded: int
    loaded_once: int


def fixed_set(trace: Trace, bound: Bound) -> FixedSet | None:
    """Return the most hits of a fixed set in the pools of a bound, whose slots must be known.

    None where a pool holds experts of too many sizes to try.
    """
    layers, experts = trace.geometry.layers, trace.geometry.experts
    demands = demands_of(trace, bound.passes, bound.reset)
    steps, many = np.arange(len(demands.offsets) - 1), np.diff(demands.offsets)
    unit = np.repeat(steps % layers, many) * experts + demands.expert  # of every access
    begun = np.repeat(np.cumsum(demands.fresh)[steps // layers], many)  # resets before it
    accesses = np.bincount(unit, minlength=layers * experts)
    loads = np.bincount(np.unique(begun * (layers * experts) + unit) % (layers * experts), minlength=layers * experts)
    for layer, expert in bound.warm:  # its first access is a hit, if there is one before a reset
        x = layer * experts + expert
        loads[x] -= bool(((unit == x) & (begun == 0)).any())
    if bound.sizes:
        preloaded, loaded_once = (_most_bytes(hits.reshape(layers, -1), bound) for hits in (accesses, accesses - loads))
        return None if preloaded is None or loaded_once is None else FixedSet(preloaded, loaded_once)
    pools = layers if bound.scope == "per_layer" else 1
    return FixedSet(*(_most(hits.reshape(pools, -1), bound.slots) for hits in (accesses, accesses - loads)))


def _most(hits: np.ndarray, slots: tuple[int, ...]) -> int:
    """Return the sum of the largest values of each pool's row, one per slot."""
    best = -np.sort(-hits, axis=1)
    return sum(int(row[:many].sum()) for row, many in zip(best, slots, strict=True))


MOST_TRIED = 10**7  #: numbers of experts of each size that are tried


def _most_bytes(hits: np.ndarray, bound: Bound) -> int | None:
    """Return the most hits (L, E) of a set that fits the pool, by trying how many experts it has of each size."""
    sizes, found = np.repeat(bound.sizes, hits.size // len(bound.sizes)), list[tuple[int, np.ndarray]]()
    for size in sorted(set(bound.sizes), reverse=True):  # of a size the best are taken first
        found.append((size, np.concatenate([[0], np.cumsum(-np.sort(-hits.ravel()[sizes == size]))])))
    tried = prod(len(best) for _, best in found[:-1])
    return _most_of_sizes(found, bound.pool) if tried <= MOST_TRIED else None


def _most_of_sizes(found: Sequence[tuple[int, np.ndarray]], pool: int) -> int:
    (size, best), *others = found
    many = np.arange(min(len(best) - 1, pool // size) + 1)
    if not others:
        return int(best[many[-1]])
    left = pool - many * size
    if len(others) == 1:
        other, best_of_it = others[0]
        return int((best[many] + best_of_it[np.minimum(left // other, len(best_of_it) - 1)]).max())
    return max(int(best[n]) + _most_of_sizes(others, int(left[n])) for n in many.tolist())


class Complete(NamedTuple):
    """Steps that demand an expert; how many of them one that knows the future completes, and any eviction at most."""

    steps: int
    at_least: int
    at_most: int


def complete_steps(trace: Trace, bound: Bound) -> Complete:
    """Bracket the most complete steps in the pools of a relaxed bound."""
    geometry, demands = trace.geometry, demands_of(trace, bound.passes, bound.reset)
    cut = Cut(geometry.layers, geometry.experts, bound.scope == "per_layer", bound.contract == "atomic")
    unit = gcd(*bound.sizes)
    sizes = [size // unit for size in bound.sizes] or [1] * geometry.layers
    pools = [bound.pool // unit] if bound.sizes else bound.slots
    warm = [layer * geometry.experts + expert for layer, expert in bound.warm]
    steps = int(np.count_nonzero(np.diff(demands.offsets)))
    return Complete(steps, *most_complete(demands, cut, sizes, pools, warm))


# routing that may choose


def fewest_misses(trace: Trace, bound: Bound, free: Freedom, recorded: int) -> Bracket:
    """Bracket the misses in the pools of a relaxed bound, which has `recorded` misses by the recorded routing.

    Raises TraceError.
    """
    assert bound.admission == RELAXED
    plan, experts = schedule(trace, bound.passes), trace.geometry.experts
    rules = choices(trace, bound.passes, free)
    pools = _pools(trace, bound, plan, rules)
    warm = [layer * experts + expert for layer, expert in bound.warm]
    rows, every = np.append(plan.start, plan.stop[-1]), trace.geometry.layers * experts
    strategy = Strategy(rules, pools, rows, every, warm)
    reached = [min(strategy.soonest(), recorded)]
    relaxation = Relaxation(sharpened(rules), pools, every, warm)
    for prices, solved in relaxation.search(reached):
        reached[0] = min(reached[0], strategy.priced(prices, solved))
    return Bracket(relaxation.limit, reached[0])


def _pools(trace: Trace, bound: Bound, plan: Passes, rules: Choices) -> Pools:
    layers = trace.geometry.layers
    starts = np.repeat(np.cumsum(resets(plan, bound.reset)), layers).astype(np.int64)
    slots = np.array(bound.slots, np.int64)
    return Pools(slots, starts, layers, layers if len(slots) > 1 else 1, unit_of(rules))


# all limits

NOT_FETCHED = "no least time where a miss may be dropped, substituted or computed on the CPU: its bytes need not cross"
OTHER_PRECISIONS = "no least time where misses are fetched at several precisions: a copy's bytes are not known"
BESIDE = "no least time with side buffers: they hold experts outside the cache"
BESIDE_RESIDENTS = "no limits beside --resident, which no strategy may evict"
BY_LINK = "no limits of pools by link; a replay has the Belady bound of these"
BY_LAYER = (
    "no limits of pools by layer where experts of a layer differ in bytes; a replay has the Belady bound of these"
)
UNEVEN_BATCHES = "no least time where links read matrix by matrix experts of a layer that differ in bytes"
OTHER_DEMAND = "no least time where routing changes the demand"
OTHER_BYTES = "no bound for other routing where experts of one pool differ in bytes"
MANY_SIZES = "no fixed set: experts of one pool have too many sizes"
NOTHING_DECODED = "no tokens/s: nothing is decoded; see --passes"


@dataclass(frozen=True)
class Limits:
    """Lower bounds on misses and times for the same demand, machine and bytes; None if unknown."""

    accesses: int
    compulsory: int | None  #: misses of any cache without prefetch
    relaxed: int | None  #: misses of the relaxed bound
    forced: int | None  #: likewise, where every miss is admitted
    fixed: FixedSet | None  #: hits
    routed: Bracket | None  #: misses
    least: LeastTime | None
    relaxed_reached: int | None = None  #: misses of a way; None where `relaxed` are the fewest
    forced_reached: int | None = None
    complete: Complete | None = None
    reasons: tuple[str, ...] = field(default=())  #: why something is not known


def limits(trace: Trace, config: ReplayConfig, free: Freedom | None = None) -> Limits:
    """Return all limits; those of routing only if `free` permits choices. Raises ConfigError or PolicyError."""
    ready, found = plan(trace, config), judge(trace, config)
    reasons = list(_no_least_time(ready))
    bound = found.bound
    if bound is None or not bound.admission or bound.resident or bound.parts:
        counted = {} if bound is None else count(trace, bound)
        why = f"{found.remark}: {found.setting}"
        if bound is not None and bound.admission:
            by_layer = BY_LAYER if config.scope == "per_layer" else BY_LINK
            why = by_layer if bound.parts else BESIDE_RESIDENTS
        unknown = dict.fromkeys(("relaxed", "forced", "fixed", "routed", "least"))
        return Limits(
            len(demand_of(trace, config.schedule).expert), counted.get("compulsory"), **unknown, reasons=(why, *reasons)
        )
    relaxed = replace(bound, admission=RELAXED)
    counted = count(trace, relaxed)
    fewest = misses_of(counted)
    forced = count(trace, replace(bound, admission=FORCED)) if ready.chosen.miss.policy.fetches_all else None
    fixed = fixed_set(trace, relaxed)
    least = None if reasons else least_time(trace, ready, relaxed)
    if least is not None and not least.decode_tokens:
        reasons.append(NOTHING_DECODED)
    if fixed is None:
        reasons.append(MANY_SIZES)
    if free and bound.sizes:
        reasons.append(OTHER_BYTES)
    return Limits(
        counted["accesses"] or 0,
        counted["compulsory"],
        fewest,
        None if forced is None else max(fewest, misses_of(forced)),  # what no eviction avoids, none that admits does
        fixed,
        fewest_misses(trace, relaxed, free, fewest) if free and not bound.sizes else None,
        least,
        _reached(counted),
        None if forced is None else _reached(forced),
        complete_steps(trace, relaxed),
        tuple(reasons),
    )


def _reached(counted: Counted) -> int | None:
    """Return the misses of a way, where the fewest are not known."""
    feasible = counted["feasible_hits"]
    return None if feasible is None else (counted["accesses"] or 0) - feasible


def _no_least_time(ready: Plan) -> Iterator[str]:
    """Yield the failed premises of the least time."""
    chosen = ready.chosen
    if chosen.changes_routing:
        yield f"{OTHER_DEMAND}: {ready.config.routing}"
    if not chosen.miss.policy.fetches_all:
        yield f"{NOT_FETCHED}: {ready.config.miss}"
    elif ready.layout.precisions > 1:
        yield f"{OTHER_PRECISIONS}: {ready.config.miss}"
    if ready.machine.by_matrix and ready.layout.geometry.bytes_by_expert:
        yield UNEVEN_BATCHES
    if chosen.prefetch.policy.side_slots(chosen.prefetch.params):
        yield f"{BESIDE}: {ready.config.prefetch}"
