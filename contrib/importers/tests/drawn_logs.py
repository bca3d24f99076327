"""Routing drawn at random, and the passes in which an engine computes it: logs are written from these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from moereplay.traces.schema import Request

EXPERTS = 6


@dataclass(frozen=True)
class Workload:
    """A prompt, computed so many tokens at a time, and decode steps."""

    ids: np.ndarray  #: (T, L, k)
    prompt: int
    chunk: int

    def passes(self) -> Iterator[tuple[int, int]]:
        """First token of each pass and the one after its last."""
        edges = list(range(0, self.prompt, self.chunk)) + list(range(self.prompt, len(self.ids) + 1))
        return pairwise(edges)

    def rows(self, pruned: bool) -> Iterator[list[tuple[int, int, list[int]]]]:
        """(token, layer, experts) of each pass; `pruned`: the last layer for the last prompt token and steps only."""
        last = self.ids.shape[1] - 1
        for start, stop in self.passes():
            places = [(token, layer) for layer in range(last + 1) for token in range(start, stop)]
            kept = [place for place in places if not pruned or place[1] < last or place[0] >= self.prompt - 1]
            yield [(token, layer, self.ids[token, layer].tolist()) for token, layer in kept]

    def request(self, pruned: bool) -> Request:
        """Return the expected import of these rows."""
        ids = self.ids.copy()
        if pruned:
            ids[: self.prompt - 1, -1] = -1
        return Request(ids, self.prompt)


@st.composite
def workloads(draw: st.DrawFn, steps: int = 0) -> list[Workload]:
    """Some of one model, each of at least so many decode steps; no pass of a prompt has a single token."""
    layers, k = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        chunk = draw(st.integers(2, 4))
        prompt = chunk * draw(st.integers(0, 2)) + draw(st.integers(2, chunk))
        tokens = prompt + draw(st.integers(steps, 3))
        ids = np.array([[rng.permutation(EXPERTS)[:k] for _ in range(layers)] for _ in range(tokens)])
        found.append(Workload(ids, prompt, chunk))
    return found
