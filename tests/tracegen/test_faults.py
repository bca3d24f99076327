"""Kills, flipped bits, missing files, full disks, foreign folders: nothing committed is lost, no damage is silent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from moereplay.traces.schema import Geometry, Header, Request, Trace, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.stored import metadata_digest
from moereplay.traces.writer import TraceWriter
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, K = 2, 8, 2
HEADER = Header(geometry=Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(64, 64)), lookahead_depth=2)
BIAS = np.ones((LAYERS, EXPERTS), np.float32)


def sample(index: int) -> Request:
    """The request of this index, the same in every process: 6 to 12 tokens."""
    rng = np.random.Generator(np.random.PCG64(index))
    tokens = int(rng.integers(6, 13))
    logits, *lookahead = rng.standard_normal((3, tokens, LAYERS, EXPERTS), np.float32)
    return Request(
        chosen=logits.argsort(-1)[..., :K],
        prompt_length=int(rng.integers(tokens)),
        weights=rng.random((tokens, LAYERS, K), np.float32),
        logits=logits,
        lookahead=tuple(lookahead),
        token_ids=rng.integers(0, 1000, tokens),
        nll=rng.random(tokens, np.float32),
        residency=rng.integers(-1, 3, (tokens, LAYERS, K)),
    )


def record(path: Path, requests: int, shard_tokens: int = 64) -> Trace:
    """Write, or continue, a trace of the first samples, printing how many are committed."""
    if path.with_name(f"{path.name}.partial").exists():
        writer = TraceWriter.resume(path, HEADER, BIAS)
    else:
        writer = TraceWriter.create(path, HEADER, BIAS, shard_tokens)
    with writer:
        for index in range(writer.requests_done, requests):
            writer.append(sample(index))
            print(writer.requests_done, flush=True)
        return writer.finish()


def assert_holds_samples(trace: Trace) -> None:
    """Every committed row of every array is the one that was appended."""
    given = [sample(index).arrays() for index in range(trace.requests)]
    assert trace.arrays.keys() == given[0].keys()
    for name in given[0]:
        np.testing.assert_array_equal(trace.read(name), np.concatenate([arrays[name] for arrays in given]))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """About 230 tokens in shards of 64."""
    path = tmp_path_factory.mktemp("pristine") / "a.zarr"
    record(path, 25)
    return path


def copy_of(pristine: Path, folder: Path) -> Path:
    return Path(shutil.copytree(pristine, folder / "a.zarr"))


@pytest.fixture
def store(pristine, tmp_path) -> Path:
    return copy_of(pristine, tmp_path)


def detected(path: Path) -> bool:
    try:
        verify(open_trace(path))
    except TraceError:
        return True
    return False


def edit_attributes(path: Path, change) -> None:
    document = json.loads((path / "zarr.json").read_bytes())
    change(document["attributes"])
    (path / "zarr.json").write_text(json.dumps(document))


def replace_text(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def reseal(path: Path) -> None:
    """Give edited metadata a valid digest, as a hostile writer would."""
    group = json.loads((path / "zarr.json").read_bytes())
    edit_attributes(path, lambda attributes: attributes.update(digest=metadata_digest(path, group)))


# Kills


def kill_while_recording(path: Path, requests: int, rng: np.random.Generator) -> int:
    """Kill -9 a recorder at a random moment; returns the requests it had reported as committed."""
    command = [sys.executable, __file__, str(path), str(requests)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout is not None
    reported = [child.stdout.readline() for _ in range(int(rng.integers(8, 25)))]
    time.sleep(rng.uniform(0, 0.03))  # a commit takes about this long, so any step of it may be hit
    child.send_signal(signal.SIGKILL)
    reported += child.stdout.readlines()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return int(reported[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "requests"), ((1, 60), pytest.param(10, 400, marks=pytest.mark.long)))
def test_kills_lose_no_committed_row(kills, requests, tmp_path):
    rng = np.random.Generator(np.random.PCG64(2024))
    for _ in range(kills):
        reported = kill_while_recording(tmp_path / "a.zarr", requests, rng)
        survived = open_trace(tmp_path / "a.zarr.partial")
        assert survived.requests >= reported > 0
        assert_holds_samples(survived)
    finished = record(tmp_path / "a.zarr", requests)
    assert_holds_samples(finished)
    verify(finished)
    assert finished.digest == record(tmp_path / "undisturbed.zarr", requests).digest
    assert not list((tmp_path / "a.zarr").rglob("*.partial"))


# Damaged files


@pytest.mark.slow
def test_one_flipped_bit_in_any_file_is_detected(store):
    """A bit in each of the 42 files: 4 shards of 6 arrays, 5 arrays of one file, 13 zarr.json."""
    rng = np.random.Generator(np.random.PCG64(7))
    files = sorted(file for file in store.rglob("*") if file.is_file())
    silent = []
    for file in files:
        original = file.read_bytes()
        damaged = bytearray(original)
        bit = int(rng.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        if not detected(store):
            silent.append((file, bit))
        file.write_bytes(original)
    assert not silent
    assert len(files) == 42
    assert not detected(store)  # restored, so it was the bits


@every("kept", [1, 3, 100, -1], apart=True)
def test_a_truncated_chunk_is_detected_and_named(pristine, tmp_path, kept):
    store = copy_of(pristine, tmp_path)
    file = store / "logits" / "c.2.0.0"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(TraceError, match=r"a\.zarr: logits rows .* are damaged"):
        verify(open_trace(store))


@every("file", ["request_offsets/c.0", "prompt_lengths/c.0", "router_bias/c.0.0"], apart=True)
def test_small_damaged_arrays_are_named_on_opening(pristine, tmp_path, file):
    store = copy_of(pristine, tmp_path)
    (store / file).write_bytes((store / file).read_bytes()[:-9])
    with pytest.raises(TraceError, match=rf"a\.zarr: {file.split('/')[0]} is damaged"):
        open_trace(store)


def test_damage_is_met_only_by_the_rows_it_touches(store):
    file = store / "logits" / "c.2.0.0"
    file.write_bytes(file.read_bytes()[:100])
    trace = open_trace(store)
    assert len(trace.read("logits", 0, 128)) == 128  # shards 0 and 1 of 64 tokens are whole
    with pytest.raises(TraceError, match="logits rows 128-192 are damaged"):
        trace.read("logits", 128, 192)


def test_swapped_chunks_are_detected(store):
    """Each file is valid in itself, so only the digest of the decoded rows can tell."""
    first, second = store / "chosen" / "c.0.0.0", store / "chosen" / "c.1.0.0"
    first.rename(store / "kept")
    second.rename(first)
    (store / "kept").rename(second)
    with pytest.raises(TraceError, match="chosen does not match its recorded sha256"):
        verify(open_trace(store))


@every("file", ["chosen/c.0.0.0", "lookahead/2/c.3.0.0", "request_offsets/c.0", "router_bias/c.0.0"], apart=True)
def test_a_deleted_or_empty_file_is_detected_on_opening(pristine, tmp_path, file):
    store = copy_of(pristine, tmp_path)
    (store / file).write_bytes(b"")
    with pytest.raises(TraceError, match=f"{file} is empty"):
        open_trace(store)
    (store / file).unlink()
    with pytest.raises(TraceError, match=f"{file} is missing"):
        open_trace(store)


@every("file", ["chosen/zarr.json", "lookahead/zarr.json"], apart=True)
def test_deleted_metadata_is_detected_on_opening(pristine, tmp_path, file):
    store = copy_of(pristine, tmp_path)
    (store / file).unlink()
    with pytest.raises(TraceError, match=f"{file} is missing or damaged"):
        open_trace(store)


def test_edited_metadata_is_detected_on_opening(pristine, tmp_path):
    attributes, array = copy_of(pristine, tmp_path / "attributes"), copy_of(pristine, tmp_path / "array")
    edit_attributes(attributes, lambda a: a["header"]["provenance"].update(model="a better one"))
    replace_text(array / "logits" / "zarr.json", '"fill_value": 0.0', '"fill_value": 1.0')
    for store in (attributes, array):
        with pytest.raises(TraceError, match="attributes or metadata were edited or damaged"):
            open_trace(store)


# Metadata that is consistent with its digest, and wrong


@every(
    "change, message",
    [
        (lambda a: a["header"]["geometry"].update(layers=0), r"header\.geometry\.layers: expected at least 1 "),
        (lambda a: a["header"].update(colour="red"), r"header\.colour: unknown key"),
        (lambda a: a["committed"].update(tokens=-1), r"committed\.tokens: "),
        (lambda a: a["arrays"].pop("lookahead/2"), r"arrays lack, or should not have, lookahead/2"),
        (lambda a: a["arrays"].update({"../../etc": ""}), r"arrays lack, or should not have, \.\./\.\./etc"),
    ],
    apart=True,
)
def test_invalid_attributes_name_the_field_in_one_line(pristine, tmp_path, change, message):
    store = copy_of(pristine, tmp_path)
    edit_attributes(store, change)
    with pytest.raises(TraceError, match=message) as refused:
        open_trace(store)
    assert "\n" not in str(refused.value)


@every(
    "change, message",
    [
        (lambda a: a["header"]["geometry"].update(experts=9), r"logits is float32 \(\d+, 2, 8\), expected .*, 2, 9\)"),
        (lambda a: a["committed"].update(tokens=64), "request_offsets do not rise from 0 to 64"),
        (lambda a: a["committed"].update(tokens=6400), r"chosen is int16 .*expected int16 \(6400, 2, 2\)"),
        (lambda a: a["committed"].update(requests=20), "request_offsets do not rise from 0 to"),
        (lambda a: a["committed"].update(requests=60), r"is int64 \(2[56],\), expected int64 \(6[01],\)"),
    ],
    apart=True,
)
def test_arrays_that_contradict_the_attributes_are_refused(pristine, tmp_path, change, message):
    store = copy_of(pristine, tmp_path)
    edit_attributes(store, change)
    reseal(store)
    with pytest.raises(TraceError, match=message):
        open_trace(store)


def rewrite(store: Path, name: str, values: list[int]) -> None:
    zarr.open_array(store / name, mode="r+")[:] = np.array(values)


def test_ranges_that_do_not_rise_and_prompts_beyond_their_request_are_refused(pristine, store, tmp_path):
    offsets = open_trace(store).request_offsets.tolist()
    rewrite(store, "request_offsets", [0, offsets[2], offsets[1], *offsets[3:]])
    with pytest.raises(TraceError, match="request_offsets do not rise from 0"):
        open_trace(store)
    other = copy_of(pristine, tmp_path / "other")
    rewrite(other, "prompt_lengths", [13] * 25)
    with pytest.raises(TraceError, match="prompt_lengths exceed the lengths"):
        open_trace(other)


def test_metadata_that_zarr_cannot_use_is_refused(store):
    replace_text(store / "logits" / "zarr.json", '"blosc"', '"made_up"')
    reseal(store)
    with pytest.raises(TraceError, match=r"logits/zarr\.json is not usable"):
        open_trace(store)


# Not ours


def test_a_newer_version_asks_for_an_upgrade(store):
    edit_attributes(store, lambda attributes: attributes.update(version=2, unheard_of=True))
    with pytest.raises(TraceError, match="format version 2, this program reads 1; upgrade moereplay"):
        open_trace(store)


def test_what_is_no_trace_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"PK")
    zarr.create_group(tmp_path / "foreign", attributes={"title": "sea ice"}, zarr_format=3)
    zarr.create_group(tmp_path / "v2", zarr_format=2)
    messages = {
        "empty": r"no zarr\.json",
        "file": "is a file, expected",
        "none": "does not exist",
        "foreign": "is a Zarr group, expected a moereplay-trace",
        "v2": r"no zarr\.json, expected a Zarr v3 group",
    }
    for name, message in messages.items():
        with pytest.raises(TraceError, match=message):
            open_trace(str(tmp_path / name))


def test_the_current_folder_is_refused_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"no zarr\.json"):
        open_trace(".")


@every("content", ["", "[]", "null", '{"attributes": 3}', "[" * 100_000, "\xff", '{"a": NaN'], apart=True)
def test_a_broken_group_document_is_refused_in_one_line(pristine, tmp_path, content):
    store = copy_of(pristine, tmp_path)
    (store / "zarr.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceError) as refused:
        open_trace(store)
    assert "\n" not in str(refused.value)


# Disks that refuse


def fail_from(monkeypatch, call: int) -> None:
    """Let the disk be full from that chunk or metadata write on."""
    original, calls = LocalStore.set, iter(range(10**9))

    async def refuse(self, key, value):
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await original(self, key, value)

    monkeypatch.setattr(LocalStore, "set", refuse)


@pytest.mark.slow
@every("call", [40, 47, 60, 80], apart=True)
def test_a_full_disk_keeps_committed_rows_and_a_rerun_completes(pristine, tmp_path, monkeypatch, call):
    fail_from(monkeypatch, call)
    with pytest.raises(TraceError, match=r"No space left on device; committed rows are kept in a\.zarr\.partial"):
        record(tmp_path / "a.zarr", 25)
    assert_holds_samples(open_trace(tmp_path / "a.zarr.partial"))
    monkeypatch.undo()
    assert record(tmp_path / "a.zarr", 25).digest == open_trace(pristine).digest


def test_a_disk_full_from_the_start_leaves_nothing(tmp_path, monkeypatch):
    fail_from(monkeypatch, 5)
    with pytest.raises(TraceError, match="No space left on device; choose another path"):
        record(tmp_path / "a.zarr", 40)
    assert not list(tmp_path.iterdir())


def test_a_commit_may_be_retried_once_there_is_space(tmp_path, monkeypatch):
    with TraceWriter.create(tmp_path / "a.zarr", HEADER, BIAS) as writer:
        for index in range(20):
            writer.append(sample(index))
        fail_from(monkeypatch, 7)
        with pytest.raises(TraceError, match="No space left on device"):
            writer.commit()
        assert writer.requests_done == 0
        monkeypatch.undo()
        assert_holds_samples(writer.finish())


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TraceError, match=r"cannot write .*a\.zarr\.partial: Permission denied; choose another path"):
        TraceWriter.create(tmp_path / "a.zarr", HEADER)


def test_resume_refuses_a_partial_whose_committed_rows_are_damaged(tmp_path):
    with TraceWriter.create(tmp_path / "a.zarr", HEADER, BIAS, 64) as writer:
        for index in range(20):
            writer.append(sample(index))
    chunks = tmp_path / "a.zarr.partial" / "chosen"
    shutil.copy(chunks / "c.0.0.0", chunks / "c.1.0.0")
    with pytest.raises(TraceError, match="chosen does not match its recorded sha256"):
        TraceWriter.resume(tmp_path / "a.zarr", HEADER, BIAS)


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]))
