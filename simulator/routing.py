"""One layer's routing for a fit, in machine code: its misses at several capacities, and draws under many strengths.

Misses are of one token per pass, equal to replays of `lru`, `belady`, `lfu:count=history` and `static` with a pool
per layer: a token's experts are looked up together, and none of them is evicted for another. LFU evicts the least
recent of equals, Belady the lowest id. Capacities hold at least one token's experts. Draws use the scores of
`traces.routing`, over the same random numbers, and equal its draws but for their rounding, which settles scores that
are nearly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import numpy as np

from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import fast
from moereplay.traces.routing import PARTS, Noise

EVICTIONS = ("lru", "lfu:count=history", "static", "belady")
LRU, LFU, STATIC, BELADY = range(len(EVICTIONS))


@fast
def _worth(eviction, expert, uses, last, ahead, rank):
    """Return the worth of a resident expert; the lowest is evicted."""
    if eviction == LRU:
        return last[expert]
    if eviction == LFU:
        return (uses[expert] << 32) + last[expert]
    return -rank[expert] if eviction == STATIC else -ahead[expert]


@fast
def _victim(eviction, held, size, now, uses, last, ahead, rank):
    """Return the slot of the victim, among experts that this token does not use."""
    found, least = -1, np.int64(0)
    for place in range(size):
        expert = held[place]
        if last[expert] >= now:
            continue
        worth = _worth(eviction, expert, uses, last, ahead, rank)
        if found < 0 or worth < least or (worth == least and expert < held[found]):
            found, least = place, worth
    return found


def _count(chosen, ahead_of, rank, eviction, capacity, state, misses):
    """Add to misses[0] those of ids (T, k); `ahead_of` (T, k) is each use's next token. State: five rows of E int64."""
    tokens, k = chosen.shape
    place_of, held, uses, last, ahead = state[0], state[1], state[2], state[3], state[4]
    size = 0
    for token in range(tokens):
        missing = 0
        for n in range(k):
            expert = np.int64(chosen[token, n])
            uses[expert] += 1
            last[expert] = token * k + n
            ahead[expert] = ahead_of[token, n]
        for n in range(k):
            expert = np.int64(chosen[token, n])
            if place_of[expert] >= 0:
                continue
            missing += 1
            if size < capacity:
                place = size
                size += 1
            else:
                place = _victim(eviction, held, size, token * k, uses, last, ahead, rank)
                if place < 0 or (eviction == STATIC and rank[expert] > rank[held[place]]):
                    continue
                place_of[held[place]] = -1
            held[place], place_of[expert] = expert, place
        misses[0] += missing


COUNT = compiled(_count)


def misses_of(chosen: np.ndarray, experts: int, capacities: list[int]) -> np.ndarray:
    """Return the misses (evictions x capacities,) of ids (T, k) of one layer, in the order of EVICTIONS."""
    chosen = np.ascontiguousarray(chosen, np.int16)
    uses = np.bincount(chosen.ravel(), minlength=experts)
    rank = np.empty(experts, np.int64)
    rank[np.lexsort((np.arange(experts), -uses))] = np.arange(experts)
    ahead, found = _next_uses(chosen), np.zeros((len(EVICTIONS), len(capacities)), np.int64)
    for eviction in range(len(EVICTIONS)):
        for at, capacity in enumerate(capacities):
            state, missed = np.zeros((5, experts), np.int64), np.zeros(1, np.int64)
            state[0], state[3] = -1, -1
            COUNT(chosen, ahead, rank, eviction, capacity, state, missed)
            found[eviction, at] = missed[0]
    return found.ravel()


def _next_uses(chosen: np.ndarray) -> np.ndarray:
    """Return the token (T, k) int64 that uses each expert next; T if none does."""
    tokens, k = chosen.shape
    flat = chosen.ravel().astype(np.int64)
    order = np.argsort(flat, kind="stable")
    at = np.repeat(np.arange(tokens), k)[order]
    ahead = np.full(len(flat), tokens, np.int64)
    same = flat[order][1:] == flat[order][:-1]
    ahead[order[:-1][same]] = at[1:][same]
    return ahead.reshape(tokens, k)


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
