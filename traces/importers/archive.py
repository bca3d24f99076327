"""Untrusted containers: packed files (gzip, bzip2, xz, zstd, a zip of one file) by their first bytes; npz archives.

A packed file may expand to `FREE` bytes, or to `EXPANSION` times the bytes read so far: routing traces expand 5 to 20
times, a bomb a thousand times or more. A bomb is rejected after `FREE` bytes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy

from moereplay.traces.documents import refuse_irregular
from moereplay.traces.schema import VALUES, TraceError, check_values, shown

FREE, EXPANSION = 1 << 25, 100
MOST_HELD = 1 << 28  #: bytes of a file whose packing is undone at once
ZSTD_BLOCK = 1 << 17  #: bytes that a block of zstd holds at most
ZSTD_FRAME, ZSTD_SKIPPED = 0xFD2FB528, 0x184D2A50
LONGEST_MAGIC = 8
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError, RuntimeError, MemoryError, zipfile.BadZipFile)


class Readable(Protocol):
    """Stream that every unpacking library returns."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, none at the end."""
        ...


class Packing(NamedTuple):
    """One way of packing a file."""

    name: str
    suffix: str
    magic: bytes
    opened: Callable[[BinaryIO, Path], Readable]
    unpack: str  #: command that undoes it


def files_in(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of a zip's files, but for those that macOS adds."""
    return [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]


def _zip(source: BinaryIO, file: Path) -> Readable:
    """Return the only file of a zip archive. Raises TraceError if there are several."""
    archive = zipfile.ZipFile(source)
    names = files_in(archive)
    if len(names) != 1:
        listed = shown(", ".join(names), 200) or "none"
        archive.close()
        raise TraceError(f"{file}: a zip of {len(names):,} files ({listed}): expected one file; unpack it first")
    return archive.open(names[0])


def _zstd(source: BinaryIO, file: Path) -> Readable:
    """Return the whole file, unpacked: the decoder that comes with zarr has no streams."""
    from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]

    packed = source.read(MOST_HELD + 1)
    size = _zstd_bound(packed)
    if size > min(allowance(len(packed)), MOST_HELD):
        raise TraceError(
            f"{file}: zstd of more than {MOST_HELD >> 20:,} MiB, or {EXPANSION}-fold; run zstd -d {file.name}"
        )
    return io.BytesIO(zstd.decompress(packed))


def _zstd_bound(packed: bytes) -> int:
    """Return bytes that zstd frames hold at most, by the headers of their blocks (RFC 8878, 3.1.1)."""
    at = bound = 0
    while at < len(packed):
        magic = int.from_bytes(packed[at : at + 4], "little")
        if magic & ~15 == ZSTD_SKIPPED:
            at += 8 + int.from_bytes(packed[at + 4 : at + 8], "little")
            continue
        if magic != ZSTD_FRAME or at + 5 > len(packed):
            raise EOFError("not a zstd frame")
        descriptor = packed[at + 4]
        single, stated = descriptor >> 5 & 1, descriptor >> 6
        content = (1 if single else 0, 2, 4, 8)[stated]
        at += 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        size = int.from_bytes(packed[at : at + content], "little") + (256 if stated == 1 else 0)
        blocks, at = _zstd_blocks(packed, at + content)
        bound += min(size, blocks) if content else blocks
        at += 4 * (descriptor >> 2 & 1)
    return bound


def _zstd_blocks(packed: bytes, at: int) -> tuple[int, int]:
    """Return bytes that the blocks of a frame hold at most, and where they end."""
    bound, last = 0, False
    while not last:
        header = int.from_bytes(packed[at : at + 3], "little")
        if at + 3 > len(packed):
            raise EOFError("cut off inside a frame of zstd")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)
        bound += size if kind < 2 else ZSTD_BLOCK
    return bound, at


PACKINGS = (
    Packing("gzip", ".gz", b"\x1f\x8b", lambda source, _: gzip.GzipFile(fileobj=source), "gunzip"),
    Packing("bzip2", ".bz2", b"BZh", lambda source, _: bz2.BZ2File(source), "bunzip2"),
    Packing("xz", ".xz", b"\xfd7zXZ\0", lambda source, _: lzma.LZMAFile(source), "unxz"),  # noqa: SIM115
    Packing("zstd", ".zst", ZSTD_FRAME.to_bytes(4, "little"), _zstd, "zstd -d"),
    Packing("zip", ".zip", b"PK\x03\x04", _zip, "unzip"),
)
SUFFIXES = tuple(packing.suffix for packing in PACKINGS)


def packing_of(start: bytes, name: Path) -> Packing | None:
    """Return the packing that a file begins with. A zip counts only by its name too: npz and torch files are zips."""
    fitting = (packing for packing in PACKINGS if start.startswith(packing.magic))
    return next((packing for packing in fitting if packing.suffix != ".zip" or name.suffix == ".zip"), None)


def allowance(size: int) -> int:
    """Return bytes that `size` compressed ones may expand to."""
    return max(FREE, EXPANSION * size)


class Unpacked(io.RawIOBase):
    """The bytes of a file, unpacked if it is packed. Raises TraceError for a missing or damaged file and for bombs."""

    def __init__(self, file: Path) -> None:
        try:
            refuse_irregular(file)
        except OSError as wrong:
            raise TraceError(f"{file}: {wrong.strerror}; check the path") from None
        self.file, self.count = file, 0
        self._source = file.open("rb")
        start = self._source.read(LONGEST_MAGIC)
        self._source.seek(0)
        self.packing = packing_of(start, file)
        try:
            self._stream: Readable = self.packing.opened(self._source, file) if self.packing else self._source
        except DAMAGE as broken:
            self._source.close()
            raise self._damaged(broken) from None
        except TraceError:
            self._source.close()
            raise

    def readable(self) -> bool:
        """Return True: the file is open for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes. Raises TraceError."""
        try:
            found = self._stream.read(len(buffer))
        except DAMAGE as broken:
            raise self._damaged(broken) from None
        buffer[: len(found)] = found
        self.count += len(found)
        if self.packing and self.count > allowance(self._source.tell()):
            fix = f"if that is correct, unpack it with {self.packing.unpack}"
            raise TraceError(f"{self.file}: expands more than {EXPANSION}-fold; {fix}")
        return len(found)

    def close(self) -> None:
        """Close the file too."""
        if not self.closed:
            self._source.close()
        super().close()

    def _damaged(self, broken: BaseException) -> TraceError:
        name = self.packing.name if self.packing else "file"
        return TraceError(f"{self.file}: damaged {name} ({shown(broken)}); download or record it again")


# -- Untrusted npz archives: no pickle, no allocation beyond the file's size, damage as an error of one line.

#: what zipfile raises on a damaged archive; RuntimeError where damage looks like encryption
ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)
#: what numpy raises on a damaged header, which it reads as Python's literals
HEADER_DAMAGE = (ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError, OverflowError, MemoryError)
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MEMBER = ".npy"


def names_in_zip(file: Path) -> list[str] | None:
    """Return names of the members of a zip archive, which npz and torch files are; None if it cannot be read as one."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except (*ZIP_DAMAGE, ValueError):
        return None


def members(file: Path) -> frozenset[str]:
    """Return the names of the arrays in an npz; empty if it cannot be read."""
    return frozenset(name.removesuffix(MEMBER) for name in names_in_zip(file) or () if name.endswith(MEMBER))


def arrays(file: Path, *names: str) -> list[np.ndarray]:
    """Return the named arrays.

    Raises TraceError if one is missing, damaged, pickled or larger than the file can hold.
    """
    missing = sorted(set(names) - members(file))
    if missing:
        raise TraceError(f"{file}: missing array {', '.join(missing)}: expected {', '.join(names)}")
    try:
        with zipfile.ZipFile(file) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, about headers as Python 2 wrote them
            return [_array(archive, name, file) for name in names]
    except ZIP_DAMAGE as broken:
        raise TraceError(f"{file}: damaged ({shown(broken)}); download or record it again") from broken


def expert_ids(file: Path, name: str) -> np.ndarray:
    """Return a 3-D array of whole numbers that may be ids. Raises TraceError otherwise."""
    (ids,) = arrays(file, name)
    return checked_ids(ids, f"{file}: {name}")


PACKED_BITS = 16  #: below an id, for its weight as bfloat16
ONE = 0x3F80  #: as bfloat16, the largest gate weight
BATCHED = (
    "four axes: expected three. If they are (batch, sequence, layers, k), save each text as a file of its own, without "
    "its padding: ids[text][mask[text] == 1]"
)


def refuse_packed(ids: np.ndarray, place: str) -> None:
    """Raises TraceError for ids that share a number with their weight, as flashinfer's routed MoE takes them."""
    high, low = ids >> PACKED_BITS, ids & ((1 << PACKED_BITS) - 1)
    beyond = VALUES["chosen"].most
    some = ids.size > 1 and ids.min() >= 0 and (ids > beyond).mean() * 2 > 1
    if some and high.min() < high.max() <= beyond and low.min() < low.max() <= ONE:
        text = f"{place}: {ids.flat[0]}, ...: ids seem to be packed with weights, (id << {PACKED_BITS}) | bfloat16"
        raise TraceError(f"{text}: expected ids alone; save ids >> {PACKED_BITS}")


def checked_ids(ids: np.ndarray, place: str) -> np.ndarray:
    """Return the array, if it has three axes and whole numbers that may be ids. Raises TraceError otherwise."""
    if ids.ndim == 4 and ids.dtype.kind in "iu":
        raise TraceError(f"{place}: invalid array {ids.dtype}{ids.shape}: {BATCHED}")
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise TraceError(f"{place}: invalid array {ids.dtype}{ids.shape}: expected three axes of integers, none empty")
    if ids.dtype.itemsize > 2:
        refuse_packed(ids, place)
    check_values(ids, "chosen", place)
    return ids


def lone(file: Path) -> np.ndarray:
    """Return the array of an npy file. Raises TraceError if it is damaged, pickled or no array."""
    return _read(lambda: file.open("rb"), file.stat().st_size, str(file))


def described(file: Path) -> tuple[tuple[int, ...], str]:
    """Return shape and kind of numbers of an npy file, as numpy names them; empty if it is none."""
    try:
        with file.open("rb") as stream:
            shape, _, dtype = HEADERS[npy.read_magic(stream)](stream)
    except (*HEADER_DAMAGE, OSError):
        return (), ""
    return shape, dtype.kind


def array_of(content: bytes, place: str) -> np.ndarray:
    """Return the array of an npy file that is held in memory.

    Raises TraceError if it is damaged, pickled or no array.
    """
    return _read(lambda: io.BytesIO(content), len(content), place)


def text(file: Path, name: str) -> str:
    """Return an array that is one string. Raises TraceError otherwise."""
    (array,) = arrays(file, name)
    if array.dtype.kind != "U" or array.size != 1:
        raise TraceError(f"{file}: invalid {name} {array.dtype}{array.shape}: expected one string")
    try:
        return str(array.item())
    except (ValueError, SystemError) as broken:  # code points beyond Unicode
        raise TraceError(f"{file}: invalid {name} ({shown(broken)}): expected a string") from broken


def _array(archive: zipfile.ZipFile, name: str, file: Path) -> np.ndarray:
    member = archive.getinfo(name + MEMBER)
    if member.compress_size > file.stat().st_size:
        raise TraceError(f"{file}: {name} claims more bytes than the file has; download or record it again")
    if member.file_size > allowance(member.compress_size):
        raise TraceError(
            f"{file}: {name} expands more than {EXPANSION}-fold; if that is correct, save it with np.savez"
        )
    return _read(lambda: archive.open(member), member.file_size, f"{file}: {name}")


def _read(opened: Callable[[], IO[bytes]], size: int, place: str) -> np.ndarray:
    """Return the array in `size` bytes, after its header was found to describe them. Raises TraceError."""
    try:
        with opened() as stream:
            shape, _, dtype = HEADERS[npy.read_magic(stream)](stream)
            end = stream.tell()
        if dtype.hasobject:
            raise TraceError(f"{place} holds pickled objects, which can run code: expected plain arrays")
        if min(shape, default=0) < 0 or end + math.prod(shape) * dtype.itemsize != size:
            claim = f"{shown(dtype)}{shown(shape)}"
            raise TraceError(f"{place} claims to be {claim}, which is not the size of its data; record it again")
        with opened() as stream:
            return npy.read_array(stream, allow_pickle=False)
    except TraceError:
        raise
    except HEADER_DAMAGE as broken:
        raise TraceError(f"{place} is a broken array ({shown(broken)}); download or record it again") from broken
