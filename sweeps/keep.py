"""Replays of a grid, each kept as a part of its own, in the form of a sweep's parts.

They are kept in the grid's order: what workers had finished beyond a replay that fails, or that is interrupted, is
replayed again. `sweep run` keeps each when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moereplay.results.tables import part_of
from moereplay.simulator.bounds import bound_of
from moereplay.simulator.config import ReplayConfig
from moereplay.sweeps.folder_store import Folder
from moereplay.sweeps.grid import Outcome
from moereplay.sweeps.provenance import provenance
from moereplay.traces.schema import Trace


def keep(
    folder: Path, trace: Trace, configs: Sequence[ReplayConfig], outcomes: Iterable[Outcome], engine: str
) -> Iterator[Outcome]:
    """Every outcome, once it is stored. Raises ConfigError."""
    place = Folder(folder)
    origin = provenance([trace], engine, {config.platform for config in configs})
    for number, (config, (result, counted)) in enumerate(zip(configs, outcomes, strict=True)):
        if not number:  # a replay that is refused leaves no folder
            place.prepare()
        bound = bound_of(trace, config)
        place.store(part_of(result, bound and bound.identity(trace), counted), origin)
        yield result, counted
