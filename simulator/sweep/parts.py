"""Parts: tables that appear whole or not at all, with the provenance that says what is in them, wherever they are kept.

OUT/part-2f61c0/configurations.parquet  layers.parquet  bounds.parquet  requests.parquet  provenance.json
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.errors import ConfigError

PROVENANCE = "provenance.json"
FILE = re.compile(r"\w+\.parquet")


@dataclass(frozen=True)
class Part:
    """Tables as Parquet files by name, and the identities in them by what they are."""

    files: Mapping[str, bytes]  #: table -> file
    holds: Mapping[str, Sequence[str]]  #: configuration | bound | requests | error -> identities

    @property
    def name(self) -> str:
        """The same content has the same name, so that two writers of one part can do each other no harm."""
        content = json.dumps([self.holds, self._digests()], sort_keys=True)
        return f"part-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def documents(self, provenance: Mapping[str, Any]) -> dict[str, bytes]:
        """Every file of the part by its name, in the order of writing: the provenance, which vouches for it, last."""
        document = {"holds": self.holds, "sha256": self._digests(), **provenance}
        tables = {f"{table}.parquet": data for table, data in self.files.items()}
        return tables | {PROVENANCE: json.dumps(document, indent=1, sort_keys=True).encode()}

    def _digests(self) -> dict[str, str]:
        return {f"{table}.parquet": hashlib.sha256(data).hexdigest() for table, data in self.files.items()}


def parsed(data: bytes, part: object) -> dict[str, Any]:
    """The provenance of a part, which an error names. Raises ConfigError."""
    try:
        provenance = json.loads(data)
        _ = provenance["holds"].items()
        foreign = [name for name in provenance["sha256"] if not FILE.fullmatch(name)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise no_part(part, error) from None
    if foreign:
        raise no_part(part, f"it names a file {foreign[0]!r}")
    return provenance


def no_part(part: object, why: object) -> ConfigError:
    """What lies where a part should be."""
    return ConfigError(f"{part} is no part of a sweep ({why}); remove it and run the sweep again")


def stored(provenances: Iterable[Mapping[str, Any]], requests: bool) -> set[tuple[str, str]]:
    """Keys of the jobs that need not run again; a configuration that ended in an error may."""
    held: dict[str, set[str]] = {"configuration": set(), "bound": set(), "requests": set()}
    for provenance in provenances:
        for what, identities in provenance["holds"].items():
            held.setdefault(what, set()).update(identities)
    configurations = held["configuration"] & held["requests"] if requests else held["configuration"]
    return {("configuration", name) for name in configurations} | {("bound", name) for name in held["bound"]}
