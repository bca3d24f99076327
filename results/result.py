"""The result of a replay: integer counters by name, per (layer, phase) and per request, without derived metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A line of the event log; t1 = t0 if it takes no time."""

    t0: int
    t1: int
    kind: str
    step_pass: int
    layer: int
    expert: int
    precision: int
    cause: str


@dataclass(frozen=True)
class Result:
    """A replay's outcome; the same trace, configuration and version give the same."""

    config: Row
    kinds: Mapping[str, str]  #: of each setting in `config`: a key of `results.schema.DTYPES`
    totals: Row
    per_layer: list[Row]
    per_request: list[Row]
    about: Row
    events: list[Event] = field(default_factory=list)

    def to_json(self) -> Row:
        """Return the document that `replay --json` prints."""
        return {
            "config": self.config,
            "about": self.about,
            "totals": self.totals,
            "per_layer": self.per_layer,
            "per_request": self.per_request,
        }

    def frame(self) -> pl.DataFrame:
        """Return one tidy row: settings, every counter, `time_ns`; bounds are null."""
        from moereplay.results.read import runs

        return runs(self._nested())

    def layers_frame(self) -> pl.DataFrame:
        """Return one tidy row per layer and phase ("prefill", "decode"); a phase without steps has no row."""
        from moereplay.results.read import layers

        return layers(self._nested())

    def _nested(self) -> pl.DataFrame:
        from moereplay.results.schema import nested

        return nested([self.to_json()], [None], self.kinds)
