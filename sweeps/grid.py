"""Replay many configurations over one trace: expand comma lists, check all, replay each with its bound; find a rate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.results.result import Result, Row
from moereplay.results.serving import Holding, Level, rate_of
from moereplay.simulator.bounds import Bound, Counted, bound_of, count
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.curves.curve import Curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import Sharing
from moereplay.simulator.replay import ENGINES, check_engine, plan, replay
from moereplay.simulator.threads import in_threads
from moereplay.sweeps.processes import in_processes
from moereplay.traces.demand import demand_of
from moereplay.traces.passes import slots_of
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

Outcome = tuple[Result, Counted | None]


def expand(lists: Mapping[str, str], fixed: Mapping[str, object]) -> list[ReplayConfig]:
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
) -> Iterator[Outcome]:
    """Replay every configuration, in order, with its bound if `bounded`; `done` is called after each replay.

    `took` is called with how many more replays took over the decisions of another on another platform.

    All are checked at once, and replayed when the iterator advances. Raises ConfigError, PolicyError or TraceError.
    """
    check_engine(engine)
    for config in configs:
        plan(trace, config)
    bounds = [bound_of(trace, config) if bounded else None for config in configs]
    return _outcomes(trace, bounds, _replays(Run(trace, log, engine), configs, workers, done, took))


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

    def __call__(self, group: Sequence[ReplayConfig]) -> Replayed:
        """Replay the trace under configurations that may share decisions."""
        sharing = Sharing() if len(group) > 1 else None
        results = [self._attempt(config, sharing) for config in group]
        return Replayed(results, sharing.taken if sharing else 0)

    def _attempt(self, config: ReplayConfig, sharing: Sharing | None) -> Result | Exception:
        try:
            return replay(self.trace, config, self.log, self.engine, sharing)
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
        work = partial(_replay_in_worker, run.trace.path, run.log, run.engine)
        prepare = partial(files.register_all, files.registered())
        for result in in_processes(work, [group[0] for group in groups], workers, prepare):
            yield Replayed([result], 0)
    else:
        yield from map(run, groups)


def _replay_in_worker(path: Path, log: bool, engine: str, config: ReplayConfig) -> Result:
    try:
        return replay(_open_once(path), config, log, engine)
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
    misses = curve.layer_misses.copy()
    outcomes = run_grid(trace, configs, workers, bounded=False, done=done, engine=engine)
    for at, (result, _) in zip(np.flatnonzero(~curve.decided), outcomes, strict=True):
        misses[:, at] = _by_layer(result, len(misses))
    return replace(curve, layer_misses=misses, platform=platform, replayed=~curve.decided)


def _by_layer(result: Result, layers: int) -> np.ndarray:
    misses = np.zeros(layers, np.int64)
    for row in result.per_layer:
        misses[row["layer"]] += row["misses"]
    return misses


# -- The largest rate of arrivals at which a configuration holds a service level


#: Rates that are tried, per decade: neighbours differ by 1.2 %.
STEPS = 200
FARTHEST = 3 * STEPS  #: from the throughput of requests that are all there at the start, in both directions


def at_rate(config: ReplayConfig, rate: str) -> ReplayConfig:
    """Return a configuration whose requests arrive at a rate per second. Raises ConfigError without slots."""
    if slots_of(config.passes) is None:
        raise ConfigError("--find-rate requires --passes batch:N")
    return config.model_copy(update={"arrivals": f"poisson:{rate}"})


def largest_rate(replay: Callable[[ReplayConfig], Result], config: ReplayConfig, level: Level) -> Holding:
    """Search for the largest rate at which the level holds, by bisection over a geometric grid.

    Gaps scale with the inverse of the rate for a fixed seed. The level holds at the rate that is returned and not at
    the next one of the grid; at rates above it may hold again where the order of passes changes.
    """
    at_rate(config, "1")
    start = replay(config.model_copy(update={"arrivals": "all"}))
    base = _throughput(start.per_request)
    results: dict[int, Result] = {}

    def holds(step: int) -> bool:
        results[step] = replay(at_rate(config, _figure(base * 10 ** (step / STEPS))))
        return level.holds(results[step].per_request)

    if level.holds(start.per_request):
        return Holding(start, None, False, 1)
    low, high = -FARTHEST, FARTHEST
    if not holds(low):
        return Holding(results[low], None, True, 1 + len(results))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Holding(results[low], rate_of(results[low].config["arrivals"]), True, 1 + len(results))


def _throughput(rows: Sequence[Row]) -> float:
    return len(rows) * 1e9 / max(1, *(row["end_ns"] for row in rows))


def _figure(rate: float) -> str:
    """Return a rate of four digits as a setting has it."""
    return f"{float(f'{rate:.4g}')!r}"
