"""What the pickle of a torch archive may name: types of storages, and functions, none of which is called.

`DTYPES` has the types, `CALLS` what stands here for each function; every other name is refused (`torch_pickle.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: Of the classes of storages and the types that torch names, numpy's type; bfloat16 is widened when it is read.
DTYPES = {
    **{f"torch {name}Storage": dtype for name, dtype in (
        ("Float", "<f4"), ("Double", "<f8"), ("Half", "<f2"), ("BFloat16", "bfloat16"), ("Long", "<i8"),
        ("Int", "<i4"), ("Short", "<i2"), ("Char", "|i1"), ("Byte", "|u1"), ("Bool", "|b1"),
    )},
    **{f"torch {name}": dtype for name, dtype in (
        ("float32", "<f4"), ("float64", "<f8"), ("float16", "<f2"), ("bfloat16", "bfloat16"), ("int64", "<i8"),
        ("int32", "<i4"), ("int16", "<i2"), ("int8", "|i1"), ("uint8", "|u1"), ("bool", "|b1"),
        ("uint16", "<u2"), ("uint32", "<u4"), ("uint64", "<u8"),
    )},
    "torch.storage UntypedStorage": "|u1",
}  # fmt: skip
NUMPY_TYPE = re.compile(r"[iuf][1248]|b1")


class Layout(NamedTuple):
    """What a pickle says of one tensor; nothing of it is checked yet but the kinds of values."""

    key: str  #: of the storage in the archive
    stored: str  #: type of the storage's numbers, a value of DTYPES
    length: int  #: numbers in the storage
    dtype: str
    offset: int  #: all in numbers, not bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Storage(NamedTuple):
    """A persistent id: numbers that lie elsewhere in the archive."""

    key: str
    dtype: str
    length: int


class Name(NamedTuple):
    """A global that the pickle names."""

    text: str  #: "module attribute"


class BrokenError(Exception):
    """What no pickler writes."""


Build = Callable[[Layout], Any]  #: what makes a tensor of what a pickle says of it


def _empty_dict(tensor: Build) -> dict[Any, Any]:
    return {}


def _size(tensor: Build, sizes: Any) -> tuple[int, ...]:
    return _whole_numbers(sizes)


def _tensor(
    tensor: Build, storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, *more: Any
) -> Any:
    """`torch._utils._rebuild_tensor_v2`, and v3, which names the type after the hooks."""
    if not isinstance(storage, Storage):
        raise BrokenError
    named = more[0].text if more and isinstance(more[0], Name) else None
    dtype = DTYPES[named] if named else storage.dtype
    (first,) = _whole_numbers((offset,))
    whole = Layout(*storage, dtype, first, _whole_numbers(shape), _whole_numbers(strides))
    return tensor(whole)


def _parameter(build: Build, tensor: Any, gradient: Any, hooks: Any) -> Any:
    return tensor


def _encoded(tensor: Build, text: str, encoding: str) -> bytes:
    """How protocol 2 spells bytes."""
    if encoding != "latin1":
        raise BrokenError
    return text.encode("latin1")


def _no_bytes(tensor: Build) -> bytes:
    return b""


def _numpy_type(tensor: Build, name: str, *flags: Any) -> np.dtype:
    if not NUMPY_TYPE.fullmatch(name):
        raise BrokenError
    return np.dtype(name).newbyteorder("<")


def _numpy_scalar(tensor: Build, dtype: Any, content: bytes) -> Any:
    if not isinstance(dtype, np.dtype) or len(content) != dtype.itemsize:
        raise BrokenError
    return np.frombuffer(content, dtype)[0].item()


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or any(type(value) is not int for value in values):
        raise BrokenError
    return tuple(values)


CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _empty_dict,
    "torch Size": _size,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_tensor_v3": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "_codecs encode": _encoded,
    "__builtin__ bytes": _no_bytes,
    "numpy dtype": _numpy_type,
    "numpy.core.multiarray scalar": _numpy_scalar,
    "numpy._core.multiarray scalar": _numpy_scalar,
}
