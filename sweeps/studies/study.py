"""What a study is: named policy sets, made for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moereplay.simulator.config import ReplayConfig
from moereplay.sweeps.policy_sets import named_sets
from moereplay.traces.schema import Geometry

#: Every text starts with an empty cache, so that texts can be read together.
BASE = {"reset": "request", "eviction": "lru"}


class Study(NamedTuple):
    """Policy sets whose lists vary one parameter, so that figures can draw it."""

    summary: str
    source: str
    capacity: str  #: unless the user says otherwise
    sets: Callable[[Geometry], Mapping[str, Mapping[str, Any]]]

    def configs(self, geometry: Geometry, capacity: str | None = None) -> dict[str, ReplayConfig]:
        """Every set by its name. Raises ConfigError or PolicyError."""
        return named_sets(self.sets(geometry), {**BASE, "capacity": capacity or self.capacity})
