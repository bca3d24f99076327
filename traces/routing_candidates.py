"""Select routing models for a model: its own if it was recorded, else those of all other models, scaled."""

from __future__ import annotations

from typing import NamedTuple

from moereplay.traces.geometry import recognised
from moereplay.traces.routing import RoutingModel, shipped
from moereplay.traces.schema import Geometry


class Candidate(NamedTuple):
    """A routing model at a geometry's shape."""

    routing: RoutingModel
    name: str  #: of the routing model that ships
    own: bool  #: whether the model's own routing was recorded


def routings_for(name: str, geometry: Geometry) -> list[Candidate]:
    """Return the shipped routing models for a model's name and shape: its own, else those of all real models.

    Its own are those of the known model that `recognised` finds in the name, with the same layers and experts; there
    may be several, from different text. Others are scaled: a layer takes the eight numbers of the layer at its
    relative depth, and the noise keeps its scale. This keeps the strengths, not the hit rates; docs/routing.md gives
    the error.
    """
    known = recognised(name, geometry)
    real = {each: model for each, model in shipped().items() if not model.trial}
    own = {each: model for each, model in real.items() if known and model.model == known.name}
    shape = geometry.layers, geometry.experts, geometry.k
    return [Candidate(model.scaled(*shape), each, bool(own)) for each, model in (own or real).items()]
