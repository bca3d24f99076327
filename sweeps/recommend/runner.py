"""Replays of one trace that a search asks for, round by round; each configuration is replayed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moereplay.results.metrics import values_of
from moereplay.results.result import Result
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import run_grid
from moereplay.traces.schema import Trace

NO_TPOT = "no pass of the trace decodes, so that it has no tokens/s; --passes token makes every token a pass"


class Tried(NamedTuple):
    """A configuration and its result."""

    config: ReplayConfig
    result: Result

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second that a request sees. Raises ConfigError where nothing decodes."""
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
        """Part of the gate weight that was executed as the router chose; None where the trace has no weights."""
        return values_of(self.result)["mass_share_kept"]


@dataclass
class Budget:
    """How long a search may take. It counts from the end of the first replays, as those may have to be compiled."""

    seconds: float | None = None  #: None for as long as it takes
    interrupted: Callable[[], bool] = lambda: False
    share: float = 1.0  #: of the seconds that the present part of the search may use in all
    begun: float | None = None

    def begin(self) -> None:
        """Start to count, if that has not begun."""
        self.begun = time.monotonic() if self.begun is None else self.begun

    @property
    def is_spent(self) -> bool:
        """Whether the present part of the search is to end."""
        if self.interrupted():
            return True
        if self.seconds is None or self.begun is None:
            return False
        return time.monotonic() - self.begun >= self.share * self.seconds


def _untold(replays: int, fastest: float) -> None:
    """Tell nobody of progress."""


@dataclass
class Runner:
    """Replays, and keeps what it has replayed.

    `advance` gets the number of new replays, and the most tokens/s so far.
    """

    trace: Trace
    workers: int = 1
    advance: Callable[[int, float], None] = _untold
    known: dict[ReplayConfig, Tried] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    cut: bool = False  #: whether the budget has kept it from replaying anything that was asked for
    fastest: float = 0.0

    def tried(self, configs: Iterable[ReplayConfig], least: int = 0) -> list[Tried]:
        """Replay each of them, in order, and return their results.

        Those that the budget does not allow are left out, but for the first `least`.
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
        made = {config: Tried(config, result) for config, (result, _) in zip(configs, outcomes, strict=True)}
        self.known |= made
        self.fastest = max(self.fastest, *(each.tokens_per_s for each in made.values()))
        self.budget.begin()
        self.advance(len(made), self.fastest)


def fastest_first(tried: Iterable[Tried]) -> list[Tried]:
    """By tokens per second; of equal ones the first stays first."""
    return sorted(tried, key=lambda each: -each.tokens_per_s)
