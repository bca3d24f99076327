"""Derived arrays: used only if they are, to the byte, what this user's replays made; shared, read-only and few."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.compiled.inputs import inputs_of
from moereplay.simulator.config import configure
from moereplay.traces import derived as sharing
from moereplay.traces.demand import Demand, demand_of, next_passes
from moereplay.traces.derived import MANIFEST, PLACE, shared
from moereplay.traces.files import SUFFIX, sha256_of
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Trace, TraceError, memory_trace
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.traces.test_demand import HEADER, assert_same, in_memory, request

SETTLED = 0.03  # seconds: a write within a tick of the clock leaves a file's times as they are


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setenv(PLACE, str(tmp_path))
    return write_trace(tmp_path / "a.zarr", HEADER, [request(1, 3, 4, weighted=True), request(2, 2, 9, weighted=True)])


def folder_of(trace: Trace, passes: str = "token") -> Path:
    """The folder of the demand of such passes."""
    assert trace.path is not None
    (folder,) = (trace.path.parent / "moereplay" / "derived").glob(f"*-demand-{passes}")
    return folder


def derived(trace: Trace) -> Demand:
    """The demand of one-token passes, which must be the true one whatever lies on disk."""
    found = demand_of(trace, "token")
    assert_same(found, in_memory(trace, "token"))
    return found


def flips(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """A bit of every eighth byte of every file, headers and values."""
    for file in sorted(folder.glob("*.npy")):
        for byte in range(0, file.stat().st_size, 8):
            yield file, byte, byte // 8 % 8


def flip(file: Path, byte: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def contents(folder: Path) -> dict[str, Any]:
    """Every file; of the manifest all but when each was last compared, which depends on the time that has passed."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    arrays = json.loads(files[MANIFEST])["arrays"]
    return files | {MANIFEST: {name: described | {"seen": None} for name, described in arrays.items()}}


def test_a_flipped_bit_is_noticed_wherever_it_is_and_mended(stored: Trace) -> None:
    derived(stored)
    pristine = contents(folder_of(stored))
    for number, (file, byte, bit) in enumerate(flips(folder_of(stored))):
        if number % 37 == 0:
            flip(file, byte, bit)
            derived(stored)
            assert contents(folder_of(stored)) == pristine, (file, byte, bit)


def test_a_flip_whose_time_was_set_back_is_noticed(stored: Trace) -> None:
    derived(stored)
    time.sleep(SETTLED)
    derived(stored)
    file = folder_of(stored) / "expert.npy"
    before = file.stat()
    flip(file, before.st_size - 4, 1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    derived(stored)


def test_damage_is_said_in_one_line(stored: Trace, caplog: pytest.LogCaptureFixture) -> None:
    derived(stored)
    flip(folder_of(stored) / "expert.npy", 130, 0)
    derived(stored)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder_of(stored)} is damaged or was modified; deriving it again"
    ]
    derived(stored)
    assert len(caplog.records) == 1


def test_files_that_are_as_they_were_are_not_read_again(stored: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    derived(stored)
    time.sleep(SETTLED)
    derived(stored)
    hashed = []
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name))
    derived(stored)
    assert hashed == []


def test_a_place_that_another_user_owns_is_refused_in_one_line(stored: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    derived(stored)
    before = {file: file.stat() for file in folder_of(stored).iterdir()}
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(TraceError, match=rf"^invalid {PLACE} '[^\n]*': expected a folder[^\n]*$"):
        derived(stored)
    assert {file: file.stat() for file in folder_of(stored).iterdir()} == before


def test_a_place_that_others_may_write_to_is_emptied_and_closed(stored: Trace, tmp_path: Path) -> None:
    """Here with ids that are none, and with a manifest that fits: machine code would index by them."""
    derived(stored)
    hostile = folder_of(stored) / "expert.npy"
    np.save(hostile, np.full_like(np.load(hostile), 30_000))
    forged = json.loads((folder_of(stored) / MANIFEST).read_text())
    forged["arrays"]["expert"] |= {"bytes": hostile.stat().st_size, "sha256": sha256_of(hostile)}
    (folder_of(stored) / MANIFEST).write_text(json.dumps(forged))
    folder_of(stored).parent.chmod(0o777)
    derived(stored)
    assert folder_of(stored).parent.stat().st_mode & 0o777 == 0o700


def test_two_processes_that_derive_the_same_leave_one_folder(stored: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is through while this one still computes."""
    derive = sharing._write

    def second(folder: Path, *how: Any) -> None:
        derive(folder, *how)
        derive(folder, *how)

    monkeypatch.setattr(sharing, "_write", second)
    assert isinstance(derived(stored).expert, np.memmap)
    assert list(folder_of(stored).parent.iterdir()) == [folder_of(stored)]


def test_what_a_killed_process_left_is_removed(stored: Trace) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    left = sharing.place() / f".demand.{socket.gethostname()}-{ended.pid}-0badcafe{SUFFIX}"
    left.mkdir()
    (left / "expert.npy").write_text("half of it")
    derived(stored)
    assert list(folder_of(stored).parent.iterdir()) == [folder_of(stored)]


def test_what_was_not_used_for_a_month_is_removed(stored: Trace) -> None:
    derived(stored)
    old = folder_of(stored)
    os.utime(old, (0, 0))
    derived(stored)  # is a use
    demand_of(stored, "chunk:2")
    assert old.exists()
    os.utime(old, (0, 0))
    demand_of(stored, "batch:2")
    assert not old.exists()


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def to_terabytes(file: Path) -> None:
    os.truncate(file, 1 << 42)


def to_claim_of_terabytes(file: Path) -> None:
    with file.open("r+b") as written:
        np.lib.format.write_array_header_1_0(written, {"descr": "<i4", "fortran_order": False, "shape": (1 << 40,)})


def to_broken_header(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b"'shape': (", b"'shape': [", 1))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "damage", [to_pipe, to_folder, to_link, to_terabytes, to_claim_of_terabytes, to_broken_header, Path.unlink]
)
def test_a_file_that_is_none_of_ours_is_made_anew(stored: Trace, damage: Callable[[Path], None]) -> None:
    derived(stored)
    damage(folder_of(stored) / "expert.npy")
    assert isinstance(derived(stored).expert, np.memmap)
    assert (folder_of(stored) / "expert.npy").is_file()
    assert sorted(folder_of(stored).parent.iterdir()) == [folder_of(stored)]


def test_a_damaged_manifest_vouches_for_nothing(stored: Trace) -> None:
    derived(stored)
    file = folder_of(stored) / MANIFEST
    document = json.loads(file.read_text())
    document["arrays"]["expert"]["sha256"] = "0" * 64
    for content in (json.dumps(document), '{"arrays": {}}', "{", "[]", "\xff" * 9, ""):
        file.write_text(content)
        derived(stored)
        assert file.read_text() != content


def test_the_place_is_closed_to_others(stored: Trace) -> None:
    derived(stored)
    assert folder_of(stored).parent.stat().st_mode & 0o777 == 0o700


def test_the_pass_of_a_next_use_is_the_one_that_holds_it(stored: Trace) -> None:
    for how in ["chunk:2", "batch:2"]:
        demand, passes = demand_of(stored, how), len(schedule(stored, how))
        begins = demand.offsets[:: HEADER.geometry.layers].tolist()
        held = {at: p for p in range(passes) for at in range(begins[p], begins[p + 1])}
        assert next_passes(stored, how).tolist() == [held.get(at, at) for at in demand.next_use.tolist()]


# ---------------------------------------------------------------- shared by replays

NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def replayed(stored: Trace) -> Trace:
    inputs_of(stored, configure(), NOTHING, NOTHING)
    time.sleep(SETTLED)
    return stored


def unstored(seed: int = 1) -> Trace:
    return memory_trace(HEADER, [request(seed, 3, 4, weighted=True)])


def test_replays_of_a_stored_trace_share_their_inputs_however_often_it_is_opened(replayed: Trace) -> None:
    first = inputs_of(replayed, configure(), NOTHING, NOTHING)
    assert replayed.path is not None
    again = inputs_of(open_trace(replayed.path), configure(capacity="50%"), NOTHING, NOTHING)
    assert again is first


def test_what_differs_is_not_shared(replayed: Trace) -> None:
    looking = {"prefetch": "top_k", "lookahead": "shuffled_tokens"}
    told = [
        inputs_of(replayed, configure(), NOTHING, NOTHING),
        inputs_of(replayed, configure(passes="token"), NOTHING, NOTHING),
        inputs_of(replayed, configure(), NOTHING, frozenset({"next_pass"})),
        inputs_of(unstored(), configure(), NOTHING, NOTHING),
        inputs_of(unstored(2), configure(), NOTHING, NOTHING),
    ]
    assert len({id(inputs) for inputs in told}) == len(told)
    if "lookahead" in replayed.capabilities:
        seeds = [inputs_of(replayed, configure(**looking, seed=seed), NOTHING, NOTHING) for seed in (1, 2)]
        assert seeds[0] is not seeds[1]


def test_nobody_can_write_to_what_is_shared(replayed: Trace) -> None:
    for trace in (replayed, unstored()):
        inputs = inputs_of(trace, configure(), NOTHING, NOTHING)
        assert [name for name, array in inputs.items() if array.flags.writeable] == []
        assert not demand_of(trace, "recorded").expert.flags.writeable


def test_arrays_given_in_memory_stay_writable_for_their_owner() -> None:
    trace = unstored()
    inputs_of(trace, configure(), NOTHING, NOTHING)
    assert trace.arrays["chosen"].flags.writeable


@pytest.mark.parametrize("name", ["expert", "next_use", "offsets"])
def test_a_changed_file_is_noticed_by_the_next_replay(replayed: Trace, name: str) -> None:
    before = {key: array.copy() for key, array in inputs_of(replayed, configure(), NOTHING, NOTHING).items()}
    file = folder_of(replayed, "recorded") / f"{name}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    after = inputs_of(replayed, configure(), NOTHING, NOTHING)
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_files_of_the_same_size_put_in_their_place_are_mapped_anew(replayed: Trace) -> None:
    first = demand_of(replayed, "recorded")
    folder = folder_of(replayed, "recorded")
    other = folder / "expert.new"
    other.write_bytes((folder / "expert.npy").read_bytes())
    other.replace(folder / "expert.npy")
    second = demand_of(replayed, "recorded")
    assert not np.shares_memory(first.expert, second.expert)
    assert np.array_equal(first.expert, second.expert)


def test_no_more_is_kept_than_is_said(replayed: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST", 3)
    for number in range(9):
        assert shared(replayed, number, lambda number=number: number) == number
    assert len(sharing._of_stored) == 3
    made = []
    shared(replayed, 8, lambda: made.append("again"))
    shared(replayed, 0, lambda: made.append("anew"))
    assert made == ["anew"]


def test_what_a_trace_in_memory_shares_goes_with_it() -> None:
    trace = unstored()
    kept = weakref.ref(inputs_of(trace, configure(), NOTHING, NOTHING)["stream_expert"])
    assert kept() is not None
    del trace
    gc.collect()
    assert kept() is None


def test_threads_that_want_the_same_make_it_once(replayed: Trace) -> None:
    made = []

    def make() -> str:
        time.sleep(0.05)
        made.append(os.getpid())
        return "value"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: shared(replayed, "slow", make), range(8))) == ["value"] * 8
    assert len(made) == 1


def test_what_fails_is_not_kept(replayed: Trace) -> None:
    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"^no$"):
            shared(replayed, "failing", fail)
    assert shared(replayed, "failing", lambda: 1) == 1
