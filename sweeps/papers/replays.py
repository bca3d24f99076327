"""Replays of a paper's figures, each kept as a part in the ordinary form: what is stored is not replayed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from moereplay.results.parts import stored
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.replay import ENGINES
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.parts import keep
from moereplay.sweeps.store import Folder
from moereplay.traces.schema import Trace


class Work(NamedTuple):
    """Configurations of a trace: those to replay, and how many are stored."""

    left: list[ReplayConfig]
    stored: int


def work(folder: Path, trace: Trace, configs: Iterable[ReplayConfig]) -> Work:
    """What has no result in the folder yet, each once. Raises PartError for a broken part."""
    done = stored(Folder(folder).provenances(), requests=True)
    by_identity = {config.identity(trace): config for config in configs}
    left = [config for identity, config in by_identity.items() if ("configuration", identity) not in done]
    return Work(left, len(by_identity) - len(left))


def replay_into(
    folder: Path,
    trace: Trace,
    configs: Sequence[ReplayConfig],
    workers: int = 1,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Replay configurations of a trace, each stored with its bound as it comes. Raises ConfigError or TraceError."""
    for _ in keep(folder, trace, configs, run_grid(trace, configs, workers, done=done), ENGINES[0]):
        pass
