"""Parts: folders of tables that appear whole or not at all, each with its provenance, and what is already in them.

OUT/part-2f61c0/configurations.parquet  layers.parquet  bounds.parquet  requests.parquet  provenance.json
OUT/tmp/                                what is being written; never read
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.errors import ConfigError

PROVENANCE = "provenance.json"
PARTS = "part-*"
SCRATCH = "tmp"


@dataclass(frozen=True)
class Part:
    """Tables as Parquet files by name, and the identities in them by what they are."""

    files: Mapping[str, bytes]  #: table -> file
    holds: Mapping[str, Sequence[str]]  #: configuration | bound | requests | error -> identities

    @property
    def name(self) -> str:
        """The same content has the same name."""
        return f"part-{hashlib.sha256(json.dumps(self.holds, sort_keys=True).encode()).hexdigest()[:16]}"


def store(out: Path, part: Part, provenance: Mapping[str, Any]) -> None:
    """Write a part: all files synced in a folder of their own, which is then renamed. Raises ConfigError."""
    final = out / part.name
    scratch = out / SCRATCH / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    digests = {f"{table}.parquet": hashlib.sha256(data).hexdigest() for table, data in part.files.items()}
    document = {"holds": part.holds, "sha256": digests, **provenance}
    try:
        scratch.mkdir(parents=True)
        for table, data in part.files.items():
            _write(scratch / f"{table}.parquet", data)
        _write(scratch / PROVENANCE, json.dumps(document, indent=1, sort_keys=True).encode())
        _sync(scratch)
        with suppress(FileExistsError):
            _rename(scratch, final)
        _sync(out)
    except OSError as error:
        raise ConfigError(
            f"cannot write {final}: {error.strerror or error}; what is stored stays, make room and run it again"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def parts(out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every part of a folder with its provenance, in the order of their names. Raises ConfigError for a broken one."""
    for folder in sorted(out.glob(PARTS)):
        try:
            provenance = json.loads((folder / PROVENANCE).read_bytes())
            _ = provenance["holds"], provenance["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder} is no part of a sweep ({error}); remove it and run the sweep again") from None
        yield folder, provenance


def stored(out: Path, requests: bool) -> set[tuple[str, str]]:
    """Keys of the jobs that need not run again; a configuration that ended in an error may."""
    held: dict[str, set[str]] = {"configuration": set(), "bound": set(), "requests": set()}
    for _, provenance in parts(out):
        for what, identities in provenance["holds"].items():
            held.setdefault(what, set()).update(identities)
    configurations = held["configuration"] & held["requests"] if requests else held["configuration"]
    return {("configuration", name) for name in configurations} | {("bound", name) for name in held["bound"]}


def clear_scratch(out: Path) -> None:
    """Remove what killed processes of this host left half written. Raises ConfigError if `out` is not a folder."""
    try:
        (out / SCRATCH).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write into {out}: {error.strerror}; choose another folder") from None
    for left in (out / SCRATCH).glob(f"{socket.gethostname()}-*"):
        if not _is_alive(int(left.name.rsplit("-", 2)[1])):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
