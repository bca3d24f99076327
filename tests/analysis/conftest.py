"""Results that several tests of figures draw."""

from __future__ import annotations

import polars as pl
import pytest

from moereplay.results.read import only
from tests.kit.tiny_runs import EVICTIONS, frame_of, small_trace


@pytest.fixture(scope="session")
def frame() -> pl.DataFrame:
    """Every eviction policy of `EVICTIONS` with and without prefetch, at two capacities."""
    return frame_of(small_trace(), eviction=EVICTIONS, prefetch=["none", "top_k"], capacity=["25%", "50%"])


@pytest.fixture(scope="session")
def single(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows with prefetch at the smaller capacity."""
    return only(frame, prefetch="top_k", capacity="25%")
