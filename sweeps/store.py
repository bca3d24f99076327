"""Where the parts of a sweep are kept: a folder, or a URL of an object store. The text of `--out` decides, here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from moereplay.results.parts import Part
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.bucket_store import Bucket
from moereplay.sweeps.folder_store import Folder
from moereplay.sweeps.objects import Objects, is_url


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
