"""Replay many configurations over one trace: expand comma lists, check all, replay each with its bound; find a rate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.results.result import Result
from moereplay.results.serving import COLD, FINE, SETTLED, Holding, Level, is_stable, rate_of, saturated_rate, steady
from moereplay.results.settings import OF_CACHE
from moereplay.simulator.bounds import Bound, Counted, bound_of, count
from moereplay.simulator.capacity import EVERY_EXPERT
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import Sharing
from moereplay.simulator.replay import ENGINES, check_engine, plan, replay
from moereplay.simulator.threads import in_threads
from moereplay.traces.demand import demand_of
from moereplay.traces.passes import slots_of
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

if TYPE_CHECKING:
    from moereplay.simulator.curves.curve import Curve

Outcome = tuple[Result, Counted | None]


def expand(lists: Mapping[str, str], fixed: Mapping[str, Any]) -> list[ReplayConfig]:
    """Return every combination of the comma lists, in their order. Raises ConfigError or PolicyError."""
    axes = [[part.strip() for part in text.split(",")] for text in lists.values()]
    for name, parts in zip(lists, axes, strict=True):
        if "" in parts:
            raise ConfigError(
                f"--{name.replace('_', '-')} {lists[name]!r} has an empty entry; separate values with one comma"
            )
    check_count(prod(map(len, axes)), "these lists make", "shorten them")
    configs = [configure(**dict(zip(lists, values, strict=True)), **fixed) for values in itertools.product(*axes)]
    return list(dict.fromkeys(configs))


def run_grid(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    workers: int = 1,
    log: bool = False,
    bounded: bool = True,
    done: Callable[[], None] = lambda: None,
    engine: str = ENGINES[0],
    took: Callable[[int], None] = lambda many: None,
    by_layer: bool | None = False,
) -> Iterator[Outcome]:
    """Replay every configuration, in order, with its bound if `bounded`; `done` is called after each replay.

    `took` is called with how many more replays took over the decisions of another on another platform.
    `by_layer` is that of `replay`.

    All are checked at once, and replayed when the iterator advances. Raises ConfigError, PolicyError or TraceError.
    """
    check_engine(engine)
    for config in configs:
        plan(trace, config)
    bounds = [bound_of(trace, config) if bounded else None for config in configs]
    return _outcomes(trace, bounds, _replays(Run(trace, log, engine, by_layer), configs, workers, done, took))


def _outcomes(trace: Trace, bounds: Sequence[Bound | None], results: Iterator[Result]) -> Iterator[Outcome]:
    known: dict[Bound | None, Counted | None] = {None: None}
    for bound, result in zip(bounds, results, strict=True):
        if bound is not None and bound not in known:
            known[bound] = count(trace, bound)
        yield result, known[bound]


class Run(NamedTuple):
    """Arguments that all replays of a grid share."""

    trace: Trace
    log: bool
    engine: str
    by_layer: bool | None = False

    def __call__(self, group: Sequence[ReplayConfig]) -> Replayed:
        """Replay the trace under configurations that may share decisions."""
        sharing = Sharing() if len(group) > 1 else None
        results = [self._attempt(config, sharing) for config in group]
        return Replayed(results, sharing.taken if sharing else 0)

    def _attempt(self, config: ReplayConfig, sharing: Sharing | None) -> Result | Exception:
        try:
            return replay(self.trace, config, self.log, self.engine, sharing, by_layer=self.by_layer)
        except Exception as error:  # those before it in the grid are not lost
            return error


class Replayed(NamedTuple):
    """Results of a group, or why there is none, and how many took over the decisions of another."""

    results: Sequence[Result | Exception]
    taken: int


def _replays(
    run: Run, configs: Sequence[ReplayConfig], workers: int, done: Callable[[], None], took: Callable[[int], None]
) -> Iterator[Result]:
    derived(run.trace, configs)
    groups, found, at = _groups(run, configs, workers), dict[int, Result | Exception](), 0
    items = [[configs[at] for at in group] for group in groups]
    for group, replayed in zip(groups, _mapped(run, items, min(workers, len(groups))), strict=True):
        took(replayed.taken)
        found.update(zip(group, replayed.results, strict=True))
        while at in found:
            result, at = found.pop(at), at + 1
            if isinstance(result, Exception):
                raise result
            done()
            yield result


def derived(trace: Trace, configs: Iterable[ReplayConfig]) -> None:
    """Derive the demand of a trace under these configurations once, so that workers only map it."""
    for passes in {config.schedule for config in configs if not config.arrive}:
        demand_of(trace, passes)


def _groups(run: Run, configs: Sequence[ReplayConfig], workers: int) -> list[list[int]]:
    """Return the positions of configurations that may share decisions together, in the order of the first of each.

    Those with prefetch, which may also decide differently, are apart if together they would leave workers idle.
    """
    shared = [shares(config) if run.engine == "compiled" and not run.log else "" for config in configs]
    apart = len(set(shared)) < workers
    groups: dict[Hashable, list[int]] = {}
    for at, config in enumerate(configs):
        of = "" if apart and prefetches(config) else shared[at]
        groups.setdefault(of or at, []).append(at)
    return list(groups.values())


def shares(config: ReplayConfig) -> str:
    """Return all but the platform where decisions may hold on several, else an empty text."""
    return "" if config.arrive else config.model_dump_json(exclude={"platform"})


def prefetches(config: ReplayConfig) -> bool:
    """Return whether a configuration prefetches."""
    return config.prefetch.partition(":")[0] != "none"


def _mapped(run: Run, groups: Sequence[Sequence[ReplayConfig]], workers: int) -> Iterator[Replayed]:
    """Yield results in order: machine code in threads, Python in processes, traces in memory in this process."""
    if run.engine == "compiled" and workers > 1:
        yield from in_threads(run, groups, workers)
    elif workers > 1 and run.trace.path is not None:
        from moereplay.sweeps.processes import in_processes  # and multiprocessing, which no thread needs

        work = partial(_replay_in_worker, run.trace.path, *run[1:])
        prepare = partial(files.register_all, files.registered())
        for result in in_processes(work, [group[0] for group in groups], workers, prepare):
            yield Replayed([result], 0)
    else:
        yield from map(run, groups)


def _replay_in_worker(path: Path, log: bool, engine: str, by_layer: bool | None, config: ReplayConfig) -> Result:
    try:
        return replay(_open_once(path), config, log, engine, by_layer=by_layer)
    except Exception as error:  # where it was raised is lost between processes
        blamed = files.blamed(error)
        if blamed is None:
            raise
        raise PolicyError(blamed) from None


@lru_cache(maxsize=1)
def _open_once(path: Path) -> Trace:
    return open_trace(path)


# -- Limit on the configurations of a command, checked before any is made

#: Planning takes about a quarter of a millisecond per configuration, and precedes the first replay.
MOST_CONFIGURATIONS = 100_000


def check_count(count: int, what: str, advice: str) -> None:
    """Raise ConfigError if `count` configurations of `what` ("e.toml: [grid] makes") are too many, with advice."""
    if count > MOST_CONFIGURATIONS:
        number = f"{count:,}" if count < 10**18 else f"more than {10**18:,}"
        raise ConfigError(f"{what} {number} configurations; one command takes {MOST_CONFIGURATIONS:,}: {advice}")


# -- Capacities of a curve where transfer times decide: replayed one by one on a platform


def undecided(curve: Curve, platform: str) -> list[ReplayConfig]:
    """Return the replays that decide the undecided capacities of a curve, smallest first."""
    left = curve.capacity_bytes[~curve.decided]
    return [curve.config.model_copy(update={"capacity": f"{capacity}B", "platform": platform}) for capacity in left]


def decide(
    trace: Trace,
    curve: Curve,
    platform: str,
    workers: int = 1,
    done: Callable[[], None] = lambda: None,
    engine: str = ENGINES[0],
) -> Curve:
    """Replay the undecided capacities of a curve on `platform`, for which alone they hold.

    Calls `done` after each replay. Raises ConfigError if the platform or the engine is unknown.
    """
    configs = undecided(curve, platform)
    if not configs:
        return curve
    misses, complete = curve.layer_misses.copy(), curve.layer_complete.copy()
    outcomes = run_grid(trace, configs, workers, bounded=False, done=done, engine=engine)
    for at, (result, _) in zip(np.flatnonzero(~curve.decided), outcomes, strict=True):
        misses[:, at], complete[:, at] = 0, 0
        for row in result.per_layer:
            misses[row["layer"], at] += row["misses"]
            complete[row["layer"], at] += row["complete_steps"]
    return replace(curve, layer_misses=misses, layer_complete=complete, platform=platform, replayed=~curve.decided)


# -- The largest rate of arrivals at which a queue is stable and a service level holds


FARTHEST = 1000  #: a rate of so small a part of the largest throughput leaves every request alone
FIRST = 512  #: requests of the first search
WIDE, NARROW = 1.25, 1.03  #: ratio of the first two rates that a search tries, without and with an earlier answer


class Repeats(NamedTuple):
    """Bounds on the requests of a search, whose trace begins anew after its last."""

    enough: int  #: from which an answer may be settled
    most: int

    @classmethod
    def of(cls, trace: Trace) -> Repeats:
        """Return the bounds for the work that a request of a trace is, in experts that its tokens choose."""
        each = trace.tokens * trace.geometry.layers * trace.geometry.k / trace.requests
        enough, most = (min(requests, max(FIRST, int(work / each))) for requests, work in (ENOUGH, MOST))
        return cls(max(enough, trace.requests), max(most, trace.requests))


#: Requests, and chosen experts of all of them, that a replay of a search should and may have.
ENOUGH, MOST = (1 << 14, 1 << 22), (1 << 15, 1 << 25)


def at_rate(config: ReplayConfig, rate: str) -> ReplayConfig:
    """Return a configuration whose requests arrive at a rate per second. Raises ConfigError without slots."""
    if slots_of(config.passes) is None:
        raise ConfigError("--find-rate requires --passes batch:N")
    return config.model_copy(update={"arrivals": f"poisson:{rate}"})


def all_resident(config: ReplayConfig) -> ReplayConfig:
    """Return the same service with every expert in the fast tier from the start, where policies have nothing to do."""
    rest = ReplayConfig()
    plain = {name: getattr(rest, name) for name in OF_CACHE}
    return config.model_copy(update=plain | {"capacity": "100%", "resident": EVERY_EXPERT})


def largest_rate(
    replay: Callable[[ReplayConfig, int], Result], config: ReplayConfig, level: Level, repeats: Repeats
) -> Holding:
    """Search for the largest Poisson rate at which the queue is stable and the level holds in the steady state.

    `replay` takes the number of requests. A finite run separates a queue that grows slowly from a stable one only if it
    is long. So rates stay below that at which requests leave while others always wait, which is where queues become
    unstable, and the search is repeated with twice as many requests until its answer moves by less than `SETTLED`.
    """
    slots = slots_of(at_rate(config, "1").passes)
    assert slots is not None  # checked by `at_rate`
    fewest = 2 * COLD * slots.many
    many, most, found = max(FIRST, fewest), max(repeats.most, fewest), None
    while True:
        found = _rate_with(min(many, most), replay, config, level, slots.many, found)
        settled = found.moved is not None and found.moved <= SETTLED and many >= repeats.enough
        if settled or many >= most:
            return found._replace(settled=settled)
        many *= 2


def _rate_with(
    many: int,
    replay: Callable[[ReplayConfig, int], Result],
    config: ReplayConfig,
    level: Level,
    slots: int,
    before: Holding | None,
) -> Holding:
    """Search with so many requests, near an answer from `before`."""
    tried: dict[float, bool] = {}  # whether the level holds at a rate, stable or not
    best: Result | None = None  # at the largest rate so far that holds, or the last: long runs have much to keep
    any_holds = False

    def holds(rate: float) -> bool:
        nonlocal best, any_holds
        result = replay(at_rate(config, _figure(rate)), many)
        tried[rate] = level.holds(steady(result.per_request, slots))
        stable = tried[rate] and is_stable(result.per_request)
        best = result if stable or not any_holds else best
        any_holds |= stable
        return stable

    top = saturated_rate(replay(config.model_copy(update={"arrivals": "every:0"}), many).per_request)
    found = _largest(holds, top, before and before.rate)
    assert best is not None  # a rate is tried
    rate = found and rate_of(best.config["arrivals"])  # as it was rounded
    above = min((each for each in tried if found and each > found), default=None)
    by_queue = bool(found) and (above is None or tried[above])
    moved = None if before is None else abs(rate / before.rate - 1) if rate and before.rate else float(bool(rate))
    replays = 1 + len(tried) + (before.tried if before else 0)
    return Holding(best, steady(best.per_request, slots), rate, by_queue, top, moved, False, replays)


def _largest(holds: Callable[[float], bool], top: float, guess: float | None) -> float | None:
    """Return a rate below `top` that holds, while `FINE` times it does not; None if none holds."""
    low, high, step = 0.0, top, NARROW if guess else WIDE
    rate = min(guess or top / WIDE, top / FINE)
    while high > top / FARTHEST:
        low, high = (rate, high) if holds(rate) else (low, rate)
        if low and high <= low * FINE * (1 + 1e-9):
            return low
        rate = min(low * step, (low * high) ** 0.5) if low else high / step
        step *= step
    return None


def _figure(rate: float) -> str:
    """Return a rate of four digits as a setting has it."""
    return f"{float(f'{rate:.4g}')!r}"
