"""Files of `torch.save`, read without torch: the archive's pickle as data, and tensors as arrays of numpy.

The archive is a zip of uncompressed members: `NAME/data.pkl` describes the document, `NAME/data/0`, `/1` and
so on hold the numbers. Tensors are read on demand, after checking their claimed size against their storage.

A pickle is a program, so it is checked twice. `_scan` walks through its opcodes before any of them runs and refuses
those that are not in `READ`, memo indices that no pickler writes, and containers as keys of dicts. Then the standard
library's `pickle.Unpickler` runs it; `find_class` resolves only the names in `TYPES` and `CALLS`, to stand-ins from
this file: nothing that a pickle names is ever imported. The document holds integers, floats, texts, bytes, None, lists,
tuples, dicts (also for OrderedDict) and what `tensor` makes of tensors.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pickletools import OpcodeInfo, genops, markobject, opcodes, stackslice
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from moereplay.traces.importers.archive import EXPANSION, ZIP_DAMAGE, allowance, names_in_zip
from moereplay.traces.importers.sources import TORCH_DOCUMENT, TORCH_SUFFIXES, files_of
from moereplay.traces.schema import TraceError, shown

MOST_STEPS = 1 << 23  #: opcodes; a recording of a million tokens has about four million
INTEGERS = 1 << 63  #: below it, and from its negative on
MOST_SIZES = 64
ENCODE = "_codecs encode"
PLAIN = (
    "only numbers, strings, lists, dicts and tensors are supported; remove the others and save it again with torch.save"
)
#: Opcodes that a program may contain.
READ_OPCODES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES"
    " SHORT_BINBYTES MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
    " BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID"
)
READ = frozenset(READ_OPCODES.split())
GLOBAL = "global"  #: kind of what STACK_GLOBAL pushes; the kind of what GLOBAL pushes is its name


class _Effect(NamedTuple):
    """Effect of an opcode on a stack of kinds of values."""

    pops: int  #: values above the last mark
    to_mark: bool  #: whether everything down to the last mark goes
    pushes: list[str]


EFFECTS = {
    opcode.name: _Effect(
        sum(kind not in (markobject, stackslice) for kind in opcode.stack_before),
        stackslice in opcode.stack_before,
        [GLOBAL if opcode.name == "STACK_GLOBAL" else kind.name for kind in opcode.stack_after],
    )
    for opcode in opcodes
    if opcode.name in READ
}
#: Kinds of what opcodes push that need no check and pop nothing: most opcodes of a recording.
PLAIN_PUSHES = {
    name: effect.pushes[0]
    for name, effect in EFFECTS.items()
    if effect.pushes
    and not effect.pops
    and not effect.to_mark
    and name[-3:] != "GET"
    and name not in ("MARK", "LONG1", "GLOBAL")
}
ANY = "any"  #: kind of what a call returns
FAULTS = (pickle.UnpicklingError, EOFError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError)

#: numpy types of the storage classes and the types that torch names; bfloat16 is widened when it is read.
TYPES = {
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
    """A tensor as a pickle describes it; only the kinds of values are checked."""

    key: str  #: of the storage in the archive
    stored: str  #: type of the storage's numbers, a value of TYPES
    length: int  #: numbers in the storage
    dtype: str
    offset: int  #: all in numbers, not bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Storage(NamedTuple):
    """A persistent id: numbers in another member of the archive."""

    key: str
    dtype: str
    length: int


class BrokenError(ValueError):
    """Raised for what no pickler writes."""


class BigEndianError(ValueError):
    """Raised for numbers of big-endian bytes."""


class Sealed:
    """Base of objects in a document: a pickle cannot set their attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise BrokenError


class _Type(Sealed):
    """Stands for a class of storages or a type of numbers."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class _NumpyType(Sealed):
    """Stands for `numpy.dtype`, whose state gives the order of bytes second."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, *flags: Any) -> None:
        if not isinstance(name, str) or not NUMPY_TYPE.fullmatch(name):
            raise BrokenError
        self.dtype = np.dtype(name).newbyteorder("<")

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise BigEndianError


class _Function(Sealed):
    """Stands for a function that a pickle calls."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def interpret(program: bytes, place: str, tensor: Callable[[Layout], Any]) -> Any:
    """Return the document; `tensor` makes a value of each `Layout`. Raises TraceError that begins with `place`."""
    _scan(program, place)
    try:
        return _Unpickler(program, place, tensor).load()
    except BigEndianError:
        _refuse(place, "a number of big-endian bytes")
    except (*FAULTS, MemoryError):  # their texts may hold values of the pickle, of any length
        raise TraceError(f"{place}: broken; download or record it again") from None


def _refuse(place: str, found: str) -> NoReturn:
    raise TraceError(f"{place}: {found} is not loaded, because a pickle can run code; {PLAIN}")


def _scan(program: bytes, place: str) -> None:
    """Check every opcode on a stack of kinds of values. Raises TraceError."""
    stack: list[str] = []
    marks: list[int] = []  #: heights of the stack
    memo: dict[int, str] = {}
    at, steps = 0, cast(Iterable[tuple[OpcodeInfo, Any, int]], genops(program))
    try:
        for step, (code, argument, at) in enumerate(steps):  # noqa: B007
            name = code.name
            if step >= MOST_STEPS:
                raise TraceError(f"{place}: more than {MOST_STEPS:,} opcodes; record fewer tokens per file")
            if name in PLAIN_PUSHES:
                stack.append(PLAIN_PUSHES[name])
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                index = len(memo) if argument is None else argument
                if index > step:  # the unpickler's memo is an array with a place for every index below
                    raise BrokenError
                memo[index] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                marks.append(len(stack))
            else:
                _check(name, argument, stack, marks, place)
                effect = EFFECTS[name]
                if effect.to_mark:
                    del stack[marks.pop() :]
                if effect.pops:
                    del stack[-effect.pops :]
                stack += [argument] if name == "GLOBAL" else effect.pushes
    except (*FAULTS, MemoryError):
        raise TraceError(f"{place}: broken at byte {at}; download or record it again") from None


def _check(name: str, argument: Any, stack: list[str], marks: list[int], place: str) -> None:
    """Reject values of unbounded time or memory, and everything that is not data."""
    if name not in READ:
        _refuse(place, f"opcode {name}")
    if name == "LONG1" and not -INTEGERS <= argument < INTEGERS:
        _refuse(place, f"an integer of {argument.bit_length() // 8 + 1} bytes")
    elif name in ("SETITEM", "SETITEMS"):
        for kind in stack[-2:-1] if name == "SETITEM" else stack[marks[-1] :: 2]:
            if kind in ("tuple", "list", "dict"):  # the hash of a tuple of tuples may take for ever
                _refuse(place, f"a key that is a {kind}")
    elif name == "GLOBAL" and argument not in TYPES and argument not in CALLS:
        _refuse(place, shown(argument.replace(" ", ".")))
    elif name == "REDUCE" and stack[-2] not in CALLS and stack[-2] != GLOBAL:
        _refuse(place, f"a call of {shown(stack[-2].replace(' ', '.'))}")
    elif name == "BUILD" and stack[-2] != ANY:
        _refuse(place, "the state of an object")


class _Unpickler(pickle.Unpickler):
    """Unpickles a program that `_scan` let pass."""

    def __init__(self, program: bytes, place: str, tensor: Callable[[Layout], Any]) -> None:
        super().__init__(io.BytesIO(program))
        self._place, self._tensor = place, tensor
        self._left = len(program)  #: characters that may still be encoded: a text can be named often

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the stand-in for a name. Raises TraceError for every name that is not listed."""
        name = f"{module_name} {global_name}"
        if name in TYPES:
            return _Type(TYPES[name])
        if name not in CALLS:
            _refuse(self._place, shown(f"{module_name}.{global_name}"))
        return _Function(CALLS[name] or (self._encoded if name == ENCODE else self._rebuilt))

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        kind, stored, key, _, length = pid
        if kind != "storage" or not isinstance(stored, _Type) or not isinstance(key, str) or type(length) is not int:
            raise BrokenError
        return Storage(key, stored.dtype, length)

    def _rebuilt(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
        """Make a tensor; `rest` is gradient and hooks, then for version 3 the type."""
        if not isinstance(storage, Storage) or type(offset) is not int:
            raise BrokenError
        dtype = rest[2].dtype if len(rest) > 2 and isinstance(rest[2], _Type) else storage.dtype
        return self._tensor(Layout(*storage, dtype, offset, _sizes(shape), _sizes(strides)))

    def _encoded(self, text: str, encoding: str) -> bytes:
        """Return bytes, which protocol 2 spells as text."""
        self._left -= len(text)
        if encoding != "latin1" or self._left < 0:
            raise BrokenError
        return text.encode("latin1")


def _sizes(values: Any) -> tuple[int, ...]:
    if (
        not isinstance(values, tuple | list)
        or len(values) > MOST_SIZES
        or any(type(value) is not int for value in values)
    ):
        raise BrokenError
    return tuple(values)


def _parameter(tensor: Any, gradient: Any, hooks: Any) -> Any:
    if not isinstance(tensor, Sealed):
        raise BrokenError
    return tensor


def _numpy_scalar(numpy_type: Any, content: bytes) -> Any:
    if not isinstance(numpy_type, _NumpyType) or len(content) != numpy_type.dtype.itemsize:
        raise BrokenError
    return np.frombuffer(content, numpy_type.dtype)[0].item()


#: Functions that a pickle may call; None marks methods of the unpickler.
CALLS: dict[str, Callable[..., Any] | None] = {
    "collections OrderedDict": lambda: {},  # noqa: PIE807 - dict would take arguments
    "torch Size": _sizes,
    "torch._utils _rebuild_tensor_v2": None,
    "torch._utils _rebuild_tensor_v3": None,
    "torch._utils _rebuild_parameter": _parameter,
    ENCODE: None,
    "__builtin__ bytes": lambda: b"",
    "numpy dtype": _NumpyType,
    "numpy.core.multiarray scalar": _numpy_scalar,
    "numpy._core.multiarray scalar": _numpy_scalar,
}


# ---------------------------------------------------------------- the archive

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
