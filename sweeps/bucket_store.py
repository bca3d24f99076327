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

from moereplay.results.parts import PROVENANCE, Part, check_table, parsed
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.folder_store import Folder
from moereplay.sweeps.objects import Objects, cache_folder

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
