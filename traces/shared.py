"""What replays of one trace in one process share: arrays made once, kept while they are in use and not too many.

Making them costs more than a short replay. They are read-only, named by the trace and by what they are, and forgotten
when a file that they are mapped from is no longer the one that was mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moereplay.traces.schema import Trace

#: Entries of all stored traces together, and of each trace in memory: the least recently used goes. A replay has ten.
MOST = 32
SHARING = RLock()  #: replays of other threads want the same arrays: one makes them

T = TypeVar("T")
Look = tuple[int, ...]


class Mapped(NamedTuple):
    """Files that arrays are mapped from, as they were then."""

    looks: Mapping[str, Look]
    settled: bool  #: whether a later change would show in their times


class Entry(NamedTuple):
    """A shared value, and the files that it stands on."""

    value: Any
    looks: Mapping[str, Look]


_of_stored: dict[Hashable, Entry] = {}
_making: list[list[Mapped]] = []  #: what the values that are being made stand on, the innermost last


def shared(trace: Trace, what: Hashable, make: Callable[[], T]) -> T:
    """The value of that name, made if it is not there or if its files have changed. Raises what `make` does.

    A stored trace is named by its place and its digest; what any other one shares is forgotten when it goes.
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
    """Called while a value is made: it is good for as long as these files look so."""
    if _making:
        _making[-1].append(mapped)


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that nobody writes through: others read the same bytes."""
    view = array.view()
    view.flags.writeable = False
    return view


def look(found: os.stat_result) -> Look:
    """What changes when somebody writes to a file, replaces it, or opens it to others."""
    return found.st_mode, found.st_uid, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _made(entries: dict[Hashable, Entry], key: Hashable, make: Callable[[], Any]) -> Entry:
    """A new entry, kept if a change of its files would be seen."""
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
