"""Kernels of routing fits: misses equal those of replays, and draws those of the routing model."""

from __future__ import annotations

import numpy as np
import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.simulator.routing import EVICTIONS, Layer, misses_of
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import PARTS, Noise, draw, ranked, text_of
from moereplay.traces.schema import Geometry
from tests.traces.test_routing import model

CAPACITIES = [3, 4, 8, 12]


def test_a_worked_example() -> None:
    # Two held, one expert per token: 0 1 2 0 1. LRU evicts what comes next, every time. Belady evicts 1 for 2, since 0
    # comes first, and then misses 1 alone. LFU evicts 0 for 2 (all used once, 0 least recently), then 1, then 2. Uses
    # rank 0, 1, 2: a static placement of two keeps 0 and 1 and misses 2.
    chosen = np.array([0, 1, 2, 0, 1])[:, None]
    assert dict(zip(EVICTIONS, misses_of(chosen, 3, [2]).tolist(), strict=True)) == {
        "lru": 5,
        "lfu:count=history": 5,
        "static": 3,
        "belady": 4,
    }


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_misses_are_those_of_replays(eviction: str) -> None:
    ids = draw(model(hot=1.5, cold=0.5, request=1.0, slow=1.0, kind=1.5), [60] * 3, 4)
    geometry = Geometry(layers=2, experts=16, k=3, expert_bytes=(1 << 20,) * 2)
    trace = from_arrays(ids, geometry, lengths=[60] * 3)
    counted = [misses_of(ids[:, layer], 16, CAPACITIES).reshape(4, -1)[EVICTIONS.index(eviction)] for layer in (0, 1)]
    for at, capacity in enumerate(CAPACITIES):
        config = configure(capacity=f"{100 * capacity / 16}%", eviction=eviction, scope="per_layer", passes="token")
        replayed = [row["misses"] for row in replay(trace, config).per_layer]
        assert [int(each[at]) for each in counted] == replayed, capacity


def test_draws_are_those_of_the_routing_model_but_for_near_ties() -> None:
    made, lengths = model(hot=1.5, cold=0.5, request=1.0, slow=1.0, fast=0.8, kind=1.5), [40, 1, 60]
    noise = Noise(made, 1, lengths, 3, text_of(made, lengths, 3))
    values = np.array([getattr(made, part)[1] for part in PARTS])
    drawn, wanted = Layer(noise, lengths, 3).draw(values), ranked(noise.scores(made, 1), 3)
    assert (drawn == wanted).all(axis=1).mean() > 0.97
