"""Untrusted npz archives: no pickle, no allocation beyond the file's size, damage as an error of one line."""

from __future__ import annotations

import io
import math
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from moereplay.traces.importers.packed import EXPANSION, allowance
from moereplay.traces.schema import TraceError, check_values, shown

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


def checked_ids(ids: np.ndarray, place: str) -> np.ndarray:
    """Return the array, if it has three axes and whole numbers that may be ids. Raises TraceError otherwise."""
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise TraceError(f"{place}: invalid array {ids.dtype}{ids.shape}: expected three axes of integers, none empty")
    check_values(ids, "chosen", place)
    return ids


def lone(file: Path) -> np.ndarray:
    """Return the array of an npy file. Raises TraceError if it is damaged, pickled or no array."""
    with file.open("rb") as stream:
        _check_header(stream, file.stat().st_size, str(file))
        stream.seek(0)
        try:
            return npy.read_array(stream, allow_pickle=False)
        except HEADER_DAMAGE as broken:
            raise TraceError(f"{file} is a broken array ({shown(broken)}); record it again") from broken


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
    _check_header(io.BytesIO(content), len(content), place)
    try:
        return npy.read_array(io.BytesIO(content), allow_pickle=False)
    except HEADER_DAMAGE as broken:
        raise TraceError(f"{place} is a broken array ({shown(broken)}); record it again") from broken


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
    with archive.open(member) as stream:
        _check_header(stream, member.file_size, f"{file}: {name}")
    with archive.open(member) as stream:
        try:
            return npy.read_array(stream, allow_pickle=False)
        except HEADER_DAMAGE as broken:
            raise TraceError(f"{file}: {name} is a broken array ({shown(broken)}); record it again") from broken


def _check_header(stream: IO[bytes], size: int, place: str) -> None:
    """Raises TraceError unless the header of an array describes `size` bytes of plain values, its own among them."""
    try:
        shape, _, dtype = HEADERS[npy.read_magic(stream)](stream)
    except HEADER_DAMAGE as broken:
        raise TraceError(f"{place} is a broken array ({shown(broken)}); download or record it again") from broken
    if dtype.hasobject:
        raise TraceError(f"{place} holds pickled objects, which can run code: expected plain arrays")
    if min(shape, default=0) < 0 or stream.tell() + math.prod(shape) * dtype.itemsize != size:
        claim = f"{shown(dtype)}{shown(shape)}"
        raise TraceError(f"{place} claims to be {claim}, which is not the size of its data; record it again")
