"""Passes of a long trace, kept on disk, equal those of a short one in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.compiled.inputs import inputs_of
from moereplay.simulator.config import configure
from moereplay.simulator.curves.stream import resets
from moereplay.traces import passes as schedules
from moereplay.traces.derived import PLACE
from moereplay.traces.passes import parse_passes
from moereplay.traces.schema import Request, memory_trace
from moereplay.traces.store import open_trace
from moereplay.traces.units import DECODE, PREFILL
from moereplay.traces.writer import write_trace
from tests.kit.stored import PLAIN as HEADER
from tests.kit.stored import ids_only

NAMES = ("recorded", "token", "chunk:3", "decode:2")


def one_after_the_other(lengths: list[tuple[int, int]], passes: str) -> list[tuple[int, int, int, int]]:
    """(first token, last + 1, request, phase) of every pass, for requests of (tokens, prompt)."""
    name, _, number = passes.partition(":")
    found, first = [], 0
    for request, (tokens, recorded) in enumerate(lengths):
        prompt = min(recorded, int(number)) if name == "decode" else recorded
        piece = {"token": 1, "chunk": int(number or 0)}.get(name, prompt)
        for at in range(0, prompt, piece or 1):
            found.append((first + at, first + min(at + piece, prompt), request, PREFILL))
        found += [(first + at, first + at + 1, request, DECODE) for at in range(prompt, tokens)]
        first += tokens
    return found


@given(st.lists(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=6))
def test_passes_are_as_written_down_one_by_one(lengths: list[tuple[int, int]]) -> None:
    requests = [Request(ids_only(tokens).chosen, prompt) for tokens, prompt in lengths]
    trace = memory_trace(HEADER, requests)
    for name in NAMES:
        plan = parse_passes(name)(trace)
        columns = (plan.start, plan.stop, plan.request, plan.phase)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == one_after_the_other(lengths, name)


@pytest.mark.parametrize("passes", NAMES)
def test_a_long_trace_is_read_from_disk_as_a_short_one_from_memory(
    passes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ids_only(tokens, tokens) for tokens in (7, 1, 30, 2)]
    config, nothing = configure(passes=passes, capacity="50%"), frozenset({"next_pass"})
    short = inputs_of(memory_trace(HEADER, requests), config, frozenset(), nothing)
    monkeypatch.setenv(PLACE, str(tmp_path))
    monkeypatch.setattr(schedules, "LONG", 1)
    monkeypatch.setattr("moereplay.simulator.compiled.inputs.VALUES_AT_ONCE", 3)  # more than one block
    monkeypatch.setattr(schedules, "VALUES_AT_ONCE", 3)
    write_trace(tmp_path / "long.zarr", HEADER, requests)
    trace = open_trace(tmp_path / "long.zarr")
    long = inputs_of(trace, config, frozenset(), nothing)
    assert any("plan-" in folder.name for folder in (tmp_path / "moereplay" / "derived").iterdir())
    for name, rows in short.items():
        np.testing.assert_array_equal(long[name], rows, err_msg=name)
        assert long[name].dtype == rows.dtype
    plan = schedules.schedule(trace, passes)
    assert resets(plan, "request").sum() == len(requests) - 1
