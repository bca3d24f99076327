"""Store the parts of a sweep in a folder, or below a URL of an object store, whichever `--out` names."""

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
    """Interface of a result store; workers get copies. Methods may raise ConfigError naming `str()` of the store."""

    def prepare(self) -> None:
        """Prepare the store, once before a run stores anything."""
        ...

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Store a part atomically, even if the process is killed. Storing an equal part again changes nothing."""
        ...

    def names(self) -> list[str]:
        """Return the file names of all parts, sorted."""
        ...

    def provenances(self) -> Iterable[Mapping[str, Any]]:
        """Read the provenance of every part, in the order of their names."""
        ...

    def local(self) -> Path:
        """Return a folder on this machine that holds every part, for reading."""
        ...

    def beside(self, otherwise: Path) -> Path:
        """Return the folder for other files (figures, a scheduler's logs): the store itself, if it is local."""
        ...


def place_of(text: str) -> Place:
    """Return the store that a user names. Raises ConfigError for a store that no other process can see."""
    if text.startswith("memory:"):
        raise ConfigError(f"in-memory stores are not persistent ({text}); use a folder or a bucket URL")
    return Bucket(Objects(text.rstrip("/"))) if is_url(text) else Folder(Path(text).absolute())


# -- Parts in a folder: each is written to a scratch folder, synced, and renamed into place.

SCRATCH = "tmp"
TRIES = 100  #: attempts to create a scratch folder


@dataclass(frozen=True)
class Folder:
    """Result store; `Place` documents the methods."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def prepare(self) -> None:
        """Create the folder, and remove scratch folders of killed processes of this host."""
        try:
            refuse_inside_trace(self.path / SCRATCH)
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {self}: {error.strerror}; choose another folder") from None
        for left in (self.path / SCRATCH).glob("*"):
            if is_abandoned(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Write a part atomically."""
        self.keep(part.name, part.documents(provenance))

    def keep(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write a part of this name: sync all files in a scratch folder, then rename it."""
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
                f"cannot write {final}: {error.strerror or error}; stored results are kept; free disk space "
                f"and run it again"
            ) from None
        finally:
            try:
                _clear(scratch)
            except KeyboardInterrupt:  # Ctrl-C during the write
                _clear(scratch)
                raise

    def names(self) -> list[str]:
        """Return the file names of all parts, sorted."""
        return sorted(path.name for path in self.path.glob(PARTS))

    def parts(self) -> Iterator[StoredPart]:
        """Yield every part, in the order of their names. Raises PartError for a broken one."""
        return stored_parts(self.path)

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """Yield the provenance of every part, after checking its files. Raises PartError for a damaged part."""
        for part in self.parts():
            part.check()
            yield part.provenance

    def local(self) -> Path:
        """Return the local path of the store."""
        return self.path

    def beside(self, otherwise: Path) -> Path:
        """Return the store itself, which is a folder."""
        return self.path


def _clear(scratch: Path) -> None:
    """Remove a scratch folder, and its parent unless others are writing there."""
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):
        scratch.parent.rmdir()


def _make(scratch: Path) -> None:
    """Create a scratch folder; retry if a finishing process removes its parent at this moment."""
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
    """Rename a scratch folder. Raises FileExistsError if an equal part exists."""
    try:
        scratch.rename(final)
    except OSError:
        if (final / PROVENANCE).exists():
            raise FileExistsError(final) from None
        raise


def _sync(folder: Path) -> None:
    """Sync a folder, so that a rename in it is on disk."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- Parts in an object store: tables first, provenance last. A part without its provenance is half written.

CONNECTIONS = 32  #: objects are small, so requests mostly wait
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Result store; `Place` documents the methods."""

    objects: Objects

    def __str__(self) -> str:
        return self.objects.url

    def prepare(self) -> None:
        """Do nothing: writing a half-written part again replaces it with the same objects."""

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        """Store a part; it exists once its last object, the provenance, does."""
        for file, data in part.documents(provenance).items():
            self.objects.put(f"{part.name}/{file}", data)

    def names(self) -> list[str]:
        """Return the names of all complete parts, sorted."""
        return list(self._listed())

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """Read the provenance of every part, without its tables."""
        listed = self._listed()
        return _each(lambda name: self._provenance(name, listed[name])[0], listed)

    def local(self) -> Path:
        """Return a folder in the user's cache with the parts listed now; cached parts are not fetched again."""
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
        """Return the other folder: a bucket holds parts only."""
        return otherwise

    def _listed(self) -> dict[str, list[str]]:
        """Return the files of every complete part, parts sorted."""
        found: dict[str, list[str]] = {}
        for part, _, file in sorted(name.partition("/") for name in self.objects.names()):
            if part.startswith("part-") and file:
                found.setdefault(part, []).append(file)
        return {part: files for part, files in found.items() if PROVENANCE in files}

    def _provenance(self, name: str, there: list[str]) -> tuple[dict[str, Any], bytes]:
        """Return the provenance of a part, parsed and as bytes."""
        data = self.objects.get(f"{name}/{PROVENANCE}")
        return parsed(data, f"{self}/{name}", there), data

    def _fetched(self, name: str, there: list[str]) -> dict[str, bytes]:
        """Fetch every file of a part. Raises ConfigError if one does not match its provenance."""
        provenance, data = self._provenance(name, there)
        files = {PROVENANCE: data}
        for file in provenance["sha256"]:
            files[file] = self.objects.get(f"{name}/{file}")
            check_table(files[file], file, provenance, f"{self}/{name}")
        return files


def _each(task: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
    """Run a task for every name, many at once, and yield results in order."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(task, names)
