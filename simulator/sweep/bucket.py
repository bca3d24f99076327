"""Parts in an object store: tables first, provenance last. A part without its provenance is half written, so not there.

URL/part-2f61c0/configurations.parquet, layers.parquet, ..., then provenance.json
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from simulator.errors import ConfigError
from simulator.sweep.folder import Folder
from simulator.sweep.objects import Objects, cache_folder
from simulator.sweep.parts import PROVENANCE, Part, parsed

CONNECTIONS = 32  #: objects are small: most of the time of a request is spent waiting
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A place for parts; see `place.Place` for what its methods promise."""

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
        listed = (name.split("/") for name in self.objects.names())
        return sorted(path[0] for path in listed if path[0].startswith("part-") and path[1:] == [PROVENANCE])

    def provenances(self) -> Iterator[dict[str, Any]]:
        """What every part says of itself; no table is read."""
        return _each(self._provenance, self.names())

    def local(self) -> Path:
        """A folder in the user's cache with the parts that are listed now; one that is there is not fetched again."""
        kept = Folder(cache_folder() / "parts" / hashlib.sha256(str(self).encode()).hexdigest()[:16])
        listed, here = set(self.names()), set(kept.names())
        if not listed:
            raise ConfigError(f"no parts in {self}; make some with: moereplay sweep run FILE --out {self}")
        kept.prepare()
        for gone in here - listed:
            shutil.rmtree(kept.path / gone, ignore_errors=True)
        for _ in _each(lambda name: kept.keep(name, self._fetched(name)), sorted(listed - here)):
            pass
        return kept.path

    def beside(self, otherwise: Path) -> Path:
        """Files that are no parts go elsewhere."""
        return otherwise

    def _provenance(self, name: str) -> dict[str, Any]:
        return parsed(self.objects.get(f"{name}/{PROVENANCE}"), f"{self}/{name}")

    def _fetched(self, name: str) -> dict[str, bytes]:
        """Every file of a part. Raises ConfigError if one is not what its provenance says."""
        files = {PROVENANCE: self.objects.get(f"{name}/{PROVENANCE}")}
        for file, digest in parsed(files[PROVENANCE], f"{self}/{name}")["sha256"].items():
            files[file] = self.objects.get(f"{name}/{file}")
            if hashlib.sha256(files[file]).hexdigest() != digest:
                raise ConfigError(f"{self}/{name}/{file} is damaged; remove {self}/{name} and run the sweep again")
        return files


def _each(task: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
    """A task for every name, many at once, in order."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(task, names)
