"""What a file is by its first bytes: formats that hold no routing trace, or that have another suffix than their name.

They are refused before an importer reads them, with what the user can do. A file named as its format is left to the
importers of that format.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

from moereplay.traces.importers.packed import Unpacked
from moereplay.traces.schema import TraceError, shown

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
    Kind("Parquet", (b"PAR1",), "name it NAME.parquet", (".parquet",)),
    Kind("an Arrow file", (b"ARROW1",), "write it as Parquet: polars.read_ipc(FILE).write_parquet('a.parquet')"),
    Kind("HDF5", (b"\x89HDF\r\n\x1a\n",), "read it with h5py and save the ids (tokens, layers, k) with numpy.save"),
    Kind(
        "a database of SQLite",
        (b"SQLite format 3\0",),
        "write its table as CSV: sqlite3 -header -csv FILE 'select ...'",
    ),
    Kind("an array of numpy", (b"\x93NUMPY",), "name it NAME.npy", (".npy",)),
    Kind(
        "GGUF",
        (b"GGUF",),
        "weights or an importance matrix (llama-imatrix) and no trace; name it NAME.gguf",
        (".gguf",),
    ),
    Kind("a PDF", (b"%PDF-",), "give the data that it was made from"),
    Kind("a 7z archive", (b"7z\xbc\xaf\x27\x1c",), UNPACK),
    Kind("a RAR archive", (b"Rar!\x1a\x07",), UNPACK),
    Kind("packed with lz4", (b"\x04\x22\x4d\x18",), "run lz4 -d FILE"),
    Kind("packed with Snappy", (b"\xff\x06\x00\x00sNaPpY",), UNPACK),
    Kind("packed with compress", (b"\x1f\x9d",), "run uncompress FILE"),
    Kind("a program", (b"\x7fELF", b"MZ\x90"), "give the file that it writes"),
    Kind("an image", (b"\x89PNG\r\n", b"\xff\xd8\xff"), "give the data that it was made from"),
    Kind("an old Excel file", (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",), "save it as CSV"),
    Kind("Avro", (b"Obj\x01",), "write it as Parquet or JSON lines"),
    Kind("ORC", (b"ORC",), "write it as Parquet"),
    Kind("a pointer of git-lfs, not the file", (b"version https://git-lfs.github.com/",), "run `git lfs pull`"),
)
PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<head")
ZIP = b"PK\x03\x04"
ZIPPED = (".npz", ".pt", ".pth", ".zip", ".pkl", ".pickle", ".joblib")


def refuse_known(file: Path) -> None:
    """Raises TraceError for a file that begins as a format which no importer reads under this name."""
    with file.open("rb") as stream:
        start = stream.read(LOOKED_AT)
    kind = kind_of(start, file) or _unpacked_kind(file)
    if kind and file.suffix not in kind.suffixes:
        raise TraceError(f"{file}: it is {kind.name}, by its first bytes; {kind.fix.replace('FILE', file.name)}")


def kind_of(start: bytes, file: Path) -> Kind | None:
    """The format of a file that begins so, None if it is none of those that are known."""
    for kind in KINDS:
        if start.startswith(kind.starts):
            return kind
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:16].lower().startswith(PAGES):
        return Kind("a web page or XML", (), "download the file itself: an address, login or token may be wrong")
    if start[TAR_AT : TAR_AT + 5] == b"ustar":
        return Kind("a tar archive", (), "unpack it with tar -xf FILE, and import what it holds")
    if start.startswith(ZIP) and file.suffix not in ZIPPED:
        return _zip_kind(file)
    return (
        Kind("safetensors", (), "load the ids and save them (tokens, layers, k) with numpy.save")
        if _is_tensors(start)
        else None
    )


def _unpacked_kind(file: Path) -> Kind | None:
    """The format of what is packed in the file."""
    try:
        with Unpacked(file) as stream:
            start = stream.read(LOOKED_AT) if stream.packing and file.suffix not in (".npz", ".pt") else b""
    except TraceError:
        return None
    kind = kind_of(start, file.with_suffix(""))
    return kind and kind._replace(name=f"{kind.name} in a packed file", suffixes=())


def _is_tensors(start: bytes) -> bool:
    """Whether a file begins with the length of a JSON header, and the header."""
    return 0 < int.from_bytes(start[:8], "little") < 1 << 27 and start[8:10] in (b'{"', b"{}")


def _zip_kind(file: Path) -> Kind:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return Kind("a zip archive that is damaged", (), "download it again")
    if any(name.endswith(".npy") for name in names):
        return Kind("an archive of numpy", (), "name it NAME.npz")
    if any(name.startswith("xl/") for name in names):
        return Kind("an Excel file", (), "save it as CSV")
    return Kind(f"a zip archive of {shown(', '.join(names), 100)}", (), UNPACK)
