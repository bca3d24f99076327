"""Where a run's demand comes from, as far as checks and results are concerned: a recorded trace, or a live model."""

from __future__ import annotations

from dataclasses import dataclass

from traces.schema import Geometry, Trace

FUTURE = "future"  #: the capability that only what has already happened can have


@dataclass(frozen=True)
class Origin:
    """What a configuration is checked against, and what names it in a result."""

    geometry: Geometry
    capabilities: frozenset[str]
    lookahead_depth: int
    digest: str  #: of everything that decides the demand
    model: str
    live: bool = False


def origin_of(trace: Trace) -> Origin:
    """A trace knows its future."""
    return Origin(
        geometry=trace.geometry,
        capabilities=trace.capabilities | {FUTURE},
        lookahead_depth=trace.header.lookahead_depth,
        digest=trace.digest,
        model=trace.header.provenance.model,
    )
