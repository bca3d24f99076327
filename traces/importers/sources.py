"""The files of a foreign trace: their names, whether they can be read, and their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moereplay.traces.importers.archive import names_in_zip
from moereplay.traces.importers.magic import refuse_known
from moereplay.traces.importers.text import refuse_bomb, suffix_of
from moereplay.traces.schema import TraceError

PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".joblib"}
PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
TORCH_SUFFIXES = (".pt", ".pth")
TORCH_DOCUMENT = "/data.pkl"  #: how the name of the pickle in a torch archive ends, which `torch_file.py` reads as data
OLD_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  #: a pickled number with which files before torch 1.6 begin


DATA = (".npz", ".npy", ".json", ".jsonl", ".csv", ".tsv", ".parquet", *TORCH_SUFFIXES)  #: checked in folders


def files_of(path: Path, suffix: str) -> list[Path]:
    """The file itself, or the files with that suffix directly in a folder, by name; empty if there are none."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if suffix_of(file) == suffix and file.is_file())
    return [path] if suffix_of(path) == suffix and path.is_file() else []


def refuse_unreadable(path: Path) -> None:
    """Raises TraceError for what no importer can read: nothing there, empty, pickled, or a truncated archive."""
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; give the path of a trace to import")
    if not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: it is a pipe or a device; expected a file or a folder")
    found = [path] if path.is_file() else _checked_in(path)
    if path.is_dir() and not any(path.iterdir()):
        raise TraceError(f"{path}: the folder is empty; expected the files of a trace")
    for file in found:
        _refuse_file(file)


def _checked_in(folder: Path) -> list[Path]:
    return [file for each in (folder, folder / "data") for suffix in DATA for file in files_of(each, suffix)]


def _refuse_file(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(len(OLD_TORCH))
    if not start:
        raise TraceError(f"{file}: the file is empty; expected a trace, so download or record it again")
    refuse_known(file)
    if suffix_of(file) in (".json", ".jsonl"):
        refuse_bomb(file)
    names = names_in_zip(file)
    if file.suffix in TORCH_SUFFIXES and any(name.endswith(TORCH_DOCUMENT) for name in names or ()):
        return
    if start == OLD_TORCH:
        raise TraceError(f"{file}: a torch file as before torch 1.6; torch.load it and torch.save it again")
    if (
        file.suffix in PICKLE_SUFFIXES
        or start.startswith(PICKLE_STARTS)
        or any(name.endswith(".pkl") for name in names or ())
    ):
        cut = " (or a torch archive that was cut off)" if start.startswith(b"PK") else ""
        raise TraceError(f"{file}: pickled data{cut} can run code and is not read; convert it to npz or jsonl")
    if file.suffix == ".npz" and names is None:
        raise TraceError(f"{file}: truncated or not an npz archive; download or record it again")


def digest_of(files: list[Path]) -> str:
    """SHA-256 of one file's bytes; of several, of the lines `sha256sum` prints for their names."""
    hashes = [_sha256(file) for file in files]
    if len(files) == 1:
        return hashes[0]
    listing = "".join(f"{sha}  {file.name}\n" for sha, file in zip(hashes, files, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
