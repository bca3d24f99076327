"""In-process cache of arrays that replays of one trace share: making them takes longer than a short replay.

Values are read-only. They are keyed by the trace and a name, evicted least recently used first, and dropped when a file
that they are mapped from has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moereplay.traces.schema import Trace

MOST = 32  #: entries of all stored traces together, and of each trace in memory; a replay uses ten
SHARING = RLock()  #: replays in several threads need the same arrays: one thread makes them

T = TypeVar("T")
Look = tuple[int, ...]


class Mapped(NamedTuple):
    """Files that arrays are mapped from, with their state at that time."""

    looks: Mapping[str, Look]
    settled: bool  #: whether a later change would show in their times


class Entry(NamedTuple):
    """A shared value and the files it depends on."""

    value: Any
    looks: Mapping[str, Look]


_of_stored: dict[Hashable, Entry] = {}
_making: list[list[Mapped]] = []  #: dependencies of the values being made, the innermost last


def shared(trace: Trace, what: Hashable, make: Callable[[], T]) -> T:
    """Return the value named `what`; call `make` if there is none, or if its files have changed.

    Values of a stored trace are keyed by path and digest. Those of another trace live as long as the trace object.
    """
    stored = trace.path is not None and trace.complete
    entries, key = (_of_stored, (str(trace.path), trace.digest, what)) if stored else (trace.shared, what)
    with SHARING:
        entry = entries.get(key)
        if entry is None or not _is_current(entry):
            entry = _made(entries, key, make)
        else:
            entries[key] = entries.pop(key)  # now the most recently used
            stands_on(Mapped(entry.looks, settled=True))
        return entry.value


def stands_on(mapped: Mapped) -> None:
    """Declare, while a value is computed, that it depends on these files."""
    if _making:
        _making[-1].append(mapped)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view, because other replays read the same bytes."""
    view = array.view()
    view.flags.writeable = False
    return view


def look(found: os.stat_result) -> Look:
    """Return what changes when a file is written to, replaced, or made accessible to others."""
    return found.st_mode, found.st_uid, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _made(entries: dict[Hashable, Entry], key: Hashable, make: Callable[[], Any]) -> Entry:
    """Make a value, and keep it if a later change of its files can be noticed."""
    _making.append([])
    try:
        value = make()
    finally:
        mapped = _making.pop()
    files = Mapped({path: then for each in mapped for path, then in each.looks.items()}, all(m.settled for m in mapped))
    stands_on(files)
    entry = Entry(value, files.looks)
    entries.pop(key, None)
    if files.settled:
        entries[key] = entry
    while len(entries) > MOST:
        del entries[next(iter(entries))]
    return entry


def _is_current(entry: Entry) -> bool:
    try:
        return all(look(os.lstat(path)) == then for path, then in entry.looks.items())
    except OSError:
        return False
