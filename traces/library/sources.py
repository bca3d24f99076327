"""Where a library lies: the traces that come with the program, a folder, or a data set of the Hugging Face hub."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from moereplay.traces.bundled import SAMPLE, bundled
from moereplay.traces.documents import content
from moereplay.traces.frozen import first_fault
from moereplay.traces.library.index import INDEX, MOST_BYTES, Entry, Index, described, folder_of, read_index
from moereplay.traces.schema import TraceError, shown
from moereplay.traces.store import open_trace

HUB = "hf://datasets/"
IDENTITY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
OUR_LICENCE = "Apache-2.0"


class Library(Protocol):
    """What `list` and `get` read."""

    @property
    def where(self) -> str:
        """As it is typed."""
        ...

    def index(self) -> Index:
        """What it holds. Raises TraceError."""
        ...

    def folder(self, entry: Entry) -> Path:
        """The files of a trace, fetched if they are far. Raises TraceError."""
        ...


def library_of(source: str | None) -> Library:
    """By its address. Raises TraceError for none."""
    if source is None:
        return Folder(bundled(Path(SAMPLE)).parent, "the bundled library", OUR_LICENCE)
    if Path(source).is_dir():
        return Folder(Path(source), source)
    identity = source.removeprefix(HUB)
    if IDENTITY.fullmatch(identity):
        return Hub(identity)
    raise TraceError(f"{shown(source)} is no folder; give a folder, or a data set of the hub as owner/name")


class Folder:
    """On a disk; one without an index holds its `NAME.zarr` folders."""

    def __init__(self, path: Path, where: str, licence: str = "") -> None:
        self.where = where
        self._path, self._licence = path, licence

    def index(self) -> Index:
        """Raises TraceError for an index that is damaged, or a trace that is."""
        file = self._path / INDEX
        if file.exists():
            return read_index(_read(file), self.where)
        found = sorted(self._path.glob("*.zarr"))
        try:
            return Index(traces=tuple(described(open_trace(path), path.stem, self._licence) for path in found))
        except ValidationError as wrong:
            fix = "a library has folders of plain names alone; rename it"
            raise TraceError(f"{self.where}: {first_fault(wrong)}; {fix}") from None

    def folder(self, entry: Entry) -> Path:
        """Where the trace lies."""
        return self._path / folder_of(entry.name)


class Hub:
    """A data set of the Hugging Face hub; what is fetched stays in that library's cache."""

    def __init__(self, identity: str) -> None:
        """Raises TraceError where the hub's package is missing."""
        if not find_spec("huggingface_hub"):
            fix = "pip install huggingface_hub, or download the data set and give its folder"
            raise TraceError(f"{identity} is no folder here, and a data set of the hub needs huggingface_hub: {fix}")
        self.where = f"{HUB}{identity}"
        self._identity = identity

    def index(self) -> Index:
        """Raises TraceError."""
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        disable_progress_bars()
        try:
            return read_index(_read(self._fetched([INDEX]) / INDEX), self.where)
        finally:
            enable_progress_bars()

    def folder(self, entry: Entry) -> Path:
        """All files of the trace, fetched side by side. Raises TraceError."""
        return self._fetched([f"{folder_of(entry.name)}/*"]) / folder_of(entry.name)

    def _fetched(self, patterns: list[str]) -> Path:
        from huggingface_hub import errors, snapshot_download

        try:
            return Path(snapshot_download(self._identity, repo_type="dataset", allow_patterns=patterns))
        except errors.GatedRepoError:
            raise TraceError(
                f"{self.where} is gated: accept its terms on huggingface.co, then `hf auth login`"
            ) from None
        except errors.RepositoryNotFoundError:
            raise TraceError(f"{self._identity} is no folder here and no data set of the hub (or private)") from None
        except errors.LocalEntryNotFoundError:
            fix = f"download it on a connected machine (hf download {self._identity} --repo-type dataset)"
            raise TraceError(f"{self.where}: the hub cannot be reached; {fix}, and give its folder") from None
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as refused:
            raise TraceError(f"{self.where}: the hub says: {shown(' '.join(str(refused).split()), 200)}") from None


def _read(file: Path) -> bytes:
    try:
        return content(file, MOST_BYTES)
    except OSError as wrong:
        raise TraceError(f"{file}: {wrong.strerror}; expected the index of a library of traces") from None
