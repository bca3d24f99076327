"""Routed experts as servers and trainers spell them in JSON.

Nested lists (tokens, layers, k); base64 of an npy file; `{"data", "shape", "dtype"}` with base64 of raw numbers, in
which `dtype` may be missing and `start` may name the token of the first row; `nrlre1:DTYPE:TxLxK:BASE64` (NeMo-RL); and
flat numbers without a shape, as a list or as base64 of little-endian int32 (SGLang).
"""

from __future__ import annotations

import base64
import binascii
import re
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.schema import TraceError, check_values

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  #: where the dtype is not stated
NPY = b"\x93NUMPY"
NEMO = re.compile(r"nrlre1:(u?int(?:8|16|32|64)):([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9}):")
PACKED = "expected base64, with dtype, shape and data"


class Spelled(NamedTuple):
    """Ids as they were spelled."""

    ids: np.ndarray  #: (T, L, k), or (n,) where no shape is stated
    start: int | None = None  #: token of the first row, where it is stated

    @property
    def flat(self) -> bool:
        """True if layers and k have to be found elsewhere."""
        return self.ids.ndim == 1


def spelled(value: Any, place: str, dtype: Any = None) -> Spelled | None:
    """Return the ids, None for null and for no tokens; `dtype` of flat numbers, int32 by default. Raises TraceError."""
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return Spelled(_of_text(value, place, dtype))
    if isinstance(value, dict):
        return _of_object(value, place)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return Spelled(_checked(_numbers(value, place), place))
    if not _nested(value):
        raise TraceError(f"{place} is not an array: expected three nested lists of integers")
    return Spelled(archive.checked_ids(_numbers(value, place), place))


def _numbers(value: list[Any], place: str) -> np.ndarray:
    try:
        return np.array(value)
    except (ValueError, OverflowError):
        raise TraceError(f"{place} is ragged: expected the same layers and k for every token") from None


def _nested(tokens: Any) -> bool:
    """Return True for lists of tokens of layers of integers; numpy would accept other types too."""
    if not isinstance(tokens, list) or not all(isinstance(layers, list) for layers in tokens):
        return False
    rows = (ids for layers in tokens for ids in layers)
    return all(isinstance(ids, list) and set(map(type, ids)) == {int} for ids in rows)


def _of_text(text: str, place: str, dtype: Any) -> np.ndarray:
    if head := NEMO.match(text):
        shape = [int(size) for size in head.groups()[1:]]
        return _shaped(unbased(text[head.end() :], place), head[1], shape, place)
    content = unbased(text, place)
    if content.startswith(NPY):
        return archive.checked_ids(archive.array_of(content, place), place)
    kind = dtype if dtype in DTYPES else "int32"
    size = np.dtype(kind).itemsize
    if not content or len(content) % size:
        said = f"{len(content):,} bytes, which are neither an npy file nor a whole number of {kind}"
        raise TraceError(f"{place} has {said}: expected the server's output, unchanged")
    return _checked(np.frombuffer(content, np.dtype(kind).newbyteorder("<")), place)


def _of_object(value: dict[str, Any], place: str) -> Spelled:
    dtype, shape, text, start = (value.get(name) for name in ("dtype", "shape", "data", "start"))
    plain = isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape)
    encoding = value.get("encoding", "base64")
    if (
        encoding not in ("base64", "base85")
        or dtype not in (None, "", *DTYPES)
        or not plain
        or not isinstance(text, str)
    ):
        raise TraceError(f"{place} has an unknown encoding: {PACKED}")
    if start is not None and (type(start) is not int or not 0 <= start < 2**31):
        raise TraceError(f"{place}: invalid start: expected a number of tokens, an integer of at least 0")
    assert isinstance(shape, list)
    content = unbased(text, place) if encoding == "base64" else _unbased85(text, place)
    return Spelled(_shaped(content, dtype or None, shape, place), start)


def _shaped(content: bytes, dtype: str | None, shape: list[int], place: str) -> np.ndarray:
    """Return raw numbers of that shape; without a dtype, integers of the matching size."""
    places = prod(shape)
    known = dtype or BY_SIZE.get(len(content) // places if places and len(content) % places == 0 else 0)
    if known is None or not places or len(content) != places * np.dtype(known).itemsize:
        raise TraceError(f"{place}: {len(content):,} bytes are not {dtype or 'ids'} of shape {shape}; save it again")
    ids = np.frombuffer(content, np.dtype(known).newbyteorder("<")).reshape(shape)
    return archive.checked_ids(ids, place)


def _checked(ids: np.ndarray, place: str) -> np.ndarray:
    check_values(ids, "chosen", place)
    return ids


def unbased(text: str, place: str) -> bytes:
    """Return the bytes of a base64 text. Raises TraceError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise TraceError(f"{place} is not base64: expected the server's output, unchanged") from None


def _unbased85(text: str, place: str) -> bytes:
    try:
        return base64.b85decode(text)
    except ValueError:
        raise TraceError(f"{place} is not base85: expected the server's output, unchanged") from None
