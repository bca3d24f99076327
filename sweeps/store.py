"""Store the parts of a sweep in a folder, or below a URL of an object store, whichever `--out` names; fetch traces."""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from moereplay.results.parts import PARTS, PROVENANCE, Part, StoredPart, check_table, parsed, stored_parts
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import extra
from moereplay.traces.files import is_abandoned, refuse_inside_trace, scratch_name, temporary, user_cache
from moereplay.traces.texts import without_password

#: A mistyped address fails within seconds; computed results are worth waiting minutes for the network.
FETCHES = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
STORES = {"max_retries": 12, "retry_timeout": timedelta(minutes=5)}
#: Environment variables that obstore reads.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT_URL where it is not Amazon's)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
#: Without credentials obstore requests a token from the cloud machine that it runs on.
REFUSED = ("latest/api/token", "token request", "401 Unauthorized", "403 Forbidden", "must be specified", "Missing ")
MISSING = ("404 Not Found", "No such file or directory")


def is_url(text: str) -> bool:
    """Return whether a text is a URL."""
    return "://" in text


@dataclass(frozen=True)
class Objects:
    """Objects below a URL without a trailing slash. Every method raises ConfigError naming the URL."""

    url: str

    def names(self) -> list[str]:
        """List the names of all objects, relative to the URL."""
        with _translated("fetch", self.url):
            pages = extra("remote", "obstore").list(_opened(self.url, fetching=True))
            return [found["path"] for page in pages for found in page]

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        with _translated("fetch", f"{self.url}/{name}"):
            return bytes(extra("remote", "obstore").get(_opened(self.url, fetching=True), name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object atomically."""
        with _translated("store", f"{self.url}/{name}"):
            extra("remote", "obstore").put(_opened(self.url, fetching=False), name, data)


@cache
def _opened(url: str, fetching: bool) -> Any:
    """Open a pool of connections, one per process."""
    return extra("remote", "obstore.store").from_url(url, retry_config=FETCHES if fetching else STORES)


@contextmanager
def _translated(doing: str, url: str) -> Iterator[None]:
    """Convert obstore's errors to a ConfigError of one line with advice."""
    try:
        yield
    except (OSError, ValueError, extra("remote", "obstore.exceptions").BaseError) as error:
        said = f"cannot {doing} {url}: {_summary(str(error))}; {_advice(url, str(error))}"
        raise ConfigError(without_password(said)) from None


def _summary(text: str) -> str:
    """Return the failed request and the response from an error's first line, with the code of its XML body."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = text.splitlines()[0].rpartition("Error performing ")[2].partition(": <")[0]
    return line + (f" ({code[1]})" if code else "")


def _advice(url: str, message: str) -> str:
    credentials = CREDENTIALS.get(url.partition("://")[0], "the store's credentials")
    if any(sign in message for sign in REFUSED):
        return f"set {credentials} in the environment"
    if any(sign in message for sign in MISSING):
        return "make that bucket or folder first, or correct its name"
    return f"check the address, the network and, in the environment, {credentials}"


# -- Traces in object stores


def fetched(url: str) -> Path:
    """Fetch the trace at a URL into the user's cache, unless it is cached, and return its folder.

    Traces in a store are assumed immutable: remove the folder to fetch one again. Raises ConfigError.
    """
    name = url.partition("://")[2].partition("?")[0].rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        said = without_password(url)
        raise ConfigError(f"invalid trace URL {said!r}: expected an address such as s3://bucket/NAME.zarr")
    final = (user_cache() or temporary()) / "fetched" / sha256(url.encode()).hexdigest()[:16] / name
    if final.exists():
        return final
    scratch = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        _download(Objects(url.rstrip("/")), scratch)
        with suppress(OSError):  # another process was first
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _download(objects: Objects, folder: Path) -> None:
    """Download every object below the URL. Raises ConfigError if there is none, or on an I/O error."""
    address = without_password(objects.url)
    for name in objects.names():
        target = folder / name
        if ".." in target.parts or not target.is_relative_to(folder):
            raise ConfigError(
                f"cannot fetch {address}: invalid path {name!r}: expected a file in the trace; check the address"
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(objects.get(name))
        except OSError as error:
            raise ConfigError(f"cannot fetch {address}: {error}; make room") from None
    if not folder.exists():
        raise ConfigError(f"nothing found at {address}; check the address")


# -- Result stores


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
        return without_password(self.objects.url)

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
        name = sha256(self.objects.url.encode()).hexdigest()[:16]
        kept = Folder((user_cache() or temporary()) / "parts" / name)
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
