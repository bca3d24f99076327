"""Files of trace events, the JSON that ui.perfetto.dev and chrome://tracing open: written as they come, times exact."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from moereplay.results.errors import ResultError
from moereplay.results.result import Row
from moereplay.traces.documents import json_text
from moereplay.traces.files import whole_file

SUFFIXES = (".json", ".json.gz")
PROCESS = 1  #: all tracks are of one process
NS_PER_US = 1000


class Track(NamedTuple):
    """A row of the viewer, ordered by number; it is declared before its events."""

    number: int
    name: str


class Slice(NamedTuple):
    """Something that takes from t0 to t1, in ns."""

    track: int
    name: str
    t0: int
    t1: int
    args: Row


class Instant(NamedTuple):
    """Something that takes no time, at t in ns."""

    track: int
    name: str
    t: int
    args: Row


class Level(NamedTuple):
    """The values of a counter from t on, in ns."""

    name: str
    t: int
    values: Mapping[str, int]


class Writable(Protocol):
    """A writable binary file, compressed or not."""

    def write(self, data: bytes, /) -> int:
        """Write bytes and return their number."""
        ...


Item = Track | Slice | Instant | Level


def check_name(path: Path) -> None:
    """Raises ResultError for a file of another format."""
    if not path.name.endswith(SUFFIXES):
        raise ResultError(f"invalid --out {path}: expected a name that ends in {' or '.join(SUFFIXES)}")


def write_items(path: Path, process: str, about: Row, items: Iterable[Item]) -> int:
    """Write a file, compressed if its name ends in .gz; the same items give the same bytes. Returns how many.

    `process` is the title above all tracks, `about` the file's `otherData`. What `items` raises leaves no file.
    Raises ResultError if the file cannot be written.
    """
    try:
        with whole_file(path) as file, _packed(path, file) as out:
            return _write(out, process, about, items)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; nothing was written") from None


@contextmanager
def _packed(path: Path, file: BinaryIO) -> Iterator[Writable]:
    """Compress without the time of writing and without the name."""
    if path.suffix == ".gz":
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed
    else:
        yield file


def _write(out: Writable, process: str, about: Row, items: Iterable[Item]) -> int:
    count, head = 0, json_text({"displayTimeUnit": "ns", "otherData": about})
    out.write(f'{head[:-1]}, "traceEvents": [\n{_named("process_name", 0, process)}'.encode())
    for item in items:
        out.write(f",\n{_line(item)}".encode())
        count += 1
    out.write(b"\n]}\n")
    return count


def _line(item: Item) -> str:
    if isinstance(item, Slice):
        times = f'"ts":{_us(item.t0)},"dur":{_us(item.t1 - item.t0)}'
        return f'{{"ph":"X",{_place(item.track)},{times},{_said(item.name, item.args)}}}'
    if isinstance(item, Instant):
        return f'{{"ph":"i","s":"t",{_place(item.track)},"ts":{_us(item.t)},{_said(item.name, item.args)}}}'
    if isinstance(item, Level):
        return f'{{"ph":"C","pid":{PROCESS},"ts":{_us(item.t)},{_said(item.name, item.values)}}}'
    order = f'{{"ph":"M",{_place(item.number)},"name":"thread_sort_index","args":{{"sort_index":{item.number}}}}}'
    return f"{_named('thread_name', item.number, item.name)},\n{order}"


def _named(what: str, track: int, name: str) -> str:
    return f'{{"ph":"M",{_place(track)},"name":"{what}","args":{{"name":{json_text(name)}}}}}'


def _place(track: int) -> str:
    return f'"pid":{PROCESS},"tid":{track}'


def _said(name: str, args: Mapping[str, object]) -> str:
    return f'"name":{json_text(name)},"args":{json_text(args, separators=(",", ":"))}'


def _us(ns: int) -> str:
    """Return microseconds, all digits: no float between."""
    whole, rest = divmod(ns, NS_PER_US)
    return f"{whole}.{rest:03d}" if rest else str(whole)
