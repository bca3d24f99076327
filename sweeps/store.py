"""Where the parts of a sweep are kept: a folder, or a URL of an object store. The text of `--out` decides, here."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from moereplay.results.parts import PARTS, PROVENANCE, Part, StoredPart, check_table, parsed, stored_parts
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.objects import Objects, cache_folder, is_url
from moereplay.traces.files import is_abandoned, refuse_inside_trace, scratch_name


class Place(Protocol):
    """Keeps parts. Its text is the folder or URL. Every method may raise ConfigError naming it; workers get copies."""

    def prepare(self) -> None:
        """To be called once before a run stores anything."""
        ...

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Keep a part: whole or not at all, whatever happens. An equal one that is there already stays equal."""
        ...

    def names(self) -> list[str]:
        """File names of all parts, sorted."""
        ...

    def provenances(self) -> Iterable[Mapping[str, Any]]:
        """What every part says of itself, in the order of their names."""
        ...

    def local(self) -> Path:
        """A folder on this machine that has every part, for reading."""
        ...

    def beside(self, otherwise: Path) -> Path:
        """The folder for files that are no parts (figures, a scheduler's logs): the place's own, if it is one."""
        ...


def place_of(text: str) -> Place:
    """The place that a user names. Raises ConfigError for a store that no other process can see."""
    if text.startswith("memory:"):
        raise ConfigError(f"{text} is gone when the process ends; name a folder or a bucket")
    return Bucket(Objects(text.rstrip("/"))) if is_url(text) else Folder(Path(text).absolute())


# -- Parts in a folder: each is written beside the others, synced, and renamed into place.

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


# -- Parts in an object store: tables first, provenance last. A part without its provenance is half written.

CONNECTIONS = 32  #: objects are small: most of the time of a request is spent waiting
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A place for parts; see `sweeps.store.Place` for what its methods promise."""

    objects: Objects

    def __str__(self) -> str:
        return self.objects.url

    def prepare(self) -> None:
        """Nothing is made or removed: who writes a half-written part again puts the same objects in place of it."""

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Put a part; it is there once its last object is."""
        for file, data in part.documents(provenance).items():
            self.objects.put(f"{part.name}/{file}", data)

    def names(self) -> list[str]:
        """Of all parts that are whole, sorted."""
        return list(self._listed())

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """What every part says of itself; no table is read."""
        listed = self._listed()
        return _each(lambda name: self._provenance(name, listed[name])[0], listed)

    def local(self) -> Path:
        """A folder in the user's cache with the parts that are listed now; one that is there is not fetched again."""
        kept = Folder(cache_folder() / "parts" / hashlib.sha256(str(self).encode()).hexdigest()[:16])
        listed, here = self._listed(), set(kept.names())
        if not listed:
            raise ConfigError(f"no parts in {self}; make some with: moereplay sweep run FILE --out {self}")
        kept.prepare()
        for gone in here - listed.keys():
            shutil.rmtree(kept.path / gone, ignore_errors=True)
        for _ in _each(lambda name: kept.keep(name, self._fetched(name, listed[name])), sorted(listed.keys() - here)):
            pass
        return kept.path

    def beside(self, otherwise: Path) -> Path:
        """Files that are no parts go elsewhere."""
        return otherwise

    def _listed(self) -> dict[str, list[str]]:
        """The files of every part that is whole, parts sorted."""
        found: dict[str, list[str]] = {}
        for part, _, file in sorted(name.partition("/") for name in self.objects.names()):
            if part.startswith("part-") and file:
                found.setdefault(part, []).append(file)
        return {part: files for part, files in found.items() if PROVENANCE in files}

    def _provenance(self, name: str, there: list[str]) -> tuple[dict[str, Any], bytes]:
        """Of a part: parsed, and as it is."""
        data = self.objects.get(f"{name}/{PROVENANCE}")
        return parsed(data, f"{self}/{name}", there), data

    def _fetched(self, name: str, there: list[str]) -> dict[str, bytes]:
        """Every file of a part. Raises ConfigError if one is not what its provenance says."""
        provenance, data = self._provenance(name, there)
        files = {PROVENANCE: data}
        for file in provenance["sha256"]:
            files[file] = self.objects.get(f"{name}/{file}")
            check_table(files[file], file, provenance, f"{self}/{name}")
        return files


def _each(task: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
    """A task for every name, many at once, in order."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(task, names)
