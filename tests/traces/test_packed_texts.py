"""Packed and encoded texts: bombs are refused by the bytes read of them, damage and doubts in words."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]

from moereplay.traces.importers import archive, text
from moereplay.traces.importers.archive import FREE, MOST_HELD, Unpacked
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import TraceError
from tests.kit.collecting import case
from tests.kit.importing import imported

ROW = "0,0,0,3\n"
HEAD = "request,token,layer,expert_0\n"
SIZED = Options(expert_bytes=10)
#: What is repeated -> names of files: every suffix, and each content at a reader of lines and of a document.
BOMBS = {
    b"\n": ("bomb.csv", "bomb.json", "bomb.log"),
    b"\r\n": ("bomb.csv", "bomb.jsonl"),
    b"0,0,0,3\n": ("bomb.csv", "bomb.json", "bomb.log"),
    b"[[[[[[[": ("bomb.csv", "bomb.jsonl", "bomb.json"),
}
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Unpacked bytes of every read."""
    counts: list[int] = []
    plain = Unpacked.readinto

    def counted(self: Unpacked, buffer: memoryview) -> int:
        counts.append(plain(self, buffer))
        return counts[-1]

    monkeypatch.setattr(Unpacked, "readinto", counted)
    return counts


def bomb(file: Path, piece: bytes, pieces: int) -> Path:
    """Packed files that follow each other are read as one."""
    file.write_bytes(PACKERS[file.suffix](piece) * pieces)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_bomb_is_refused_after_a_few_bytes(
    suffix: str, tmp_path: Path, read_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FREE // 32  # as shipped, unpacking took a minute
    monkeypatch.setattr(archive, "FREE", free)
    for line, names in BOMBS.items():
        file = bomb(tmp_path / f"a{suffix}", line * (2**20 // len(line)), 5)
        assert 2 * free < 5 * 2**20 > 100 * file.stat().st_size
        for name in names:
            read_bytes.clear()
            with case(name, line), pytest.raises(TraceError):
                imported(file.rename(tmp_path / f"{name}{suffix}"), SIZED)
            assert sum(read_bytes) < 6 * free, (name, line)  # several importers look at it
            file = (tmp_path / f"{name}{suffix}").rename(tmp_path / f"a{suffix}")


def test_blank_lines_are_refused_by_their_number(tmp_path: Path, read_bytes: list[int]) -> None:
    file = bomb(tmp_path / "a.csv.gz", b"\n" * 2**20, 80)
    with pytest.raises(TraceError, match=r"a\.csv\.gz.*65,536 blank lines"):
        list(text.blocks(file))
    assert sum(read_bytes) < FREE // 8


@pytest.mark.parametrize("stated", [True, False], ids=["of a stated size", "of no stated size"])
def test_a_bomb_of_zstd_is_refused_before_it_is_unpacked(
    stated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bytes(zstd.compress(bytes(2 * MOST_HELD)))
    frame = whole if stated else frames_without_sizes(archive.MOST_HELD // archive.ZSTD_BLOCK + 1)
    (tmp_path / "a.csv.zst").write_bytes(frame)
    monkeypatch.setattr(zstd, "decompress", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(TraceError, match=r"a\.csv\.zst.*zstd -d"):
        list(text.pieces(tmp_path / "a.csv.zst"))


def frames_without_sizes(blocks: int) -> bytes:
    """One frame of blocks that repeat a byte, as a stream writes it whose length is not known at its start."""
    repeated = (archive.ZSTD_BLOCK << 3 | 1 << 1).to_bytes(3, "little") + b"\n"
    last = (1 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\n"
    return b"\x28\xb5\x2f\xfd\x00\x58" + repeated * blocks + last


def test_frames_of_zstd_without_sizes_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(frames_without_sizes(2) + bytes(zstd.compress(b"end")))
    assert "".join(text.pieces(tmp_path / "a.txt.zst")) == "\n" * (2 * archive.ZSTD_BLOCK + 1) + "end"


def test_a_zip_of_several_files_is_refused_by_their_names(tmp_path: Path) -> None:
    from tests.traces.test_importer_contract import zipped

    (tmp_path / "a.zip").write_bytes(zipped({"one.csv": b"1", "two.csv": b"2"}))
    with pytest.raises(TraceError, match=r"2 files \(one\.csv, two\.csv\)"):
        list(text.pieces(tmp_path / "a.zip"))


def test_a_zip_is_called_after_the_file_in_it(tmp_path: Path) -> None:
    from tests.traces.test_importer_contract import zipped

    folder = zipped({"out/": b"", "out/routes.csv": (HEAD + ROW).encode(), "__MACOSX/out/._routes.csv": b"x"})
    (tmp_path / "a.zip").write_bytes(folder)
    assert text.suffix_of(tmp_path / "a.zip") == ".csv"
    assert imported(tmp_path / "a.zip", SIZED)[1][0].chosen.tolist() == [[[3]]]


def test_what_is_packed_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(gzip.compress((HEAD + ROW).encode())))
    with pytest.raises(TraceError, match=r"gzip inside gzip"):
        imported(tmp_path / "a.csv.gz", SIZED)


def test_what_is_no_text_is_refused_by_its_encoding(tmp_path: Path) -> None:
    for encoding in ["cp1252", "utf-16", "utf-32"]:
        with case(encoding):
            broken = f"{HEAD}{ROW}é".encode(encoding)
            (tmp_path / "a.csv").write_bytes(broken if encoding == "cp1252" else broken[:-1])
            with pytest.raises(TraceError, match=r"a\.csv.*(UTF-8|UTF-16|UTF-32) text"):
                list(text.pieces(tmp_path / "a.csv"))


def test_a_packed_json_document_is_held_to_the_limit_of_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MOST_JSON", 1000)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[" + b"1," * 2000 + b"1]"))
    with pytest.raises(TraceError, match="1,000 characters"):
        text.read_json(tmp_path / "a.json.gz")


# ---------------------------------------------------------------- Parquet


def tables(folder: Path, rows: dict[str, list[Any]]) -> tuple[Path, Path]:
    """Yield the rows as arrays of numbers, and with a missing note in one row, so that cells are read."""
    plain, mixed = folder / "plain.parquet", folder / "mixed.parquet"
    pl.DataFrame(rows).write_parquet(plain)
    pl.DataFrame(rows).with_columns(pl.col("experts").cast(pl.List(pl.UInt64))).write_parquet(mixed)
    return plain, mixed


def test_numbers_of_parquet_are_read_at_once_and_as_cell_by_cell(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    rows: dict[str, list[Any]] = {
        "request": [9] * 60 + [4] * 60,
        "token": [at // 3 for at in range(60)] * 2,
        "layer": [at % 3 for at in range(120)],
        "experts": [generator.permutation(8)[:2].tolist() for _ in range(120)],
        "weights": [[0.5, 0.25]] * 120,
        "phase": [int(at >= 30) for at in range(60)] * 2,
    }
    plain, mixed = (imported(file, SIZED)[1] for file in tables(tmp_path, rows))
    for one, other in zip(plain, mixed, strict=True):
        assert one.prompt_length == other.prompt_length == 10
        np.testing.assert_array_equal(one.chosen, other.chosen)
        np.testing.assert_array_equal(one.weights, other.weights)
    np.testing.assert_array_equal(plain[0].chosen[0, 1], rows["experts"][61])


def test_a_number_of_parquet_that_is_not_allowed_is_named_with_its_row(tmp_path: Path) -> None:
    for column, value, said in [
        ("layer", -1, "layer -1"),
        ("experts", 40_000, "40000"),
        ("token", 2.5, "token 2.5"),
    ]:
        with case(column, value, said):
            rows: dict[str, list[float]] = {"token": [0, 1, 2], "layer": [0, 0, 0], "experts": [1, 2, 3]}
            rows[column][2] = value
            pl.DataFrame(rows, strict=False).write_parquet(tmp_path / "a.parquet")
            with pytest.raises(TraceError, match=rf"a\.parquet row 3: .*{said}"):
                imported(tmp_path / "a.parquet", SIZED)


def test_millions_of_rows_of_one_place_are_refused_after_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3_000_000
    noise = np.frombuffer(os.urandom(count), np.uint8) % 64
    pl.DataFrame({"token": np.zeros(count, int), "layer": np.zeros(count, int), "experts": noise}).write_parquet(
        tmp_path / "a.parquet"
    )
    decoded: list[int] = []
    plain = pl.LazyFrame.slice
    monkeypatch.setattr(pl.LazyFrame, "slice", lambda self, *at: decoded.append(at[1]) or plain(self, *at))
    with pytest.raises(TraceError, match="rows of token 0 at layer 0"):
        imported(tmp_path / "a.parquet", SIZED)
    assert sum(decoded) < count // 5
