"""The contract of importers, clause by clause, for samples of built-in formats and of plug-ins."""

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
from tests.kit.collecting import case
from tests.kit.importer_formulas import EXPERTS, LAYERS, K, Sample
from tests.kit.importing import imported

CUTS = 20  #: truncations of one file
PACKED_CUTS = 10
TEXTS = (".csv", ".tsv", ".jsonl", ".json", ".log", ".txt")

ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")  #: utf-16 and utf-32 write a mark, -le none
PACKERS: dict[str, Callable[[bytes, str], bytes]] = {
    ".gz": lambda text, _: gzip.compress(text),
    ".bz2": lambda text, _: bz2.compress(text),
    ".xz": lambda text, _: lzma.compress(text),
    ".zst": lambda text, _: bytes(zstd.compress(text)),
    ".zip": lambda text, name: zipped({name: text}),
}


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def copied(sample: Sample, folder: Path) -> Path:
    target = folder / sample.name
    if sample.path.is_dir():
        shutil.copytree(sample.path, target, dirs_exist_ok=True)
    else:
        shutil.copy(sample.path, target)
    return target


def arrays_of(request: Request) -> dict[str, np.ndarray]:
    others = ("prompt_length", "rejected")  # no importer has drafts
    return {field.name: getattr(request, field.name) for field in fields(request) if field.name not in others}


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


def assert_all_same(requests: list[Request], sample: Sample) -> None:
    assert [len(found.chosen) for found in requests] == [len(expected.chosen) for expected in sample.requests]
    for found, expected in zip(requests, sample.requests, strict=True):
        assert_same(found, expected)


def read_all(sample: Sample, path: Path) -> list[Request]:
    """The requests, held in memory as a trace on the way, so that each is checked. Raises TraceError."""
    return imported(path, sample.options)[1]


# ---------------------------------------------------------------- what an importer reads


def is_recognised_by_its_own_importer_alone(sample: Sample, folder: Path) -> None:
    claims = [name for name in importers.names() if importers.load(name).sniff(sample.path)]
    assert importers.detect(sample.path).name == sample.importer
    assert set(claims) - {"generic"} == {sample.importer} - {"generic"}  # generic takes what no other claims


def gives_sizes_and_notes(sample: Sample, folder: Path) -> None:
    foreign = importers.read(sample.path, sample.options)
    geometry, provenance = foreign.header.geometry, foreign.header.provenance
    assert (geometry.layers, geometry.experts, geometry.k) == (LAYERS, EXPERTS, K)
    assert geometry.expert_bytes == sample.expert_bytes
    assert (provenance.importer, provenance.source, provenance.model) == (sample.importer, sample.name, sample.model)
    assert foreign.notes == sample.notes


def gives_its_requests_in_order_and_one_by_one(sample: Sample, folder: Path) -> None:
    requests = importers.read(sample.path, sample.options).requests
    assert isinstance(requests, Iterator)
    assert_all_same([next(requests), *requests], sample)
    assert_all_same(read_all(sample, sample.path), sample)


def becomes_a_trace_on_the_command_line(sample: Sample, folder: Path) -> None:
    command = ["import", str(sample.path), "--out", str(folder / "a.zarr")]
    sizes = ["--expert-bytes", "/".join(map(str, sample.expert_bytes))] if sample.options.expert_bytes else []
    own = [f"{field}={'+'.join(names)}" for field, names in (sample.options.columns or {}).items()]
    columns = ["--columns", ",".join(own)] if own else []
    columns += ["--shape", "{}x{}".format(*sample.options.shape)] if sample.options.shape else []
    outcome = CliRunner().invoke(entry.application(), [*command, *sizes, *columns])
    assert outcome.exit_code == 0, outcome.output
    trace = open_trace(folder / "a.zarr")
    verify(trace)
    assert_all_same([trace.request(at) for at in range(trace.requests)], sample)


def reads_a_file_of_a_folder_when_its_requests_are_taken(sample: Sample, folder: Path) -> None:
    if sample.path.is_dir() and sample.importer not in ("gptoss_npz", "layer_files"):
        requests = importers.read(copied(sample, folder), sample.options).requests
        next(requests)
        last = files_in(folder / sample.name)[-1]
        last.write_bytes(b"overwritten")
        with pytest.raises(TraceError, match=last.name):
            list(requests)


def reads_packed_texts_and_refuses_truncated_ones(sample: Sample, folder: Path) -> None:
    for suffix, pack in PACKERS.items() if sample.path.suffix in TEXTS else ():
        packed, whole = folder / f"{sample.name}{suffix}", pack(sample.path.read_bytes(), sample.name)
        packed.write_bytes(whole)
        assert importers.detect(packed).name == sample.importer
        assert_all_same(read_all(sample, packed), sample)
        for size in range(0, len(whole), max(1, len(whole) // PACKED_CUTS)):
            packed.write_bytes(whole[:size])
            with pytest.raises(TraceError):
                read_all(sample, packed)


def reads_encoded_texts(sample: Sample, folder: Path) -> None:
    for encoding in ENCODINGS if sample.path.suffix in TEXTS else ():
        copy = folder / sample.name
        copy.write_bytes(sample.path.read_text().replace("\n", "\r\n").encode(encoding))
        assert importers.detect(copy).name == sample.importer
        assert_all_same(read_all(sample, copy), sample)


CLAUSES = (
    is_recognised_by_its_own_importer_alone,
    gives_sizes_and_notes,
    gives_its_requests_in_order_and_one_by_one,
    becomes_a_trace_on_the_command_line,
    reads_a_file_of_a_folder_when_its_requests_are_taken,
    reads_packed_texts_and_refuses_truncated_ones,
    reads_encoded_texts,
)


def check(sample: Sample, folder: Path) -> None:
    """Try every clause on a sample."""
    for clause in CLAUSES:
        (folder / clause.__name__).mkdir()
        with case(clause.__name__):
            clause(sample, folder / clause.__name__)


# ---------------------------------------------------------------- damaged


def is_refused_or_still_a_trace_when_damaged(sample: Sample, folder: Path) -> None:
    for file in files_in(copied(sample, folder)):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // CUTS)):
            file.write_bytes(whole[:at])
            with case(file.name, "truncated to", at):
                assert_first_tokens(read_or_refused(sample, folder / sample.name), sample)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
            with case(file.name, "flipped at", at):
                read_or_refused(sample, folder / sample.name)
        file.write_bytes(whole)


def read_or_refused(sample: Sample, path: Path) -> list[Request]:
    """The requests; none where the file is refused, in one short line."""
    try:
        requests = read_all(sample, path)
    except TraceError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 1000
        return []
    assert requests
    return requests


def assert_first_tokens(requests: list[Request], sample: Sample) -> None:
    """Only the last request may be shorter than it should."""
    assert len(requests) <= len(sample.requests)
    for found, expected in zip(requests, sample.requests, strict=False):
        assert_same(found, expected)
    assert all(
        len(found.chosen) == len(expected.chosen)
        for found, expected in zip(requests[:-1], sample.requests, strict=False)
    )


# ---------------------------------------------------------------- the samples themselves


def rewrite(folder: Path, samples: list[Sample]) -> None:
    """Write the samples into a folder in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for sample in samples:
        sample.write(folder / sample.name)


def are_what_their_script_writes(samples: list[Sample], folder: Path) -> None:
    """Every file beside the samples is written by them, byte for byte."""
    rewrite(folder, samples)
    made = {file.relative_to(folder): file.read_bytes() for file in files_in(folder)}
    there = samples[0].folder
    assert made == {file.relative_to(there): file.read_bytes() for file in files_in(there)}
