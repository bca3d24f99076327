"""Unfinished stores can be continued, by one writer at a time."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace

import numpy as np
import pytest

from moereplay.traces.files import clear_abandoned
from moereplay.traces.lock import Lock
from moereplay.traces.schema import Header, Provenance, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.stored import Column
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.collecting import case
from tests.kit.every import every
from tests.kit.stored import BIAS, GEOMETRY, HEADER, PLAIN, assert_holds, commit_some, everything, ids_only

DEAD = 1 << 22  #: no process of this number is there


def test_a_partial_without_its_final_name_says_how_to_go_on(tmp_path):
    commit_some(tmp_path / "a.zarr", [ids_only(20)])
    with pytest.raises(TraceError, match=r"a\.zarr is not finished: rerun .* --resume, or open .*a\.zarr\.partial"):
        open_trace(tmp_path / "a.zarr")


@pytest.mark.slow
def test_a_resumed_recording_equals_an_undisturbed_one(tmp_path):
    requests = [everything(11, seed) for seed in range(6)]
    commit_some(tmp_path / "once", requests, HEADER, BIAS)
    once = write_trace(tmp_path / "once", HEADER, requests, BIAS, resume=True)
    for stop in (1, 6):
        commit_some(tmp_path / f"stopped{stop}", requests[:stop], HEADER, BIAS)
        again = write_trace(tmp_path / f"stopped{stop}", HEADER, requests, BIAS, resume=True)
        assert_holds(again, requests)
        verify(again)
        assert again.digest == once.digest, stop


def test_a_second_writer_is_refused_by_the_name_of_the_first(tmp_path):
    with TraceWriter.create(tmp_path / "a.zarr", PLAIN) as first:
        first.append(ids_only(20))
        first.commit()
        for start in (TraceWriter.create, TraceWriter.resume):
            with pytest.raises(TraceError, match=rf"a\.zarr\.partial is being written by process {os.getpid()} on "):
                start(tmp_path / "a.zarr", PLAIN)
        first.append(ids_only(10))
        assert_holds(first.finish(), [ids_only(20), ids_only(10)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr"]


def test_a_lock_whose_file_was_just_removed_is_no_lock(tmp_path, monkeypatch):
    first, opened = Lock(tmp_path / "a.zarr.partial"), os.open

    def as_the_first_ends(*arguments):
        descriptor = opened(*arguments)
        first.release()  # between opening the file and locking it
        return descriptor

    monkeypatch.setattr("moereplay.traces.lock.os.open", as_the_first_ends)
    second = Lock(tmp_path / "a.zarr.partial")
    with pytest.raises(TraceError, match="is being written by"):
        Lock(tmp_path / "a.zarr.partial")
    second.release()


def test_a_lock_file_that_leads_elsewhere_is_refused_and_nothing_is_written_there(tmp_path):
    """In a shared folder anybody may have put it there."""
    making = {
        "link": lambda lock: lock.symlink_to(lock.with_name("precious")),
        "dangling": lambda lock: lock.symlink_to(lock.with_name("none")),
        "hard link": lambda lock: lock.hardlink_to(lock.with_name("precious")),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }
    for kind, make in making.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "precious").write_text("mine")
        make(folder / "a.zarr.partial.lock")
        with case(kind), pytest.raises(TraceError, match=r"cannot write .*a\.zarr\.partial"):
            write_trace(folder / "a.zarr", PLAIN, [ids_only(20)])
        assert (folder / "precious").read_text() == "mine"
        assert sorted(path.name for path in folder.iterdir()) == ["a.zarr.partial.lock", "precious"]


def test_a_writer_that_cannot_resume_leaves_nothing_and_advises_no_resume(tmp_path, monkeypatch):
    def full(column):
        raise OSError(errno.ENOSPC, "No space left on device")

    requests = [ids_only(600, seed) for seed in range(3)]
    with monkeypatch.context() as patched:
        original, calls = Column.write, []
        patched.setattr(
            Column, "write", lambda column: full(column) if len(calls) > 20 else calls.append(original(column))
        )
        with pytest.raises(TraceError, match=r"cannot write .*a\.zarr: No space") as refused:
            write_trace(tmp_path / "a.zarr", PLAIN, iter([*requests, *requests, *requests]), resumable=False)
    assert "resume" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    killed = TraceWriter.create(tmp_path / "a.zarr", PLAIN, resumable=False)
    killed.append(requests[0])
    (left,) = tmp_path.glob(".a.zarr.*.tmp")
    left.rename(tmp_path / f".a.zarr.{socket.gethostname()}-{DEAD}-0.tmp")  # as another process, which was killed
    del killed
    clear_abandoned.cache_clear()
    assert_holds(write_trace(tmp_path / "a.zarr", PLAIN, requests, resumable=False), requests)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


def test_resume_starts_over_when_nothing_was_committed(tmp_path):
    killed = TraceWriter.create(tmp_path / "a.zarr", PLAIN)
    killed.append(replace(ids_only(10), nll=np.zeros(10)))  # creates an array the second run has not
    with pytest.raises(TraceError, match="holds no committed request"):
        open_trace(tmp_path / "a.zarr.partial")
    del killed  # and with it the lock, as a kill would
    assert_holds(write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)], resume=True), [ids_only(20)])


def test_resume_starts_over_in_a_folder_without_attributes(tmp_path):
    (tmp_path / "a.zarr.partial").mkdir()
    assert_holds(write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)], resume=True), [ids_only(20)])


def test_resume_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "a.zarr.partial").mkdir()
    (tmp_path / "a.zarr.partial" / "thesis.tex").write_text("precious")
    with pytest.raises(TraceError, match="Zarr v3 group"):
        write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)], resume=True)
    assert (tmp_path / "a.zarr.partial" / "thesis.tex").read_text() == "precious"


def test_resume_without_a_partial_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot resume"):
        TraceWriter.resume(tmp_path / "a.zarr", PLAIN)


OTHER = Header(geometry=GEOMETRY.model_copy(update={"k": 1}))
RENAMED = Header(geometry=GEOMETRY, provenance=Provenance(versions={"torch": "2.0"}))


def test_resume_with_another_header_names_the_field(tmp_path):
    for at, (header, message) in enumerate(
        [
            (OTHER, r"header\.geometry\.k is 2 in the store, 1 now"),
            (RENAMED, r"header\.provenance\.versions\.torch is None in the store, '2\.0' now"),
        ]
    ):
        folder = tmp_path / str(at)
        folder.mkdir()
        with case(header, message):
            commit_some(folder / "a.zarr", [ids_only(20)])
            with pytest.raises(TraceError, match=message):
                TraceWriter.resume(folder / "a.zarr", header)
            assert_holds(open_trace(folder / "a.zarr.partial"), [ids_only(20)])


@every("stored, given", [(BIAS, None), (None, BIAS), (BIAS, BIAS + 1)], apart=True)
def test_resume_with_another_router_bias_is_refused(tmp_path, stored, given):
    commit_some(tmp_path / "a.zarr", [ids_only(20)], bias=stored)
    with pytest.raises(TraceError, match="router_bias differs"):
        TraceWriter.resume(tmp_path / "a.zarr", PLAIN, given)


def test_resume_holds_later_requests_to_the_same_arrays(tmp_path):
    commit_some(tmp_path / "a.zarr", [ids_only(20)])
    writer = TraceWriter.resume(tmp_path / "a.zarr", PLAIN)
    with pytest.raises(TraceError, match="request 1: nll must be given for every request or for none"):
        writer.append(replace(ids_only(20), nll=np.zeros(20)))
