"""Folders whose content is trusted: a real one, this user's, closed to others, and the same for all their processes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moereplay.sweeps.clusters import place
from moereplay.traces.files import claimed, temporary
from tests.kit.every import every

Owned = Callable[[Path], None]


@pytest.fixture
def another_owns(monkeypatch: pytest.MonkeyPatch) -> Owned:
    """Makes a folder look as if another user had made it; only the superuser could make a real one."""
    theirs, stat_of = set(), Path.stat

    def looks(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = stat_of(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:4], os.getuid() + 1, *found[5:])) if path in theirs else found

    monkeypatch.setattr(Path, "stat", looks)
    return theirs.add


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder: everybody's, and sticky."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_foreign(path: Path, another_owns: Owned) -> None:
    path.mkdir(mode=0o700)
    another_owns(path)


def is_a_link(path: Path, another_owns: Owned) -> None:
    """To a folder that would do."""
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def is_a_file(path: Path, another_owns: Owned) -> None:
    path.write_text("")


@pytest.mark.parametrize("made", [is_foreign, is_a_link, is_a_file])
def test_what_is_no_folder_of_this_user_is_refused_and_left_alone(
    made: Callable, tmp_path: Path, another_owns: Owned
) -> None:
    made(tmp_path / "folder", another_owns)
    before = sorted(tmp_path.iterdir()), (tmp_path / "folder").lstat()
    assert not claimed(tmp_path / "folder")
    assert before[0] == sorted(tmp_path.iterdir())
    assert before[1].st_mode == (tmp_path / "folder").lstat().st_mode


@every("bits", [0o777, 0o770, 0o702], apart=True)
def test_a_folder_that_others_could_write_into_is_emptied_and_closed(tmp_path: Path, bits: int) -> None:
    (tmp_path / "folder" / "planted").mkdir(parents=True)
    (tmp_path / "folder").chmod(bits)
    assert claimed(tmp_path / "folder")
    assert mode(tmp_path / "folder") == 0o700
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_folder_that_others_could_only_read_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "folder" / "kept").mkdir(parents=True)
    (tmp_path / "folder").chmod(0o755)
    assert claimed(tmp_path / "folder")
    assert mode(tmp_path / "folder") == 0o700
    assert (tmp_path / "folder" / "kept").is_dir()


def test_a_parent_in_which_others_could_put_another_folder_is_closed_or_refused(
    tmp_path: Path, another_owns: Owned
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for parent in (ours, theirs):
        parent.mkdir()
    ours.chmod(0o775)
    another_owns(theirs)
    assert claimed(ours / "folder")
    assert mode(ours) == 0o755
    assert not claimed(theirs / "folder")


def test_every_process_finds_the_same_temporary_folder(tmp: Path) -> None:
    assert temporary() == temporary() == tmp / f"moereplay-{os.getuid()}"
    assert mode(temporary()) == 0o700


@pytest.mark.parametrize("made", [is_foreign, is_a_link, is_a_file])
def test_they_do_even_where_somebody_else_has_taken_its_name(made: Callable, tmp: Path, another_owns: Owned) -> None:
    made(tmp / f"moereplay-{os.getuid()}", another_owns)
    is_foreign(tmp / f"moereplay-{os.getuid()}-a", another_owns)
    first = temporary()
    assert temporary() == first
    assert first.stat().st_uid == os.getuid()
    assert mode(first) == 0o700


def test_a_ray_worker_reads_no_trace_that_somebody_else_has_put_there(tmp: Path, another_owns: Owned) -> None:
    planted = tmp / f"moereplay-{os.getuid()}" / "digest" / "name.zarr"
    planted.mkdir(parents=True)
    another_owns(tmp / f"moereplay-{os.getuid()}")
    placed = place({"zarr.json": np.frombuffer(b"{}", np.uint8)}, "name.zarr", "digest")
    assert placed != planted
    assert (placed / "zarr.json").read_bytes() == b"{}"
    assert mode(placed.parents[1]) == 0o700


def test_where_nobody_owns_files_the_users_own_folders_are_taken(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, whose modes say nothing either."""
    (tmp / "moereplay").mkdir()
    (tmp / "moereplay" / "kept").write_text("")
    (tmp / "moereplay").chmod(0o777)
    monkeypatch.delattr(os, "getuid")
    assert temporary() == tmp / "moereplay"
    assert (tmp / "moereplay" / "kept").exists()
