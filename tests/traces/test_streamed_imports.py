"""Long files are read some lines at a time: what is held is a request, whatever the file's length and its pieces."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.traces import stored
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers import rows as table_rows
from moereplay.traces.importers import table, text
from moereplay.traces.importers.by_request import Ends, Restarts, by_request, restarts
from moereplay.traces.schema import Geometry, Header, Request, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import write_trace
from tests.kit.collecting import case
from tests.kit.importer_formulas import Sample
from tests.kit.importer_samples import ALL
from tests.kit.importing import SIZED, imported
from tests.kit.long_files import MANY, TOKENS, Lines, written

TEXTS = [sample for sample in ALL if sample.path.is_file() and sample.path.suffix not in (".pt", ".npy", ".bin")]
FEW, MANY_MORE = 20, 70  #: requests of a short and of a long file, with 96 rows each
OF_REQUEST = 1_000  #: bytes that may be kept of a request: where it ends, its name and its place in each layer


def in_pieces(monkeypatch: pytest.MonkeyPatch, characters: int, rows: int) -> None:
    """Let files be read so much at a time, and again instead of being kept."""
    monkeypatch.setattr(text, "PIECE", characters)
    monkeypatch.setattr(table_rows, "KEPT", 0)
    monkeypatch.setattr(table, "ROWS", rows)


def peak(path: Path) -> int:
    """Bytes that reading all requests of a file takes at once; to recognise it takes a megabyte of its start."""
    importer = importers.detect(path)
    tracemalloc.start()
    try:
        for request in importer.read(path, SIZED).requests:
            del request
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def growth(folder: Path, name: str, files: dict[str, Callable[[int], Lines]] = MANY) -> float:
    """Bytes of memory for each request by which a file is longer."""
    short, long = (written(folder, name, count, files) for count in (FEW, MANY_MORE))
    peak(long)  # what is loaded once
    # The lesser of two: a thread of the runner may take memory of its own meanwhile.
    most, least = (min(peak(path), peak(path)) for path in (long, short))
    return (most - least) / (MANY_MORE - FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if at else each for at, each in enumerate(MANY)]
)
def test_memory_does_not_grow_with_the_requests_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1 << 12, 64)
    assert growth(tmp_path, name) < OF_REQUEST


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_a_file_is_read_as_its_requests_are_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_read_as_its_requests_are_taken(name, MANY, tmp_path, monkeypatch)


def is_read_as_its_requests_are_taken(
    name: str, files: dict[str, Callable[[int], Lines]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request comes before the rest is read, few rows are read once, and a file that changes is refused."""
    with monkeypatch.context() as patch:
        in_pieces(patch, 1 << 10, 16)
        comes_before_the_rest_is_read(written(folder, name, FEW, files), patch)
        if name != "marked.log":
            path, other = written(folder, name, FEW, files), written(folder, name, FEW + 1, files)
            requests = importers.read(path, SIZED).requests
            path.write_bytes(other.read_bytes())
            with pytest.raises(TraceError, match="changed while it was read"):
                list(requests)
    if name not in ("marked.log", "route.csv"):
        path = written(folder, name, 2, files)
        requests = importers.read(path, SIZED).requests
        path.write_text("overwritten")
        assert [len(request.chosen) for request in requests] == [TOKENS, TOKENS]


def test_a_file_whose_layers_change_while_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1 << 10, 16)
    path = written(tmp_path, "plain.csv", FEW)
    requests = importers.read(path, SIZED).requests
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    higher = [[request, token, str(7 * int(layer)), *more] for request, token, layer, *more in rows]
    path.write_text("".join(",".join(row) + "\n" for row in [head, *higher]))
    with pytest.raises(TraceError, match="changed while it was read"):
        list(requests)


def comes_before_the_rest_is_read(path: Path, patch: pytest.MonkeyPatch) -> None:
    read, pieces = [0], text.pieces

    def counted(file: Path) -> Iterator[str]:
        for piece in pieces(file):
            read[0] += len(piece)
            yield piece

    patch.setattr(text, "pieces", counted)
    requests = importers.read(path, SIZED).requests
    before, size = read[0], path.stat().st_size
    assert len(next(requests).chosen) == TOKENS
    assert 0 < read[0] - before < size / 2
    assert sum(1 for _ in requests) == FEW - 1
    patch.setattr(text, "pieces", pieces)


@pytest.mark.slow
def test_a_trace_does_not_depend_on_the_pieces_in_which_its_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    does_not_depend_on_pieces(TEXTS, monkeypatch)


def does_not_depend_on_pieces(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {sample.name: imported(sample.path, sample.options)[0].digest for sample in samples}
    for pieces in ((7, 1), (300, 5)):
        in_pieces(monkeypatch, *pieces)
        for sample in samples:
            with case(sample.name, pieces):
                assert imported(sample.path, sample.options)[0].digest == whole[sample.name]


# ---------------------------------------------------------------- what it is made of


@st.composite
def cut(draw: st.DrawFn, rows: int) -> list[slice]:
    """Pieces of so many rows, none empty."""
    edges = sorted({0, rows, *draw(st.lists(st.integers(1, max(rows - 1, 1)), max_size=5))})
    return [slice(first, last) for first, last in pairwise(edges)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.data())
def test_rows_are_grouped_as_plain_loops_group_them(requests: list[int], data: st.DataObject) -> None:
    request, row, ends = np.array(requests), np.arange(len(requests)), Ends()
    pieces = [{"request": request[part], "row": row[part]} for part in data.draw(cut(len(request)))]
    for piece in pieces:
        ends.add(piece["request"])
    found = [(each["request"][0], each["row"].tolist()) for each in by_request(pieces, ends, "a")]
    assert found == [(one, [at for at, each in enumerate(requests) if each == one]) for one in sorted(set(requests))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=40), st.booleans(), st.data())
def test_requests_restart_at_the_same_rows_in_pieces(
    rows: list[tuple[int, int]], repeats: bool, data: st.DataObject
) -> None:
    token, stream = np.array(rows).T
    begun, pieces = Restarts(repeats), data.draw(cut(len(rows)))
    found = np.concatenate([begun.add(token[part], stream[part]) for part in pieces])
    np.testing.assert_array_equal(found, restarts(token, stream, repeats))


LONG = 400_000  #: tokens


def test_a_table_of_one_long_request_is_held_in_few_bytes_a_row(tmp_path: Path) -> None:
    """A table of 20 million tokens took 2.6 GB; here it took 160 bytes a row."""
    import polars as pl

    file, zero = tmp_path / "a.parquet", np.zeros(LONG, np.int64)
    pl.DataFrame({"token": np.arange(LONG), "layer": zero, "experts": zero}).write_parquet(file)
    peak(file)  # what is loaded once
    assert peak(file) / LONG < 100


def test_a_long_request_is_stored_in_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8, (10_000, 2, 1)).astype(np.int16)
    header = Header(geometry=Geometry(layers=2, experts=8, k=1, expert_bytes=(1, 1)))
    write_trace(short := tmp_path / "short.zarr", header, [Request(ids, 3)])
    monkeypatch.setattr(stored, "LONG_REQUEST", len(ids))
    write_trace(long := tmp_path / "long.zarr", header, [Request(ids, 3), Request(ids[:100], 0)])
    assert len([*(short / "chosen").iterdir()]) == 21
    assert len([*(long / "chosen").iterdir()]) == 2
    np.testing.assert_array_equal(open_trace(long).read("chosen", 0, len(ids)), ids)
    verify(open_trace(long))


def test_files_of_a_long_request_have_bounded_bytes() -> None:
    for widest in (2, 2000, 10**9):
        header = Header(geometry=Geometry(layers=2, experts=8, k=1, expert_bytes=(1, 1)))
        found = stored.with_longer_files(stored.Attributes(header=header, shard_tokens=512), 1 << 21, widest)
        assert 512 <= found.shard_tokens <= 65_536 and found.shard_tokens % 512 == 0
        assert found.shard_tokens == 512 or found.shard_tokens * widest <= 1 << 22
