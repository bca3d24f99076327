"""Rows as a router makes them, traces of such rows, and what the validator finds in them."""

from __future__ import annotations

import dataclasses

import numpy as np

from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from moereplay.traces.validator import Finding, examine

EXPERTS, K, LAYERS = 16, 2, 3


def header(router: Router | None = None) -> Header:
    sizes = (10,) * LAYERS
    return Header(geometry=Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=sizes, router=router or Router()))


def drifting(tokens: int, seed: int, experts: int = EXPERTS) -> np.ndarray:
    """(T, L, k) rows that repeat the row before four times in five, as text does."""
    random = np.random.Generator(np.random.PCG64(seed))
    ids = random.permuted(np.tile(np.arange(experts), (tokens, LAYERS, 1)), axis=-1)[..., :K]
    stays = random.random((tokens, LAYERS)) < 0.8
    for token in range(1, tokens):
        ids[token][stays[token]] = ids[token - 1][stays[token]]
    return ids


def trace_of(*chosen: np.ndarray, weights: np.ndarray | None = None, token_ids: np.ndarray | None = None) -> Trace:
    return memory_trace(header(), [Request(rows, 0, weights=weights, token_ids=token_ids) for rows in chosen])


def finding(trace: Trace, check: str) -> Finding:
    (found,) = (seen for seen in examine(trace) if seen.check == check)
    return found


def damaged(trace: Trace, **arrays: np.ndarray) -> Trace:
    """The trace with arrays that no writer of ours would have let in."""
    return dataclasses.replace(trace, arrays={**trace.arrays, **arrays})


def wide(*chosen: np.ndarray, **more: object) -> Trace:
    """A trace of 64 experts."""
    _, layers, k = chosen[0].shape
    sizes = Geometry(layers=layers, experts=64, k=k, expert_bytes=(10,) * layers)
    return memory_trace(Header(geometry=sizes), [Request(rows, 0, **more) for rows in chosen])  # type: ignore[arg-type]
