"""What every importer keeps to, shown on a sample that was written for it: see importer_samples.py."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]
from typer.testing import CliRunner

from moereplay import command as entry
from moereplay.traces.importers import registry as importers
from moereplay.traces.schema import Request, TraceError
from moereplay.traces.store import open_trace, verify
from tests.kit import importer_samples
from tests.kit.importer_formulas import EXPERTS, LAYERS, SAMPLES, K, Sample
from tests.kit.importer_samples import ALL
from tests.kit.importing import imported

CUTS = 40  #: truncations of one file
PACKED_CUTS = 10
TEXTS = [sample for sample in ALL if sample.path.suffix in (".csv", ".tsv", ".jsonl", ".json", ".log", ".txt")]
FOLDERS = [sample for sample in ALL if sample.path.is_dir() and sample.importer not in ("gptoss_npz", "layer_files")]

ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")  #: utf-16 and utf-32 write a mark, -le none
PACKERS: dict[str, Callable[[bytes, str], bytes]] = {
    ".gz": lambda text, _: gzip.compress(text),
    ".bz2": lambda text, _: bz2.compress(text),
    ".xz": lambda text, _: lzma.compress(text),
    ".zst": lambda text, _: bytes(zstd.compress(text)),
    ".zip": lambda text, name: zipped({name: text}),
}

each = pytest.mark.parametrize("sample", ALL, ids=[sample.name for sample in ALL])


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def copied(sample: Sample, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    target = folder / sample.name
    if sample.path.is_dir():
        shutil.copytree(sample.path, target, dirs_exist_ok=True)
    else:
        shutil.copy(sample.path, target)
    return target


def arrays_of(request: Request) -> dict[str, np.ndarray]:
    return {field.name: getattr(request, field.name) for field in fields(request) if field.name != "prompt_length"}


def assert_same(found: Request, expected: Request) -> None:
    """The request, or its first tokens: every array equals, and there is none that is not expected."""
    tokens = len(found.chosen)
    assert found.prompt_length == min(expected.prompt_length, tokens)
    given, wanted = arrays_of(found), arrays_of(expected)
    for name in wanted:
        if wanted[name] is None or name == "lookahead":
            assert given[name] is None or name == "lookahead"
        else:
            np.testing.assert_array_equal(given[name], wanted[name][:tokens])


def read_all(sample: Sample, path: Path) -> list[Request]:
    """The requests, held in memory as a trace on the way, so that each is checked. Raises TraceError."""
    return imported(path, sample.options)[1]


# ---------------------------------------------------------------- the samples themselves


def test_every_importer_has_a_sample() -> None:
    assert {sample.importer for sample in ALL} == set(importers.names())


def test_the_samples_are_what_their_script_writes(tmp_path: Path) -> None:
    importer_samples.write_all(tmp_path)
    made = {file.relative_to(tmp_path): file.read_bytes() for file in files_in(tmp_path)}
    assert made == {file.relative_to(SAMPLES): file.read_bytes() for file in files_in(SAMPLES)}


# ---------------------------------------------------------------- recognised, and by one importer only


@each
def test_a_sample_is_recognised_by_its_own_importer_and_by_no_other(sample: Sample) -> None:
    claims = [name for name in importers.names() if importers.load(name).sniff(sample.path)]
    assert importers.detect(sample.path).name == sample.importer
    assert set(claims) - {"generic"} == {sample.importer} - {"generic"}  # generic takes what nobody else does


# ---------------------------------------------------------------- what comes out


@each
def test_a_sample_gives_its_requests_in_order(sample: Sample) -> None:
    requests = read_all(sample, sample.path)
    assert len(requests) == len(sample.requests)
    for found, expected in zip(requests, sample.requests, strict=True):
        assert len(found.chosen) == len(expected.chosen)
        assert_same(found, expected)


@each
def test_a_sample_gives_sizes_and_says_what_was_assumed(sample: Sample) -> None:
    foreign = importers.read(sample.path, sample.options)
    geometry, provenance = foreign.header.geometry, foreign.header.provenance
    assert (geometry.layers, geometry.experts, geometry.k) == (LAYERS, EXPERTS, K)
    assert geometry.expert_bytes == sample.expert_bytes
    assert (provenance.importer, provenance.source, provenance.model) == (sample.importer, sample.name, sample.model)
    assert foreign.notes == sample.notes


@each
def test_a_sample_becomes_a_trace_on_the_command_line(sample: Sample, tmp_path: Path) -> None:
    command = ["import", str(sample.path), "--out", str(tmp_path / "a.zarr")]
    sizes = ["--expert-bytes", "/".join(map(str, sample.expert_bytes))] if sample.options.expert_bytes else []
    own = [f"{field}={'+'.join(names)}" for field, names in (sample.options.columns or {}).items()]
    columns = ["--columns", ",".join(own)] if own else []
    columns += ["--shape", "{}x{}".format(*sample.options.shape)] if sample.options.shape else []
    outcome = CliRunner().invoke(entry.application(), [*command, *sizes, *columns])
    assert outcome.exit_code == 0, outcome.output
    trace = open_trace(tmp_path / "a.zarr")
    verify(trace)
    assert trace.requests == len(sample.requests)
    for index, expected in enumerate(sample.requests):
        assert_same(trace.request(index), expected)


@each
def test_requests_come_one_by_one(sample: Sample) -> None:
    requests = importers.read(sample.path, sample.options).requests
    assert isinstance(requests, Iterator)
    assert_same(next(requests), sample.requests[0])


@pytest.mark.parametrize("sample", FOLDERS, ids=[sample.name for sample in FOLDERS])
def test_a_file_of_a_folder_is_read_when_its_requests_are_taken(sample: Sample, tmp_path: Path) -> None:
    folder = copied(sample, tmp_path)
    requests = importers.read(folder, sample.options).requests
    next(requests)
    files_in(folder)[-1].write_bytes(b"overwritten")
    with pytest.raises(TraceError, match=files_in(folder)[-1].name):
        list(requests)


# ---------------------------------------------------------------- damaged


@each
def test_a_truncated_sample_is_refused_or_gives_its_first_tokens(sample: Sample, tmp_path: Path) -> None:
    for file in files_in(copied(sample, tmp_path)):
        whole = file.read_bytes()
        for size in range(0, len(whole), max(1, len(whole) // CUTS)):
            file.write_bytes(whole[:size])
            assert_refused_or_shorter(sample, tmp_path / sample.name)
        file.write_bytes(whole)


def assert_refused_or_shorter(sample: Sample, path: Path) -> None:
    try:
        requests = read_all(sample, path)
    except TraceError as refused:
        assert "\n" not in str(refused)
        assert len(str(refused)) < 1000
        return
    assert len(requests) <= len(sample.requests)
    for found, expected in zip(requests, sample.requests, strict=False):
        assert_same(found, expected)
    for found, expected in zip(requests[:-1], sample.requests, strict=False):  # only the last may be shorter
        assert len(found.chosen) == len(expected.chosen)


@each
def test_a_flipped_byte_is_refused_or_still_a_trace(sample: Sample, tmp_path: Path) -> None:
    for file in files_in(copied(sample, tmp_path)):
        whole = file.read_bytes()
        for at in range(3, len(whole), max(1, len(whole) // CUTS)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
            try:
                read_all(sample, tmp_path / sample.name)
            except TraceError as refused:
                assert "\n" not in str(refused)
        file.write_bytes(whole)


# ---------------------------------------------------------------- packed and encoded


@pytest.mark.parametrize("sample", TEXTS, ids=[sample.name for sample in TEXTS])
def test_a_packed_sample_gives_the_same_requests(sample: Sample, tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        packed = tmp_path / f"{sample.name}{suffix}"
        packed.write_bytes(pack(sample.path.read_bytes(), sample.name))
        assert importers.detect(packed).name == sample.importer
        for found, expected in zip(read_all(sample, packed), sample.requests, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("sample", TEXTS, ids=[sample.name for sample in TEXTS])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoded_sample_gives_the_same_requests(sample: Sample, encoding: str, tmp_path: Path) -> None:
    copy = tmp_path / sample.name
    copy.write_bytes(sample.path.read_text().replace("\n", "\r\n").encode(encoding))
    assert importers.detect(copy).name == sample.importer
    for found, expected in zip(read_all(sample, copy), sample.requests, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("sample", TEXTS, ids=[sample.name for sample in TEXTS])
def test_a_truncated_packed_sample_is_refused(sample: Sample, tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        packed, whole = tmp_path / f"{sample.name}{suffix}", pack(sample.path.read_bytes(), sample.name)
        for size in range(0, len(whole), max(1, len(whole) // PACKED_CUTS)):
            packed.write_bytes(whole[:size])
            with pytest.raises(TraceError):
                read_all(sample, packed)
