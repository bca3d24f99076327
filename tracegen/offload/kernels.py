"""Times of dense parts and experts by token count, and of experts by format, each timed alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from moereplay.tracegen.offload.bench import Bench
from moereplay.tracegen.offload.compute import as_weights, layout_of
from moereplay.tracegen.offload.experts import BITS_PER_WEIGHT
from moereplay.tracegen.offload.fit import Figure, figure_of
from moereplay.traces.schema import Geometry

TOKENS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 12  #: of all token counts in turns, so that a machine that changes changes all of them
COLD = 8  #: experts in turns: more than a processor's caches hold


def by_tokens(bench: Bench, geometry: Geometry) -> dict[str, dict[int, Figure]]:
    """Measure the nanoseconds of a layer's dense part and of an expert, by tokens."""
    slots, layers = _experts(bench, geometry, None), max(1, geometry.layers - 1)
    turns = list(enumerate(TOKENS * ROUNDS))  # never the same weights twice in a row: a cache would have them
    dense = [lambda n=n, at=at: bench.layers.dense(geometry.layers - 1 - at % layers, n) for at, n in turns]
    expert = [lambda n=n, at=at: bench.layers.expert(slots[at % len(slots)], n) for at, n in turns]
    return {"dense_ns": _timed(dense), "expert_ns": _timed(expert)}


def by_format(bench: Bench, geometry: Geometry) -> dict[str, Figure]:
    """Measure the nanoseconds of an expert for one token by weight format; integers are unpacked first."""
    return {name: _format(bench, geometry, bits) for name, bits in BITS_PER_WEIGHT.items() if bits <= 16}


def _format(bench: Bench, geometry: Geometry, bits: int) -> Figure:
    layout, shape = layout_of(geometry, bits), bench.layers.shape
    slots = _bytes(bench, layout.size(0))
    timed = [
        lambda at=at: bench.layers.expert(as_weights(slots[at % len(slots)], layout.dtype, shape), 1)
        for at in range(ROUNDS)
    ]
    return figure_of([_took(each) for each in timed])


def _experts(bench: Bench, geometry: Geometry, bits: float | None) -> list[torch.Tensor]:
    layout = layout_of(geometry, bits)
    return [as_weights(each, layout.dtype, bench.layers.shape) for each in _bytes(bench, layout.size(0))]


def _bytes(bench: Bench, size: int) -> list[torch.Tensor]:
    """Return random bytes of small numbers, on the device."""
    device = bench.layers.device
    return [torch.randint(0, 60, (size,), dtype=torch.uint8).to(device) for _ in range(COLD)]


def _timed(calls: Sequence[Callable[[], None]]) -> dict[int, Figure]:
    """Time the calls in turns; the first turn warms up and is not counted."""
    for call in calls[: len(TOKENS)]:
        call()
    took = [_took(call) for call in calls]
    return {tokens: figure_of(took[at :: len(TOKENS)]) for at, tokens in enumerate(TOKENS)}


def _took(call: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def in_times(figures: dict[int, Figure]) -> tuple[tuple[int, float], ...]:
    """Return the points of a platform, relative to one token and never falling."""
    times = accumulate((figure.value / figures[1].value for figure in figures.values()), max)
    return tuple(zip(figures, times, strict=True))
