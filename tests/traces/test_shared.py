"""What replays of one process share: made once, read-only, few, and never older than its files."""

from __future__ import annotations

import gc
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moereplay.simulator.compiled.inputs import inputs_of
from moereplay.simulator.config import configure
from moereplay.traces import shared as sharing
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace, memory_trace
from moereplay.traces.shared import shared
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.traces.test_demand import HEADER, request

SETTLED = 0.03  # seconds: a write within a tick of the clock leaves a file's times as they are
NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = write_trace(tmp_path / "a.zarr", HEADER, [request(1, 3, 4, weighted=True), request(2, 2, 9, weighted=True)])
    inputs_of(trace, configure(), NOTHING, NOTHING)
    time.sleep(SETTLED)
    return trace


def in_memory(seed: int = 1) -> Trace:
    return memory_trace(HEADER, [request(seed, 3, 4, weighted=True)])


def test_replays_of_a_stored_trace_share_their_inputs_however_often_it_is_opened(stored: Trace) -> None:
    first = inputs_of(stored, configure(), NOTHING, NOTHING)
    assert stored.path is not None
    again = inputs_of(open_trace(stored.path), configure(capacity="50%"), NOTHING, NOTHING)
    assert again is first


def test_what_differs_is_not_shared(stored: Trace) -> None:
    looking = {"prefetch": "top_k", "lookahead": "shuffled_tokens"}
    told = [
        inputs_of(stored, configure(), NOTHING, NOTHING),
        inputs_of(stored, configure(passes="token"), NOTHING, NOTHING),
        inputs_of(stored, configure(), NOTHING, frozenset({"next_pass"})),
        inputs_of(in_memory(), configure(), NOTHING, NOTHING),
        inputs_of(in_memory(2), configure(), NOTHING, NOTHING),
    ]
    assert len({id(inputs) for inputs in told}) == len(told)
    if "lookahead" in stored.capabilities:
        seeds = [inputs_of(stored, configure(**looking, seed=seed), NOTHING, NOTHING) for seed in (1, 2)]
        assert seeds[0] is not seeds[1]


def test_nobody_can_write_to_what_is_shared(stored: Trace) -> None:
    for trace in (stored, in_memory()):
        inputs = inputs_of(trace, configure(), NOTHING, NOTHING)
        assert [name for name, array in inputs.items() if array.flags.writeable] == []
        assert not demand_of(trace, "recorded").expert.flags.writeable


def test_arrays_given_in_memory_stay_writable_for_their_owner() -> None:
    trace = in_memory()
    inputs_of(trace, configure(), NOTHING, NOTHING)
    assert trace.arrays["chosen"].flags.writeable


@pytest.mark.parametrize("name", ["expert", "next_use", "offsets"])
def test_a_changed_file_is_noticed_by_the_next_replay(stored: Trace, name: str) -> None:
    before = {key: array.copy() for key, array in inputs_of(stored, configure(), NOTHING, NOTHING).items()}
    assert stored.path is not None
    (folder,) = stored.path.with_name("a.zarr.derived").glob("*-demand-recorded")
    file = folder / f"{name}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    after = inputs_of(stored, configure(), NOTHING, NOTHING)
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_files_of_the_same_size_put_in_their_place_are_mapped_anew(stored: Trace) -> None:
    first = demand_of(stored, "recorded")
    assert stored.path is not None
    (folder,) = stored.path.with_name("a.zarr.derived").glob("*-demand-recorded")
    other = folder / "expert.new"
    other.write_bytes((folder / "expert.npy").read_bytes())
    other.replace(folder / "expert.npy")
    second = demand_of(stored, "recorded")
    assert not np.shares_memory(first.expert, second.expert)
    assert np.array_equal(first.expert, second.expert)


def test_no_more_is_kept_than_is_said(stored: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST", 3)
    for number in range(9):
        assert shared(stored, number, lambda number=number: number) == number
    assert len(sharing._of_stored) == 3
    made = []
    shared(stored, 8, lambda: made.append("again"))
    shared(stored, 0, lambda: made.append("anew"))
    assert made == ["anew"]


def test_what_a_trace_in_memory_shares_goes_with_it() -> None:
    trace = in_memory()
    kept = weakref.ref(inputs_of(trace, configure(), NOTHING, NOTHING)["stream_expert"])
    assert kept() is not None
    del trace
    gc.collect()
    assert kept() is None


def test_threads_that_want_the_same_make_it_once(stored: Trace) -> None:
    made = []

    def make() -> str:
        time.sleep(0.05)
        made.append(os.getpid())
        return "value"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: shared(stored, "slow", make), range(8))) == ["value"] * 8
    assert len(made) == 1


def test_what_fails_is_not_kept(stored: Trace) -> None:
    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"^no$"):
            shared(stored, "failing", fail)
    assert shared(stored, "failing", lambda: 1) == 1
