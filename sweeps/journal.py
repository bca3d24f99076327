"""The journal of a search: a line per round of trials, there whole or not at all, for one process at a time.

{"search": "3f2a...", "trials": [{"params": {"0 capacity": 0.25}, "values": [41.2, 0.97]}, ...], "sha256": "..."}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import json_text
from moereplay.traces.lock import lock, open_in_place
from moereplay.traces.schema import canonical

BINARY = getattr(os, "O_BINARY", 0)  # Windows would end lines in two characters


class Drawn(NamedTuple):
    """A finished trial: what the sampler drew, and what came of it."""

    params: Mapping[str, Any]  #: as the sampler drew them
    values: Sequence[float] | None  #: of the objectives; None if it failed


Round = Sequence[Drawn]  #: trials that were drawn together


class Journal:
    """The rounds of every search that keeps its journal in this file."""

    def __init__(self, path: Path, handle: int) -> None:
        """Not for callers: `open_journal`."""
        self._path, self._handle = path, handle
        self._lines = [_parsed(line, number, path) for number, line in enumerate(self._whole_lines(), 1)]

    def rounds(self, search: str) -> list[Round]:
        """Those of one search, in order."""
        return [[Drawn(**each) for each in line["trials"]] for line in self._lines if line["search"] == search]

    def append(self, search: str, trials: Round) -> None:
        """Keep a round. Raises ConfigError if the disk refuses, with the file as it was."""
        line: dict[str, Any] = {"search": search, "trials": [each._asdict() for each in trials]}
        data = json_text(line | {"sha256": _digest(line)}).encode() + b"\n"
        end = os.lseek(self._handle, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, end)
            reason = f"{error.strerror or error}; what is stored stays, make room and run it again"
            raise ConfigError(f"cannot write {self._path}: {reason}") from None

    def _whole_lines(self) -> list[bytes]:
        """A last one without an end is what a killed process was writing: it goes."""
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._handle, whole)
        return data[:whole].split(b"\n")[:-1]


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """The journal of that name, made if need be. Raises ConfigError if it is damaged, in use, or cannot be written."""
    try:
        handle = open_in_place(path, os.O_APPEND | BINARY)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    try:
        _hold(handle, path)
        yield Journal(path, handle)
    finally:
        os.close(handle)


def _hold(handle: int, path: Path) -> None:
    """Until the file is closed, or the process is gone. Raises ConfigError if another process has it."""
    try:
        lock(handle)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another search; wait for it, or choose another --out") from None


def _parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(line)
        digest = found.pop("sha256")
        whole = digest == _digest(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole, found = False, {}
    if not whole:
        raise ConfigError(
            f"{path}: line {number} is damaged or of an earlier version; remove the file to search from the beginning"
        )
    return found


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(line)).hexdigest()
