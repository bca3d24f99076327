"""Parts in a folder: each is written beside the others, synced, and renamed into place.

OUT/part-2f61c0/    a part
OUT/tmp/            what is being written; never read
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moereplay.results.parts import PARTS, PROVENANCE, Part, StoredPart, stored_parts
from moereplay.simulator.errors import ConfigError
from moereplay.traces.files import is_abandoned, refuse_inside_trace, scratch_name

SCRATCH = "tmp"
TRIES = 100  #: at making a folder in it


@dataclass(frozen=True)
class Folder:
    """A place for parts; see `sweeps.store.Place` for what its methods promise."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self) -> None:
        """Make the folder, and remove what killed processes of this host left half written in it."""
        try:
            refuse_inside_trace(self.path / SCRATCH)
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {self}: {error.strerror}; choose another folder") from None
        for left in (self.path / SCRATCH).glob("*"):
            if is_abandoned(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Write a part, whole or not at all."""
        self.keep(part.name, part.documents(provenance))

    def keep(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write a part of this name: all files synced in a folder of their own, which is then renamed."""
        final = self.path / name
        scratch = self.path / SCRATCH / scratch_name()
        try:
            _make(scratch)
            for file, data in files.items():
                _write(scratch / file, data)
            _sync(scratch)
            with suppress(FileExistsError):
                _rename(scratch, final)
            _sync(self.path)
        except OSError as error:
            raise ConfigError(
                f"cannot write {final}: {error.strerror or error}; what is stored stays, make room and run it again"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):  # others may be writing
                scratch.parent.rmdir()

    def names(self) -> list[str]:
        """File names of all parts, sorted."""
        return sorted(path.name for path in self.path.glob(PARTS))

    def parts(self) -> Iterator[StoredPart]:
        """Every part, in the order of their names. Raises PartError for a broken one."""
        return stored_parts(self.path)

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """What every part says of itself, its files read and held to it. Raises PartError for a damaged part."""
        for part in self.parts():
            part.check()
            yield part.provenance

    def local(self) -> Path:
        """The folder itself."""
        return self.path

    def beside(self, otherwise: Path) -> Path:
        """The folder itself."""
        return self.path


def _make(scratch: Path) -> None:
    """Again if another process, which is done, removes the folder above at this moment."""
    for attempt in range(TRIES):
        try:
            scratch.mkdir(parents=True)
        except FileNotFoundError:
            if attempt == TRIES - 1:
                raise
        else:
            return


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _rename(scratch: Path, final: Path) -> None:
    """Raises FileExistsError where an equal part is already."""
    try:
        scratch.rename(final)
    except OSError:
        if (final / PROVENANCE).exists():
            raise FileExistsError(final) from None
        raise


def _sync(folder: Path) -> None:
    """A rename is on disk once its folder is."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
