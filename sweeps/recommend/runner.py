"""Replay the configurations of a search on one trace, each once, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moereplay.results.result import Result, values_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.recommend.space import can_replay
from moereplay.traces.schema import Trace

NO_TPOT = (
    "tokens/s is undefined: no pass of the trace decodes; for text recorded as prompts try --passes decode:32, which "
    "decodes each from position 32 on"
)


class Tried(NamedTuple):
    """A configuration and its result."""

    config: ReplayConfig
    result: Result

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second of a request. Raises ConfigError if no pass decodes."""
        tpot_ms = values_of(self.result)["tpot_ms"]
        if not tpot_ms:
            raise ConfigError(NO_TPOT)
        return 1000 / tpot_ms

    @property
    def hit_rate(self) -> float:
        """Hits per access."""
        return values_of(self.result)["hit_rate"] or 0.0

    @property
    def mass_share_kept(self) -> float | None:
        """Share of the gate weight that was executed as the router chose; None if the trace has no weights."""
        return values_of(self.result)["mass_share_kept"]


@dataclass
class Budget:
    """Time budget of a search, counted from the end of the first replays, which may include compilation."""

    seconds: float | None = None  #: None for no limit
    interrupted: Callable[[], bool] = lambda: False
    share: float = 1.0  #: of the seconds, when the current part of the search ends
    begun: float | None = None

    def begin(self) -> None:
        """Start the clock, unless it runs already."""
        self.begun = time.monotonic() if self.begun is None else self.begun

    @property
    def is_spent(self) -> bool:
        """True if the current part of the search must end."""
        if self.interrupted():
            return True
        if self.seconds is None or self.begun is None:
            return False
        return time.monotonic() - self.begun >= self.share * self.seconds


def _discard(replays: int, fastest: float) -> None:
    """Discard progress."""


@dataclass
class Runner:
    """Replays configurations and remembers the results.

    `advance` gets the number of new replays, and the highest tokens/s so far.
    """

    trace: Trace
    workers: int = 1
    advance: Callable[[int, float], None] = _discard
    known: dict[ReplayConfig, Tried] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    cut: bool = False  #: whether the budget prevented a requested replay
    fastest: float = 0.0

    def tried(self, configs: Iterable[ReplayConfig], least: int = 0) -> list[Tried]:
        """Replay new configurations, and return the results of all, in order.

        Leaves out those beyond the budget, but replays at least the first `least`.
        """
        wanted = list(dict.fromkeys(configs))
        new = [config for config in wanted if config not in self.known]
        step = max(1, self.workers)
        for at in range(0, len(new), step):
            if at >= least and self.budget.is_spent:
                self.cut = True
                break
            self._replay(new[at : at + step])
        return [self.known[config] for config in wanted if config in self.known]

    def _replay(self, configs: Sequence[ReplayConfig]) -> None:
        outcomes = run_grid(self.trace, configs, self.workers, bounded=False)
        new = {config: Tried(config, result) for config, (result, _) in zip(configs, outcomes, strict=True)}
        self.known |= new
        real = [each.tokens_per_s for config, each in new.items() if not config.prefetch.startswith("oracle")]
        self.fastest = max([self.fastest, *real])  # a perfect prefetch is a bound, which no answer names
        self.budget.begin()
        self.advance(len(new), self.fastest)


def fastest_first(tried: Iterable[Tried]) -> list[Tried]:
    """Sort by tokens per second, stably."""
    return sorted(tried, key=lambda each: -each.tokens_per_s)


@dataclass(frozen=True)
class Runners:
    """A runner on some requests, to rank sets, and one on all requests, for the reported figures."""

    few: Runner
    whole: Runner

    @property
    def replayed(self) -> int:
        """Number of replays by either runner."""
        return len(self.whole.known) + (0 if self.few is self.whole else len(self.few.known))

    @property
    def cut(self) -> bool:
        """True if the budget prevented a replay."""
        return self.few.cut or self.whole.cut

    def fastest(self, sets: Iterable[ReplayConfig]) -> list[Tried]:
        """Replay on all requests the set that is fastest on some of them; empty if none can be replayed."""
        able = [each for each in sets if can_replay(self.few.trace, each)]
        if len(able) > 1:
            able = [each.config for each in fastest_first(self.few.tried(able))]
        return self.whole.tried(able[:1])


# -- How much a search tries: everything that a minute allows, or what answers in seconds


@dataclass(frozen=True)
class Pace:
    """Sizes of the parts of a search."""

    judged: int | None  #: accesses of the requests that figures are of; None: of all
    screened: int | None  #: accesses of the requests on which sets are ranked; None: a million
    kept: int  #: evictions (with scope) that pass from the first round to the second
    caches: int | None  #: evictions that later rounds try again, None for all
    finalists: int  #: sets replayed on all requests, and half as many of each kind for comparison
    leading: int  #: of those, from which every size of the memory takes the fastest
    shares: tuple[float, ...]  #: of the cache, in the curve over memory
    recalls: tuple[float, ...]  #: of a predictor, rising, at which prefetching is tried
    bounded: bool  #: whether a prefetch of perfect knowledge decides if prefetching is searched


THOROUGH = Pace(
    judged=None,
    screened=None,
    kept=4,
    caches=None,
    finalists=6,
    leading=4,
    shares=(0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    recalls=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    bounded=False,
)
QUICK = Pace(
    judged=300_000,
    screened=60_000,
    kept=2,
    caches=4,
    finalists=4,
    leading=1,
    shares=(0.5, 0.75, 1.0, 1.5, 2.0),
    recalls=(0.5, 0.75, 1.0),
    bounded=True,
)
