"""Many configurations over one trace: expand comma lists, check them all, replay, each beside its Belady bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import NamedTuple

from policies import files
from policies.contract import PolicyError
from policies.grammar import parse
from simulator.config import ReplayConfig, configure
from simulator.errors import ConfigError
from simulator.limits import check_count
from simulator.processes import in_processes
from simulator.replay import ENGINES, check_engine, plan, replay
from simulator.result import Result
from simulator.threads import in_threads
from traces.demand import demand_of
from traces.schema import Trace
from traces.store import open_trace

Bound = Mapping[str, int]
Outcome = tuple[Result, Bound | None]


def expand(lists: Mapping[str, str], fixed: Mapping[str, object]) -> list[ReplayConfig]:
    """Every combination of the comma lists, in their order. Raises ConfigError or PolicyError."""
    axes = [[part.strip() for part in text.split(",")] for text in lists.values()]
    for name, parts in zip(lists, axes, strict=True):
        if "" in parts:
            raise ConfigError(
                f"--{name.replace('_', '-')} {lists[name]!r} has an empty entry; separate values with one comma"
            )
    check_count(prod(map(len, axes)), "these lists make", "shorten them")
    configs = [configure(**dict(zip(lists, values, strict=True)), **fixed) for values in itertools.product(*axes)]
    return list(dict.fromkeys(configs))


def bound_of(config: ReplayConfig) -> ReplayConfig:
    """The replay that bounds a configuration's hit rate without prefetch: Belady on the recorded demand."""
    miss = parse("miss", config.miss)
    bits = miss.policy.bits(miss.params)
    fetch = f"fetch:bits={bits[0]:g}" if bits else "fetch"
    changes = {"eviction": "belady", "prefetch": "none", "routing": "standard", "miss": fetch, "seed": 0, "profile": ()}
    defaults = {"prefetch_at": "gate", "prefetch_admission": "evict", "lookahead": "recorded"}
    defaults |= {"platform": "a100-5gbps"}
    return config.model_copy(update=changes | defaults)


def run_grid(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    workers: int = 1,
    log: bool = False,
    bounded: bool = True,
    done: Callable[[], None] = lambda: None,
    engine: str = ENGINES[0],
) -> Iterator[Outcome]:
    """Replay every configuration, in order, with its bound if `bounded`; `done` is called after each replay.

    All are checked at once, and replayed as they are asked for. Raises ConfigError, PolicyError or TraceError.
    """
    check_engine(engine)
    bounds = list(dict.fromkeys(bound_of(config) for config in configs)) if bounded else []
    for config in [*configs, *bounds]:
        plan(trace, config)
    run = Run(trace, log, engine)
    return _outcomes(configs, bounds, _replays(run, [*bounds, *configs], workers, done))


def replays_needed(configs: Sequence[ReplayConfig]) -> int:
    """How many replays `run_grid` runs, for a progress bar."""
    return len(configs) + len(dict.fromkeys(map(bound_of, configs)))


def _outcomes(
    configs: Sequence[ReplayConfig], bounds: Sequence[ReplayConfig], results: Iterator[Result]
) -> Iterator[Outcome]:
    known = {config: _bound(next(results)) for config in bounds}
    for config, result in zip(configs, results, strict=True):
        yield result, known.get(bound_of(config))


def _bound(belady: Result) -> Bound:
    totals = belady.totals
    return {"belady_hits": totals["hits"], "accesses": totals["accesses"], "compulsory": totals["compulsory"]}


class Run(NamedTuple):
    """What all replays of a grid have in common."""

    trace: Trace
    log: bool
    engine: str

    def __call__(self, config: ReplayConfig) -> Result:
        """One replay."""
        return replay(self.trace, config, self.log, self.engine)


def _replays(run: Run, configs: Sequence[ReplayConfig], workers: int, done: Callable[[], None]) -> Iterator[Result]:
    for passes in {config.passes for config in configs}:
        demand_of(run.trace, passes)  # once, so that workers only map it
    for result in _mapped(run, configs, min(workers, len(configs))):
        done()
        yield result


def _mapped(run: Run, configs: Sequence[ReplayConfig], workers: int) -> Iterator[Result]:
    """Results in order: machine code runs in threads, Python in processes, and what is in memory only in this one."""
    if run.engine == "compiled" and workers > 1:
        yield from in_threads(run, configs, workers)
    elif workers > 1 and run.trace.path is not None:
        work = partial(_replay_in_worker, run.trace.path, run.log, run.engine)
        yield from in_processes(work, configs, workers, partial(files.retake, files.taken()))  # the user's own policies
    else:
        yield from map(run, configs)


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
