"""Engines as data."""

from __future__ import annotations

from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.sweeps.recommend.engines import NAMES, Placed, engine, placed
from moereplay.traces.schema import Geometry


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_file_says_where_its_facts_are_from_and_names_known_quantities(name: str) -> None:
    found = engine(name)
    assert found.summary and found.home.startswith("https://")
    for mode in found.modes:
        named = {field for _, field, _, _ in Formatter().parse(mode.flags) if field}
        assert len(mode.source) > 20 and named <= set(Placed._fields)
    if found.tried:
        assert found.tried.runs > 0 and found.tried.least <= found.tried.median <= found.tried.most
        assert found.tried.source


@given(st.integers(0, 40 * 10**9), st.lists(st.integers(1, 10**8), min_size=1, max_size=9))
def test_a_placement_adds_up(size: int, sizes: list[int]) -> None:
    geometry = Geometry(layers=len(sizes), experts=16, k=2, expert_bytes=tuple(sizes))
    of = placed(geometry, size, 0.5)
    assert of.cpu_layers + of.gpu_layers == len(sizes) and of.cpu_experts + of.gpu_experts == 16
    assert 16 * sum(sizes[len(sizes) - of.gpu_layers :]) <= size or not of.gpu_layers
    assert of.gpu_experts * sum(sizes) <= size and of.slots <= 16 * len(sizes)
