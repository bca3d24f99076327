"""Check the files of a foreign trace: whether they are readable, their kind, which are missing, and their hash.

A file in a format that no importer reads is rejected with advice. A folder is complete if
its file names confirm it: `train-00001-of-00002.parquet` gives the number of files, and a partial set is rejected.
Plain numbers (`part-3.csv`, `layer7.npz`) do not give the total: a gap between the first and the last is reported.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moereplay.traces.importers.archive import Unpacked, names_in_zip
from moereplay.traces.importers.text import refuse_bomb, suffix_of
from moereplay.traces.schema import TraceError, shown

PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".joblib"}
PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
TORCH_SUFFIXES = (".pt", ".pth")
TORCH_DOCUMENT = "/data.pkl"  #: how the name of the pickle in a torch archive ends, which `torch_file.py` reads as data
OLD_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  #: a pickled number with which files before torch 1.6 begin


DATA = (".npz", ".npy", ".json", ".jsonl", ".csv", ".tsv", ".parquet", *TORCH_SUFFIXES)  #: checked in folders


def files_of(path: Path, suffix: str) -> list[Path]:
    """Return the file itself, or the files with that suffix directly in a folder, by name; empty if there are none."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if suffix_of(file) == suffix and file.is_file())
    return [path] if suffix_of(path) == suffix and path.is_file() else []


def refuse_unreadable(path: Path) -> None:
    """Raises TraceError for what no importer can read: nothing there, empty, pickled, or a truncated archive."""
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; pass the path of a trace to import")
    if not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: a pipe or a device: expected a file or a folder")
    if path.is_dir() and not any(path.iterdir()):
        raise TraceError(f"{path}: the folder is empty: expected the files of a trace")
    places = (path, path / "data") if path.is_dir() else ()
    for file in [file for place in places for suffix in DATA for file in files_of(place, suffix)] if places else [path]:
        _refuse_file(file)


def _refuse_file(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(len(OLD_TORCH))
    if not start:
        raise TraceError(f"{file}: the file is empty: expected a trace; download or record it again")
    refuse_known(file)
    if suffix_of(file) in (".json", ".jsonl"):
        refuse_bomb(file)
    names = names_in_zip(file)
    if file.suffix in TORCH_SUFFIXES and any(name.endswith(TORCH_DOCUMENT) for name in names or ()):
        return
    if start == OLD_TORCH:
        raise TraceError(
            f"{file}: a torch file from before torch 1.6; load it with torch.load and save it again with torch.save"
        )
    if (
        file.suffix in PICKLE_SUFFIXES
        or start.startswith(PICKLE_STARTS)
        or any(name.endswith(".pkl") for name in names or ())
    ):
        cut = " (or a truncated torch archive)" if start.startswith(b"PK") else ""
        raise TraceError(f"{file}: pickled data{cut} can run code and is never loaded; convert it to npz or jsonl")
    if file.suffix == ".npz" and names is None:
        raise TraceError(f"{file}: truncated or not an npz archive; download or record it again")


# ---------------------------------------------------------------- formats by their first bytes

LOOKED_AT = 1 << 10  #: bytes
TAR_AT = 257  #: where a tar archive has its magic number


class Kind(NamedTuple):
    """A format, its first bytes, and what to do with it; `suffixes` of files that importers read."""

    name: str
    starts: tuple[bytes, ...]
    fix: str
    suffixes: tuple[str, ...] = ()


UNPACK = "unpack it, and import what it holds"
KINDS = (
    Kind("Parquet", (b"PAR1",), "rename it to NAME.parquet", (".parquet",)),
    Kind("an Arrow file", (b"ARROW1",), "write it as Parquet: polars.read_ipc(FILE).write_parquet('a.parquet')"),
    Kind("HDF5", (b"\x89HDF\r\n\x1a\n",), "read it with h5py and save the ids (tokens, layers, k) with numpy.save"),
    Kind(
        "a database of SQLite",
        (b"SQLite format 3\0",),
        "write its table as CSV: sqlite3 -header -csv FILE 'select ...'",
    ),
    Kind("an array of numpy", (b"\x93NUMPY",), "rename it to NAME.npy", (".npy",)),
    Kind(
        "GGUF",
        (b"GGUF",),
        "weights or an importance matrix (llama-imatrix), not a trace; rename it to NAME.gguf",
        (".gguf",),
    ),
    Kind("a PDF", (b"%PDF-",), "import the data that it was made from"),
    Kind("a 7z archive", (b"7z\xbc\xaf\x27\x1c",), UNPACK),
    Kind("a RAR archive", (b"Rar!\x1a\x07",), UNPACK),
    Kind("packed with lz4", (b"\x04\x22\x4d\x18",), "run lz4 -d FILE"),
    Kind("packed with Snappy", (b"\xff\x06\x00\x00sNaPpY",), UNPACK),
    Kind("packed with compress", (b"\x1f\x9d",), "run uncompress FILE"),
    Kind("a program", (b"\x7fELF", b"MZ\x90"), "import the file that it writes"),
    Kind("an image", (b"\x89PNG\r\n", b"\xff\xd8\xff"), "import the data that it was made from"),
    Kind("an old Excel file", (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",), "save it as CSV"),
    Kind("Avro", (b"Obj\x01",), "write it as Parquet or JSON lines"),
    Kind("ORC", (b"ORC",), "write it as Parquet"),
    Kind("a pointer of git-lfs, not the file", (b"version https://git-lfs.github.com/",), "run `git lfs pull`"),
)
PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<head")
MOST_TENSORS = 1 << 20  #: bytes of a header that is read to name them
ZIP = b"PK\x03\x04"
ZIPPED = (".npz", ".pt", ".pth", ".zip", ".pkl", ".pickle", ".joblib")


def refuse_known(file: Path) -> None:
    """Raises TraceError for a file that begins as a format which no importer reads under this name."""
    with file.open("rb") as stream:
        start = stream.read(LOOKED_AT)
    kind = kind_of(start, file)
    if kind is None and file.suffix not in (".npz", ".pt"):
        try:
            with Unpacked(file) as stream:
                inner = kind_of(stream.read(LOOKED_AT), file.with_suffix("")) if stream.packing else None
        except TraceError:
            inner = None
        kind = inner and inner._replace(name=f"{inner.name} in a packed file", suffixes=())
    if kind and file.suffix not in kind.suffixes:
        raise TraceError(f"{file}: {kind.name}, by its first bytes; {kind.fix.replace('FILE', file.name)}")


def kind_of(start: bytes, file: Path) -> Kind | None:
    """Return the format of a file by its first bytes, None if unknown."""
    for kind in KINDS:
        if start.startswith(kind.starts):
            return kind
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:16].lower().startswith(PAGES):
        return Kind("a web page or XML", (), "download the file itself: an address, login or token may be wrong")
    if start[TAR_AT : TAR_AT + 5] == b"ustar":
        return Kind("a tar archive", (), "unpack it with tar -xf FILE, and import what it holds")
    if start.startswith(ZIP) and file.suffix not in ZIPPED:
        return _zip_kind(file)
    is_tensors = 0 < int.from_bytes(start[:8], "little") < 1 << 27 and start[8:10] in (b'{"', b"{}")
    return _tensors_kind(start, file) if is_tensors else None  # the length of a JSON header, and the header


def _tensors_kind(start: bytes, file: Path) -> Kind:
    """Return the format with the names and sizes of its tensors."""
    size = int.from_bytes(start[:8], "little")
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(8 + min(size, MOST_TENSORS))[8:])
        named = {name: each["shape"] for name, each in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        named = {}
    listed = shown(", ".join(f"{name} {shape}" for name, shape in named.items()), 200)
    fix = (
        "load them; save ids (tokens, layers, k) with numpy.save, or columns with a row per token and layer as Parquet"
    )
    return Kind(f"safetensors of {listed}" if listed else "safetensors", (), fix)


def _zip_kind(file: Path) -> Kind:
    names = names_in_zip(file)
    if names is None:
        return Kind("a zip archive that is damaged", (), "download it again")
    if any(name.endswith(".npy") for name in names):
        return Kind("an archive of numpy", (), "rename it to NAME.npz")
    if any(name.startswith("xl/") for name in names):
        return Kind("an Excel file", (), "save it as CSV")
    return Kind(f"a zip archive of {shown(', '.join(names), 100)}", (), UNPACK)


# ---------------------------------------------------------------- files that a folder lacks, or that were not read

SHARD = re.compile(r"(\d{1,6})([-_. ]?of[-_. ]?)(\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
COUNTED = re.compile(r"(?:part|shard|chunk|split|file|rank|layer)s?[-_.]?(\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
NUMBER = re.compile(r"\d{1,6}(?!.*\d)", re.ASCII)
FROM_ZERO = re.compile(r"part[-_.]?\d", re.ASCII | re.IGNORECASE)  #: Spark and others count parts from 0
LISTED = 5  #: files that a note names
#: What describes a data set and holds no rows.
ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)(\..*)?|.*\.(md|rst|pdf|png|svg|yaml|yml|lock)|dataset_infos?\.json"
)


def refuse_missing(source: Path, files: Iterable[Path]) -> None:
    """Raises TraceError naming the files of a set that are not in the folder `source`."""
    sets: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for file in files:
        if source.is_dir() and (found := SHARD.search(file.name)):
            pattern = f"{file.name[: found.start(1)]}{{}}{file.name[found.end(1) :]}"
            sets[pattern, int(found[3])][int(found[1])] = found[1]
    for (pattern, count), numbers in sets.items():
        first = 1 if count in numbers and 0 not in numbers else 0
        width = len(next(iter(numbers.values())))
        missing = [
            pattern.format(f"{number:0{width}}") for number in range(first, first + count) if number not in numbers
        ]
        if missing:
            either = (
                "" if {0, count} & set(numbers) else f", or {pattern.format(f'{count:0{width}}')} if counted from 1"
            )
            wrong = f"{len(numbers):,} of {count:,} files are here, without {_listed(missing)}{either}"
            raise TraceError(f"{source}: {wrong}; download the rest, or import the files one by one")


def notes(source: Path, files: list[Path], beside: Iterable[Path] = ()) -> list[str]:
    """Return notes about missing numbers and unread files of a folder, or about one shard alone."""
    if not source.is_dir():
        found = SHARD.search(source.name)
        alone = found is not None and int(found[3]) > 1
        return [f"one file of {int(found[3]):,}; import their folder to read all"] if found and alone else []
    return [*_gaps(files), *_unread(source, {*files, *beside})]


def _gaps(files: list[Path]) -> list[str]:
    """Return numbers between the first and the last of files of one name, where most are there."""
    named: dict[str, dict[int, str]] = defaultdict(dict)
    for file in files:
        found = None if SHARD.search(file.name) else COUNTED.search(file.name) or NUMBER.search(file.name)
        if found:
            at, end = found.span(1) if found.re is COUNTED else found.span()
            named[f"{file.parent.name}/{file.name[:at]}*{file.name[end:]}"][int(file.name[at:end])] = file.name
    said = []
    for pattern, numbers in named.items():
        first = 0 if FROM_ZERO.search(pattern.replace("*", "0")) and min(numbers) == 1 else min(numbers)
        missing = sorted(set(range(first, max(numbers))) - set(numbers)) if max(numbers) < 2 * len(numbers) + 1 else []
        if missing and len(numbers) > 1:
            listed = _listed([str(number) for number in missing])
            said.append(f"no file {listed} of {pattern.partition('/')[2]}; it may be missing")
    return said


def _unread(source: Path, read: set[Path]) -> list[str]:
    """Return a note about files that were not read, in the folders that files were read from."""
    folders = {source, *(file.parent for file in read)}
    left = [entry for folder in sorted(folders) for entry in sorted(folder.iterdir()) if entry not in read]
    kept = [
        entry.name + ("/" if entry.is_dir() else "")
        for entry in left
        if not entry.name.startswith((".", "_")) and not ABOUT.fullmatch(entry.name.lower()) and entry not in folders
    ]
    return [f"not read: {_listed(kept)}"] if kept else []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return shown(", ".join(names[:LISTED]), 300) + more
