"""Many configurations over one trace: expand comma lists, check them all, replay, each beside its Belady bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from policies.grammar import parse
from simulator.config import ReplayConfig, configure
from simulator.errors import ConfigError
from simulator.replay import plan, replay
from simulator.result import Result
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
    configs = [configure(**dict(zip(lists, values, strict=True)), **fixed) for values in itertools.product(*axes)]
    return list(dict.fromkeys(configs))


def bound_of(config: ReplayConfig) -> ReplayConfig:
    """The replay that bounds a configuration's hit rate without prefetch: Belady on the recorded demand."""
    miss = parse("miss", config.miss)
    bits = miss.policy.bits(miss.params)
    fetch = f"fetch:bits={bits[0]:g}" if bits else "fetch"
    changes = {"eviction": "belady", "prefetch": "none", "routing": "standard", "miss": fetch, "seed": 0}
    defaults = {"prefetch_at": "gate", "prefetch_admission": "evict", "platform": "a100-5gbps"}
    return config.model_copy(update=changes | defaults)


def run_grid(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    workers: int = 1,
    log: bool = False,
    bounded: bool = True,
    done: Callable[[], None] = lambda: None,
) -> Iterator[Outcome]:
    """Replay every configuration, in order, with its bound if `bounded`; `done` is called after each replay.

    All are checked before the first runs. Raises ConfigError, PolicyError or TraceError.
    """
    bounds = list(dict.fromkeys(bound_of(config) for config in configs)) if bounded else []
    for config in [*configs, *bounds]:
        plan(trace, config)
    for passes in {config.passes for config in configs}:
        demand_of(trace, passes)  # once, so that workers only map it
    results = _replays(trace, [*bounds, *configs], workers, log, done)
    known = {config: _bound(next(results)) for config in bounds}
    for config, result in zip(configs, results, strict=True):
        yield result, known.get(bound_of(config))


def replays_needed(configs: Sequence[ReplayConfig]) -> int:
    """How many replays `run_grid` runs, for a progress bar."""
    return len(configs) + len(dict.fromkeys(map(bound_of, configs)))


def _bound(belady: Result) -> Bound:
    totals = belady.totals
    return {"belady_hits": totals["hits"], "accesses": totals["accesses"], "compulsory": totals["compulsory"]}


def _replays(
    trace: Trace, configs: Sequence[ReplayConfig], workers: int, log: bool, done: Callable[[], None]
) -> Iterator[Result]:
    if workers < 2 or len(configs) < 2 or trace.path is None:
        for config in configs:
            result = replay(trace, config, log)
            done()
            yield result
        return
    # spawn, not fork: polars and zarr run threads
    with ProcessPoolExecutor(min(workers, len(configs)), get_context("spawn")) as pool:
        for result in pool.map(_replay_in_worker, itertools.repeat(trace.path), configs, itertools.repeat(log)):
            done()
            yield result


def _replay_in_worker(path: Path, config: ReplayConfig, log: bool) -> Result:
    return replay(_open_once(path), config, log)


@lru_cache(maxsize=1)
def _open_once(path: Path) -> Trace:
    return open_trace(path)
