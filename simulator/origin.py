"""The identity and the capabilities of a run's demand: of a recorded trace, or of a live model."""

from __future__ import annotations

from dataclasses import dataclass

from moereplay.traces.dense import recorded
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.summary import experts_per_token
from moereplay.traces.synthetic import synthetic

FUTURE = "future"  #: the capability of demand that is known in advance


@dataclass(frozen=True)
class Origin:
    """What a configuration is checked against, and what identifies the demand in a result."""

    geometry: Geometry
    capabilities: frozenset[str]
    lookahead_depth: int
    digest: str  #: sha256 of everything that the demand depends on
    model: str
    live: bool = False
    synthetic: str = ""  #: how a generator made the routing; empty for recorded routing
    per_token: tuple[float, ...] = ()  #: experts of a token in each layer on average; k everywhere if empty
    recorded: bool = False  #: whether the model itself ran, so that its dense weights were measured


def origin_of(trace: Trace) -> Origin:
    """The origin of a recorded trace, which has the capability FUTURE."""
    return Origin(
        geometry=trace.geometry,
        capabilities=trace.capabilities | {FUTURE},
        lookahead_depth=trace.header.lookahead_depth,
        digest=trace.digest,
        model=trace.header.provenance.model,
        synthetic=synthetic(trace.header.provenance),
        per_token=experts_per_token(trace),
        recorded=recorded(trace.header.provenance),
    )
