"""Files of `torch.save`, read without torch: the archive's pickle as data, and tensors as arrays of numpy.

The archive is a zip of uncompressed members: `NAME/data.pkl` describes the document, `NAME/data/0`, `/1` and
so on hold the numbers. Tensors are read on demand, after checking their claimed size against their storage.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.archive import EXPANSION, ZIP_DAMAGE, allowance, names_in_zip
from moereplay.traces.importers.sources import TORCH_DOCUMENT, TORCH_SUFFIXES, files_of
from moereplay.traces.importers.torch_pickle import Layout, Sealed, interpret
from moereplay.traces.schema import TraceError, shown

MOST_PICKLE = 1 << 26  #: bytes of the pickle, which is held whole
MOST_AXES = 16
DAMAGE = (*ZIP_DAMAGE, ValueError)  #: the last where a member lies before the file
CACHE = 1 << 28  #: bytes of storages that are kept, as several requests may lie in one
AGAIN = "download or record it again"


@dataclass(frozen=True, eq=False)
class Tensor(Sealed):
    """A tensor in an archive."""

    archive: Archive
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""
        return self.layout.shape

    @property
    def kind(self) -> str:
        """Kind of its numbers, as numpy names kinds: i, u, f or b."""
        return "f" if self.layout.dtype == "bfloat16" else np.dtype(self.layout.dtype).kind

    @property
    def size(self) -> int:
        """Bytes of the whole array, repeated ones counted."""
        return math.prod(self.shape) * _plain(self.layout.dtype).itemsize

    def array(self) -> np.ndarray:
        """Return a read-only view of the storage, bfloat16 as float32.

        Raises TraceError if it is damaged.
        """
        plain = _plain(self.layout.dtype)
        content = self.archive.storage(self.layout.key) if 0 not in self.shape else b""
        numbers = np.frombuffer(content[: len(content) // plain.itemsize * plain.itemsize], plain)[self.layout.offset :]
        strides = tuple(step * plain.itemsize for step in self.layout.strides)
        view = np.lib.stride_tricks.as_strided(numbers, self.shape, strides, writeable=False)
        return _widened(view) if self.layout.dtype == "bfloat16" else view


class Archive:
    """An open archive and its document, `root`."""

    def __init__(self, file: Path) -> None:
        """Raises TraceError for a file that `torch.save` does not write, or that holds more than data."""
        self.file = file
        self._kept: dict[str, bytes] = {}
        names = [name for name in names_in_zip(file) or () if name.endswith(TORCH_DOCUMENT)]
        if len(names) != 1:
            raise TraceError(f"{file}: not a torch.save file: expected a zip archive with one {TORCH_DOCUMENT[1:]}")
        self._folder = names[0].removesuffix(TORCH_DOCUMENT)
        try:
            self._zip = zipfile.ZipFile(file)
        except DAMAGE as broken:
            raise TraceError(f"{file}: damaged ({shown(broken)}); {AGAIN}") from broken
        self._refuse_big_endian()
        self.root: Any = interpret(_document(self), f"{file}: data.pkl", self._tensor)

    def storage(self, key: str) -> bytes:
        """Return the bytes of a storage after checking their checksum. Raises TraceError if it differs."""
        if key not in self._kept:
            content = self.member(f"data/{key}")
            while self._kept and sum(map(len, self._kept.values())) + len(content) > CACHE:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = content
        return self._kept[key]

    def member(self, name: str) -> bytes:
        """Return a member's bytes. Raises TraceError if it is missing, packed or damaged."""
        try:
            info = self._zip.getinfo(f"{self._folder}/{name}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > self.file.stat().st_size:
                raise TraceError(f"{self.file}: {name} is compressed, which torch.save never does; {AGAIN}")
            return self._zip.read(info)
        except KeyError:
            raise TraceError(f"{self.file}: missing {name}: the file may be truncated; {AGAIN}") from None
        except DAMAGE as broken:
            raise TraceError(f"{self.file}: {name} is damaged ({shown(broken)}); {AGAIN}") from broken

    def size_of(self, name: str) -> int:
        """Return the bytes of a member. Raises TraceError if it is missing."""
        try:
            return self._zip.getinfo(f"{self._folder}/{name}").file_size
        except KeyError:
            raise TraceError(f"{self.file}: missing {shown(name)}: the file may be truncated; {AGAIN}") from None

    def _refuse_big_endian(self) -> None:
        name = f"{self._folder}/byteorder"  # older files lack it
        if name in self._zip.namelist() and self.member("byteorder") != b"little":
            raise TraceError(
                f"{self.file}: written on a big-endian machine; load it and save it again on a little-endian one"
            )

    def _tensor(self, layout: Layout) -> Tensor:
        wrong = self._fault(layout)
        if wrong:
            raise TraceError(f"{self.file}: a tensor in data/{shown(layout.key)} {wrong}; {AGAIN}")
        return Tensor(self, layout)

    def _fault(self, layout: Layout) -> str | None:
        """Return a description of an invalid tensor in the pickle, or None."""
        numbers, shape, strides = (layout.offset, *layout.shape, *layout.strides), layout.shape, layout.strides
        if min(numbers) < 0 or len(shape) != len(strides) or len(shape) > MOST_AXES:
            return "has impossible sizes or strides"
        held = self.size_of(f"data/{layout.key}")
        if layout.length < 0 or layout.length * _plain(layout.stored).itemsize != held:
            return f"claims another size than the {held:,} bytes of its storage"
        item = _plain(layout.dtype).itemsize
        last = layout.offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * item > held:
            return f"reaches beyond the {held:,} bytes of its storage"
        repeated = math.prod(max(size, 1) for size in shape) * item > allowance(held)
        return f"repeats its storage more than {EXPANSION} times" if repeated else None


def _plain(dtype: str) -> np.dtype:
    """Return numpy's type of the same bytes."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype)


def _widened(halves: np.ndarray) -> np.ndarray:
    """Convert bfloat16, the upper half of a float32, to float32."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _document(archive: Archive) -> bytes:
    if archive.size_of(TORCH_DOCUMENT[1:]) > MOST_PICKLE:
        raise TraceError(f"{archive.file}: more than {MOST_PICKLE:,} bytes of data.pkl; record fewer tokens per file")
    return archive.member(TORCH_DOCUMENT[1:])


def torch_files(path: Path) -> list[Path]:
    """Return the file itself, or the torch files directly in a folder, by name."""
    return sorted(file for suffix in TORCH_SUFFIXES for file in files_of(path, suffix))


def mentions(path: Path, *words: str) -> bool:
    """Return whether there are torch files, and the pickle of the first has all of these texts; False if damaged."""
    files = torch_files(path)
    names = names_in_zip(files[0]) if files else None
    if not names:
        return False
    found = [name for name in names if name.endswith(TORCH_DOCUMENT)]
    try:
        with zipfile.ZipFile(files[0]) as opened:
            pickle = opened.read(found[0]) if found and opened.getinfo(found[0]).file_size <= MOST_PICKLE else b""
    except DAMAGE:
        return False
    return all(word.encode() in pickle for word in words)


def refuse_bloat(archive: Archive, tensors: Iterable[Tensor]) -> None:
    """Raises TraceError if a few tensors are named so often that they make more than the file can mean."""
    if sum(tensor.size for tensor in tensors) > allowance(archive.file.stat().st_size):
        raise TraceError(
            f"{archive.file}: its tensors are more than {EXPANSION} times the file; save each of them once"
        )
