"""One layer's routing drawn under many strengths: the scores of `traces.routing`, over the same random numbers.

Equal to its draws but for their rounding, which settles scores that are nearly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import numpy as np

from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import fast
from moereplay.traces.routing import PARTS, Noise


@fast
def _keep(row, best, expert, score):
    """Put an expert into the row of the k best, which is sorted, in place of its last."""
    at = len(row) - 1
    while at > 0 and best[at - 1] < score:
        best[at], row[at] = best[at - 1], row[at - 1]
        at -= 1
    best[at], row[at] = score, expert


def _draw(popular, topics, slow, fast_normals, kinds, text, gumbel, fresh, strengths, fading, scratch, chosen):
    """Fill chosen (T, k). `fresh` (T,) marks first tokens of requests; scratch: three rows of E or more float32."""
    tokens, experts = gumbel.shape
    k, request = chosen.shape[1], -1
    fade, fader, best = scratch[0], scratch[1], scratch[2][:k]
    for token in range(tokens):
        row = chosen[token]
        for n in range(k):
            best[n] = -np.float32(1e30)
        request += fresh[token]
        kind = text[token]
        for expert in range(experts):
            if fresh[token] == 1:
                fade[expert], fader[expert] = slow[token, expert], fast_normals[token, expert]
            else:
                fade[expert] = fading[0] * fade[expert] + fading[1] * slow[token, expert]
                fader[expert] = fading[2] * fader[expert] + fading[3] * fast_normals[token, expert]
            lean = popular[expert]
            score = gumbel[token, expert] + (strengths[0] if lean > 0 else strengths[1]) * lean
            score += strengths[2] * topics[request, expert] + strengths[5] * kinds[kind, expert]
            score += strengths[3] * fade[expert] + strengths[4] * fader[expert]
            if score > best[k - 1]:
                _keep(row, best, expert, score)


DRAW = compiled(_draw)


class Layer:
    """The random numbers of a layer, ready to be drawn under any strengths."""

    def __init__(self, noise: Noise, lengths: Sequence[int], k: int) -> None:
        self._noise, self._k = noise, k
        self._fresh = np.zeros(sum(lengths), np.int64)
        self._fresh[np.cumsum([0, *lengths[:-1]])] = 1
        self._scratch = np.zeros((3, max(noise.gumbel.shape[1], k)), np.float32)

    def draw(self, values: np.ndarray) -> np.ndarray:
        """Return ids (T, k) int16, best first, under the values of PARTS (8,)."""
        noise = self._noise
        fading = np.zeros(4, np.float32)
        for at, tokens in enumerate(values[-2:]):
            keep = exp(-1 / tokens)
            fading[2 * at : 2 * at + 2] = keep, sqrt(1 - keep * keep)
        chosen = np.zeros((len(self._fresh), self._k), np.int16)
        strengths = np.ascontiguousarray(values[: len(PARTS) - 2], np.float32)
        arrays = (noise.popular, noise.topics, noise.slow, noise.fast, noise.kinds, noise.text, noise.gumbel)
        DRAW(*arrays, self._fresh, strengths, fading, self._scratch, chosen)
        return chosen
