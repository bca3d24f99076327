"""Choices from logits: recorders of router logits keep no ids, which the model's router makes of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.traces.geometry import known
from moereplay.traces.importers.contract import Options
from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.schema import Geometry, Request, Router, TraceError, check_values


class Choice(NamedTuple):
    """How ids are made of logits."""

    k: int
    router: Router
    weighs: bool  #: whether the router is the model's, so that gate weights follow too
    note: str

    def request(self, logits: np.ndarray, prompt: int, place: str, tokens: np.ndarray | None = None) -> Request:
        """A request of logits (T, L, E), which are kept. Raises TraceError for what is no number."""
        check_values(logits, "logits", place)
        raw = np.ascontiguousarray(logits, np.float32)
        ids = choose(choice_scores(self.router, raw), self.k)
        return Request(ids, prompt, weigh(self.router, raw, ids) if self.weighs else None, raw, token_ids=tokens)


def choice_for(options: Options, place: str, k: int | None = None, model: str = "") -> Choice:
    """The router of the model that the user or the file names, or the k largest logits.

    Raises TraceError if nobody says k, or if the router needs a correction bias, which was not recorded.
    """
    geometry = options.geometry or _known(model)
    router = geometry.router if geometry else Router()
    if router.family == "sigmoid_groups":
        raise TraceError(f"{place}: this model's router adds a bias that is not recorded; record ids with `record`")
    if geometry is None and k is None:
        raise TraceError(f"{place}: logits do not say how many experts a token has; add --model NAME, or save k beside")
    count = k or (geometry.k if geometry else 1)
    source = f"the router {router.family} of the model" if geometry else "order of size"
    weights = ", as are gate weights" if geometry else "; no gate weights, as the router is not known"
    return Choice(
        count, router, geometry is not None, f"k = {count} experts per token are from the logits by {source}{weights}"
    )


def _known(model: str) -> Geometry | None:
    try:
        return known(model).geometry if model else None
    except TraceError:
        return None
