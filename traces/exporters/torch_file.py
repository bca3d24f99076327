"""One array of int64 under a name, as `torch.save({name: tensor}, file)` writes it, without torch.

The file is a zip of a pickle, which says shape and type, and of the numbers (torch/serialization.py). The pickle is
written opcode by opcode, as nothing here may need torch; readers load it with `weights_only=True`.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

LONG_AGO = (1980, 1, 1, 0, 0, 0)  #: the same bytes whenever it is written
# Opcodes of pickle protocol 2, as `pickletools` names them.
PROTO, STOP, EMPTY_DICT, SETITEM = b"\x80\x02", b".", b"}", b"s"
MARK, TUPLE, EMPTY_TUPLE, REDUCE, BINPERSID, NEWFALSE = b"(", b"t", b")", b"R", b"Q", b"\x89"


def write(file: BinaryIO, name: str, array: np.ndarray) -> None:
    """Raises OSError."""
    numbers = np.ascontiguousarray(array, "<i8")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
        members = {"data.pkl": _pickle(name, numbers.shape), "byteorder": b"little", "data/0": numbers.tobytes()}
        for member, data in (members | {"version": b"3\n"}).items():
            packed.writestr(zipfile.ZipInfo(f"archive/{member}", LONG_AGO), data)


def _pickle(name: str, shape: Sequence[int]) -> bytes:
    count = int(np.prod(shape))
    strides = [int(np.prod(shape[at + 1 :])) for at in range(len(shape))]
    storage = _tuple(_text("storage"), _named("torch", "LongStorage"), _text("0"), _text("cpu"), _whole(count))
    hooks = _named("collections", "OrderedDict") + EMPTY_TUPLE + REDUCE
    places = [_whole(0), _tuple(*map(_whole, shape)), _tuple(*map(_whole, strides))]
    tensor = _named("torch._utils", "_rebuild_tensor_v2") + _tuple(storage + BINPERSID, *places, NEWFALSE, hooks)
    return PROTO + EMPTY_DICT + _text(name) + tensor + REDUCE + SETITEM + STOP


def _tuple(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _whole(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def _named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()
