"""The peak of a machine's memory: what counts, what will page, and where a replay says it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moereplay.simulator.bounds import remarks
from moereplay.simulator.capacity import RUNTIME
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import plan, replay
from moereplay.traces.passes import longest_context
from moereplay.traces.schema import Header, Provenance, Request, Trace, memory_trace
from tests.kit.cases import sizes
from tests.kit.command import moereplay_here, unfolded
from tests.kit.policy_runs import Sizes, stored_trace


def trace(*lengths: int, kv_bytes: int = 10) -> Trace:
    """Requests of so many tokens, a prompt of one each. 4 experts of 100 bytes, 50 dense weights at 16 bits."""
    header = Header(geometry=sizes(1, 4, 1, 100, kv_bytes=kv_bytes, dense_params=50), provenance=Provenance())
    requests = [Request(np.zeros((length, 1, 1), np.int16), prompt_length=1) for length in lengths]
    return memory_trace(header, requests)


def machine(memory: int, reserve: int) -> str:
    return f"phone-ufs4:memory_bytes={memory}:reserve_bytes={reserve}"


def test_the_longest_context_is_that_of_the_longest_request_or_of_those_that_run_together() -> None:
    found = trace(3, 7, 2)
    assert [longest_context(found, passes) for passes in ("recorded", "token", "chunk:2", "batch:1")] == [7] * 4
    # of two at a time: the first ends with 3 beside 3 of the second. The third joins when that has 3: 1 + 4, 2 + 5
    assert longest_context(found, "batch:2") == 7
    assert longest_context(trace(5, 5), "batch:2") == 10
    # where they arrive over time, any two may end together, and no more than there are
    assert [longest_context(found, f"batch:{slots}", arrive=True) for slots in (1, 2, 4)] == [7, 7 + 3, 7 + 3 + 2]


def test_everything_that_is_in_memory_at_once_counts_to_the_byte() -> None:
    # a cache of two experts, 100 bytes of dense weights, 7 positions of 10 bytes, the runtime and 1000 in reserve
    found, needed = trace(3, 7), 200 + 100 + 70 + RUNTIME + 1000
    fits, pages = (configure(capacity="2experts", platform=machine(needed - less, 1000)) for less in (0, 1))
    assert plan(found, fits).warning is None
    warned = plan(found, pages).warning
    assert warned and warned.startswith("will page: ") and "a real machine would fault pages" in warned
    about = replay(found, pages, engine="reference").about["memory"]
    assert (about["peak_bytes"], about["memory_bytes"], about["will_page"]) == (needed, needed - 1, True)
    assert about["parts"]["KV cache"] == 70
    assert not replay(found, fits, engine="reference").about["memory"]["will_page"]


def test_a_peak_that_fits_is_a_remark_and_one_that_does_not_a_warning() -> None:
    found = trace(3)
    fits, pages = (configure(capacity="2experts", platform=machine(size, 1000)) for size in (2 * RUNTIME, RUNTIME))
    assert [line.split(" at ")[0] for line in remarks(found, [fits, pages])] == [f"peak memory of {fits.platform}"]


def test_without_a_reserve_nothing_is_new() -> None:
    found = trace(3)
    config = configure(capacity="2experts", platform=f"phone-ufs4:memory_bytes={RUNTIME}")
    assert plan(found, config).warning is None
    assert "memory" not in replay(found, config, engine="reference").about
    assert remarks(found, [config]) == []
    assert platform(machine(5, 1)).figures() == platform("phone-ufs4").figures()


def test_the_table_and_the_document_of_a_replay_say_it_and_it_is_stored(tmp_path: Path) -> None:
    words = ("replay", stored_trace(tmp_path / "small.zarr", Sizes()), "--capacity", "50%", "--engine", "reference")
    words += ("--platform", machine(10**9, 10**9))
    assert "warning for 50%: will page: " in unfolded(moereplay_here(*words).stdout)
    document = json.loads(moereplay_here(*words, "--json").stdout)
    assert document["about"]["memory"]["will_page"]
    assert document["about"]["warning"].startswith("will page: ")
    assert moereplay_here(*words, "--out", tmp_path / "out").returncode == 0
    assert moereplay_here("sweep", "show", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("change", ["reserve_bytes=1", "memory_bytes=5:reserve_bytes=-1"])
def test_a_reserve_needs_a_memory_and_is_no_less_than_nothing(change: str) -> None:
    with pytest.raises(ConfigError, match="reserve_bytes"):
        plan(trace(3), configure(platform=f"phone-ufs4:{change}"))
