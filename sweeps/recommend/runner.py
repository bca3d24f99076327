"""Replay the configurations of a search on one trace, each once, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moereplay.results.result import Result, values_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.recommend.space import AXES, can_replay
from moereplay.traces.schema import Trace
from moereplay.traces.selection import accesses_of

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
    def policies(self) -> dict[str, str]:
        """The settings that a search chooses."""
        return {kind: getattr(self.config, kind) for kind in AXES}

    @property
    def model(self) -> str:
        """The trace's model."""
        return self.result.about["model"]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        return self.result.about["capacity_bytes"]

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
    """Work of a search, as replayed accesses, so that its answer does not depend on the machine; and a user's limits.

    Time counts from the end of the first replays, which may include compilation.
    """

    seconds: float | None = None  #: wall time, if the user asks for it: where it cuts, answers differ from run to run
    interrupted: Callable[[], bool] = lambda: False
    accesses: float | None = None  #: None for no limit
    share: float = 1.0  #: of both, when the current part of the search ends
    spent: int = 0  #: accesses
    replays: int = 0
    begun: float | None = None

    def allowed(self, wanted: int, each: int) -> int:
        """Return how many of the wanted replays of `each` accesses the current part of the search still allows."""
        if self.accesses is None:
            return wanted
        return min(wanted, max(0, int((self.share * self.accesses - self.spent) // max(1, each))))

    def spend(self, replays: int, each: int) -> None:
        """Count finished replays of `each` accesses, and start the clock with the first."""
        self.replays += replays
        self.spent += replays * each
        self.begun = time.monotonic() if self.begun is None else self.begun

    @property
    def is_over(self) -> bool:
        """True if the user's time is over, or the search was interrupted."""
        if self.interrupted():
            return True
        if self.seconds is None or self.begun is None:
            return False
        return time.monotonic() - self.begun >= self.share * self.seconds


@dataclass
class Runner:
    """Replays configurations and remembers the results. `advance` gets the number of new replays."""

    trace: Trace
    workers: int = 1
    advance: Callable[[int], None] = lambda replays: None
    known: dict[ReplayConfig, Tried] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    cut: bool = False  #: whether the budget prevented a requested replay

    def tried(self, configs: Iterable[ReplayConfig], least: int = 0) -> list[Tried]:
        """Replay new configurations, and return the results of all, in order.

        Leaves out those beyond the budget, but replays at least the first `least`.
        """
        wanted = list(dict.fromkeys(configs))
        new = [config for config in wanted if config not in self.known]
        allowed = max(least, self.budget.allowed(len(new), accesses_of(self.trace)))
        self.cut |= allowed < len(new)
        step = max(1, self.workers)
        for at in range(0, min(allowed, len(new)), step):
            if at >= least and self.budget.is_over:
                self.cut = True
                break
            self._replay(new[at : min(at + step, allowed)])
        return [self.known[config] for config in wanted if config in self.known]

    def _replay(self, configs: Sequence[ReplayConfig]) -> None:
        outcomes = run_grid(self.trace, configs, self.workers, bounded=False)
        new = {config: Tried(config, result) for config, (result, _) in zip(configs, outcomes, strict=True)}
        self.known |= new
        self.budget.spend(len(new), accesses_of(self.trace))
        self.advance(len(new))


def fastest_first(tried: Iterable[Tried]) -> list[Tried]:
    """Sort by tokens per second, stably."""
    return sorted(tried, key=lambda each: -each.tokens_per_s)


@dataclass(frozen=True)
class Runners:
    """A runner on some requests, to rank sets, and one on all requests, for the reported figures."""

    few: Runner
    whole: Runner

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


# -- How much a search tries: what answers in minutes, or in seconds


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
    work: float | None  #: replayed accesses that end the search, None for no limit


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
    work=500e6,
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
    work=None,
)
