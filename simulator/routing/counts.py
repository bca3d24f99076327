"""Count misses of one layer's routing at several capacities, one token per pass, for a fit, without replays.

Equal to replays of `lru`, `belady`, `lfu:count=history` and `static` with a pool per layer: a token's experts are
looked up together, and none of them is evicted for another. LFU evicts the least recent of equals, Belady the lowest
id. Capacities hold at least one token's experts.
"""

from __future__ import annotations

import numpy as np

from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import fast

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
