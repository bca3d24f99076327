"""Archives as `torch.save` writes them, of a pickle that is written by hand: hostile ones cannot be saved by torch."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

STOP = b"."


def archive(path: Path, program: bytes, *, packed: bool = False, **storages: bytes) -> Path:
    """A torch archive with this pickle; storage `d0` is `data/0`."""
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as opened:
        opened.writestr("archive/data.pkl", program)
        opened.writestr("archive/byteorder", b"little")
        for name, content in storages.items():
            opened.writestr(f"archive/data/{name[1:]}", content)
    return path


def plain(value: object) -> bytes:
    """The opcodes that leave a plain value on the stack."""
    return pickle.dumps(value, 2)[2:-1]


def named(module: str, attribute: str) -> bytes:
    """A global."""
    return f"c{module}\n{attribute}\n".encode()


def tensor(size: object, strides: object, *, key: str = "0", kind: str = "Float", numel: int = 4, at: int = 0) -> bytes:
    """`_rebuild_tensor_v2` of a storage."""
    text = b"X" + struct.pack("<I", len(key)) + key.encode()
    storage = b"(" + plain("storage") + named("torch", f"{kind}Storage") + text + plain("cpu") + plain(numel) + b"tQ"
    rest = plain(at) + plain(size) + plain(strides) + plain(False) + named("collections", "OrderedDict") + b")R"
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + rest + b"tR"


KINDS = {"<f4": "Float", "<f2": "Half", "<i8": "Long", "<i4": "Int", "<i2": "Short"}


def save(path: Path, document: Any) -> None:
    """Write dicts, lists, tuples, plain values and arrays (as tensors) like torch.save, with reproducible bytes."""
    storages: list[np.ndarray] = []
    members = {"data.pkl": b"\x80\x02" + _program(document, storages) + STOP, "byteorder": b"little"}
    members |= {f"data/{number}": array.tobytes() for number, array in enumerate(storages)}
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in {**members, "version": b"3\n"}.items():
            opened.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


def _program(value: Any, storages: list[np.ndarray]) -> bytes:
    """The opcodes that leave a value on the stack."""
    if isinstance(value, np.ndarray):
        return _saved(value, storages)
    if isinstance(value, dict):
        return b"}(" + b"".join(_program(each, storages) for pair in value.items() for each in pair) + b"u"
    if isinstance(value, list | tuple):
        begin, end = (b"](", b"e") if isinstance(value, list) else (b"(", b"t")
        return begin + b"".join(_program(each, storages) for each in value) + end
    return plain(value)


def _saved(array: np.ndarray, storages: list[np.ndarray]) -> bytes:
    storages.append(array)
    steps = tuple(np.cumprod([1, *array.shape[:0:-1]])[::-1].tolist())
    kind = KINDS[array.dtype.str]
    return tensor(array.shape, steps, key=str(len(storages) - 1), kind=kind, numel=array.size)
