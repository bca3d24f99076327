"""Packed experts on disk: read again, made anew where damaged, never half there, and other versions' never used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moereplay.tracegen.precision import contract
from moereplay.tracegen.precision.affine import pack
from moereplay.tracegen.precision.contract import Packed, path_of, stored
from tests.kit.every import every

WEIGHT = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
KEY = {"checkpoint": "ab", "site": 0, "expert": 1, "parameter": "down_proj", "quantiser": "hqq 1.0", "bits": 4}


class Made:
    """Packs, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Packed:
        self.times += 1
        return pack(WEIGHT, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def file() -> Path:
    """Write and return the file of KEY."""
    stored(KEY, (4, 128), 4, Made())
    path = path_of(KEY)
    assert path is not None
    return path


def equal(one: Packed, other: Packed) -> bool:
    same = all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    return same and one.tensors.keys() == other.tensors.keys() and (one.shape, one.bits) == (other.shape, other.bits)


def test_what_was_packed_once_is_read(file: Path) -> None:
    made = Made()
    assert equal(stored(KEY, (4, 128), 4, made), pack(WEIGHT, 4))
    assert made.times == 0
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@every("name", KEY)
def test_another_key_is_another_file(file: Path, name: str) -> None:
    # of another version of the library, say
    made, other = Made(), KEY | {name: "another"}
    stored(other, (4, 128), 4, made)
    assert made.times == 1
    assert path_of(other) != file


@every(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + b"0",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    ],
)
def test_a_damaged_file_is_made_anew(
    file: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    whole, made = file.read_bytes(), Made()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert equal(stored(KEY, (4, 128), 4, made), pack(WEIGHT, 4))
    assert made.times == 1
    assert file.read_bytes() == whole
    assert "is damaged; it is made anew" in caplog.text


def test_a_process_that_ends_while_it_writes_leaves_nothing_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(scratch: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        stored(KEY, (4, 128), 4, Made())
    made, path = Made(), path_of(KEY)
    assert path is not None and not path.exists()
    assert equal(stored(KEY, (4, 128), 4, made), pack(WEIGHT, 4))
    assert (made.times, path.exists()) == (1, True)


def test_a_full_disk_keeps_nothing_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(contract, "write_whole", full)
    made = Made()
    for _ in range(2):
        assert equal(stored(KEY, (4, 128), 4, made), pack(WEIGHT, 4))
    assert made.times == 2


def test_a_user_without_a_place_for_it_packs_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Path:
        raise OSError

    monkeypatch.setattr(contract, "private_folder", nowhere)
    made = Made()
    stored(KEY, (4, 128), 4, made)
    stored(KEY, (4, 128), 4, made)
    assert made.times == 2


def test_others_cannot_read_it(cache: Path, file: Path) -> None:
    assert (cache / "moereplay" / "packed-experts").stat().st_mode & 0o077 == 0
    assert file.is_file()
