"""Replays of one trace that a search asks for, round by round; each configuration is replayed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from results.result import Result
from simulator.config import ReplayConfig
from simulator.errors import ConfigError
from sweeps.figures import figures_of
from sweeps.grid import run_grid
from traces.schema import Trace

NO_TPOT = "no pass of the trace decodes, so that it has no tokens/s; --passes token makes every token a pass"


class Tried(NamedTuple):
    """A configuration and its result."""

    config: ReplayConfig
    result: Result

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second that a request sees. Raises ConfigError where nothing decodes."""
        tpot_ms = figures_of(self.result).get("tpot_ms")
        if not tpot_ms:
            raise ConfigError(NO_TPOT)
        return 1000 / tpot_ms

    @property
    def hit_rate(self) -> float:
        """Hits per access."""
        return figures_of(self.result).get("hit_rate", 0.0)

    @property
    def mass_share_kept(self) -> float | None:
        """Part of the gate weight that was executed as the router chose; None where the trace has no weights."""
        return figures_of(self.result).get("mass_kept")


@dataclass
class Runner:
    """Replays, and keeps what it has replayed."""

    trace: Trace
    workers: int = 1
    advance: Callable[[], None] = lambda: None
    known: dict[ReplayConfig, Tried] = field(default_factory=dict)

    def tried(self, configs: Iterable[ReplayConfig]) -> list[Tried]:
        """Each of them, in order; all are checked before the first is replayed."""
        wanted = list(dict.fromkeys(configs))
        new = [config for config in wanted if config not in self.known]
        outcomes = run_grid(self.trace, new, self.workers, bounded=False, done=self.advance)
        self.known |= {config: Tried(config, result) for config, (result, _) in zip(new, outcomes, strict=True)}
        return [self.known[config] for config in wanted]


def fastest_first(tried: Iterable[Tried]) -> list[Tried]:
    """By tokens per second; of equal ones the first stays first."""
    return sorted(tried, key=lambda each: -each.tokens_per_s)
