"""Values of translated functions: their kinds, and the text in LLVM's language that reads, writes and converts them.

A value is a tuple of LLVM operands and a kind: a number, a record's address, an array's address with its lengths, a
tuple of values, a hook's address, or an object that is known before the run and needs no operand. Whole numbers are
int64 wherever they come from, which gives the same results as Numba's narrower kinds as long as nothing overflows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moereplay.simulator.jit.marks import NotCompiledError, Shape


class Number(NamedTuple):
    """A number of this LLVM kind."""

    llvm: str

    @property
    def is_whole(self) -> bool:
        """Whether it is an integer or a truth value."""
        return self.llvm in ("i64", "i1")


WHOLE, TRUTH, REAL, SHORT = (Number(llvm) for llvm in ("i64", "i1", "double", "float"))
MEMORY = {"i1": "i8", "i2": "i16", "i4": "i32", "i8": "i64", "f4": "float", "f8": "double"}


class Layout:
    """A type of numpy, compared by identity: `layout` returns one for equal types."""

    def __init__(self, dtype: np.dtype) -> None:
        """Keep what is asked often."""
        self.dtype, self.size = dtype, dtype.itemsize
        self.align = dtype.alignment if dtype.names is None or dtype.isalignedstruct else 1
        self.is_record = dtype.names is not None


class Record(NamedTuple):
    """The address of a record."""

    layout: Layout


class Array(NamedTuple):
    """The address of an array in C order, and its lengths; `0` stands for a first length that is not known."""

    layout: Layout
    axes: int
    readonly: bool


class Group(NamedTuple):
    """A tuple; `names` of its fields, if they have any."""

    names: tuple[str, ...]
    kinds: tuple[Any, ...]


class Pointer(NamedTuple):
    """The addresses of a hook and of its caller's place for an exception."""

    shape: Shape


class Hooks:
    """The address of a table: the kernel's place for an exception, then its hooks."""

    def __init__(self, names: Sequence[str], shapes: Sequence[Shape]) -> None:
        """`names` and signatures of the hooks, in order."""
        self.names, self.shapes = list(names), list(shapes)
        counts = [shape.listeners or 1 for shape in shapes]
        self.first = [1 + sum(counts[:at]) for at in range(len(counts))]  #: positions in the table
        self.size = 1 + sum(counts)


class Known:
    """An object that is known before the run, such as a function or a module."""

    def __init__(self, value: Any) -> None:
        """Wrap it."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Compare by identity, or as text."""
        same = isinstance(other, Known) and (self.value is other.value)
        return same or (isinstance(other, Known) and isinstance(self.value, str) and self.value == other.value)

    def __hash__(self) -> int:
        """Hash as `__eq__` compares."""
        return hash(self.value) if isinstance(self.value, str) else id(self.value)


class Value(NamedTuple):
    """A kind and its operands."""

    kind: Any
    parts: tuple[str, ...] = ()


NOTHING = Group((), ())
#: By the id of a type, which is kept, or its id may become another's.
_layouts: dict[int, tuple[np.dtype, Layout]] = {}


def layout(dtype: np.dtype) -> Layout:
    """Return the layout of a type; the same one for equal types."""
    if id(dtype) not in _layouts:
        found = next((each for _, each in _layouts.values() if each.dtype == dtype), None)
        _layouts[id(dtype)] = dtype, found or Layout(dtype)
    return _layouts[id(dtype)][1]


def parts_of(kind: Any) -> tuple[str, ...]:
    """Return the LLVM kinds of a value's operands."""
    if isinstance(kind, Number):
        return (kind.llvm,)
    if isinstance(kind, Array):
        return ("ptr", *["i64"] * kind.axes)
    if isinstance(kind, Group):
        return tuple(part for each in kind.kinds for part in parts_of(each))
    if isinstance(kind, Pointer):
        return ("i64", "ptr")
    return () if isinstance(kind, Known) else ("ptr",)


def constant(value: Any) -> Value:
    """Return a Python object as a value: a number, or one that is known."""
    if isinstance(value, bool | np.bool_):
        return Value(TRUTH, ("true" if value else "false",))
    if isinstance(value, int | np.integer):
        return Value(WHOLE, (str(int(value)),))
    if isinstance(value, float):
        return Value(REAL, (real(value),))
    return Value(Known(value))


def real(number: float) -> str:
    """Return a float as LLVM writes it: the bits of a double."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def number_at(value: Value) -> int | None:
    """Return a whole number that is known, or None."""
    text = value.parts[0] if value.kind == WHOLE else ""
    return int(text) if text.lstrip("-").isdigit() else None


def group(values: list[Value], names: tuple[str, ...] = ()) -> Value:
    """Return a tuple of values."""
    return Value(
        Group(names, tuple(each.kind for each in values)), tuple(part for each in values for part in each.parts)
    )


def members(value: Value) -> list[Value]:
    """Return the values of a tuple."""
    found, at = [], 0
    for kind in value.kind.kinds:
        size = len(parts_of(kind))
        found.append(Value(kind, value.parts[at : at + size]))
        at += size
    return found


def common(a: Any, b: Any) -> Any:
    """Return the kind that takes values of both. Raises NotCompiledError."""
    if a == b:
        return a
    if {a, b} == {WHOLE, TRUTH}:
        return WHOLE
    if isinstance(a, Array) and isinstance(b, Array) and a[:2] == b[:2]:
        return Array(a.layout, a.axes, True)
    if isinstance(a, Group) and isinstance(b, Group) and len(a.kinds) == len(b.kinds):
        return Group(a.names, tuple(map(common, a.kinds, b.kinds)))
    raise NotCompiledError(f"one name or expression has two kinds of values: {a} and {b}")


def returned_parts(kind: Any, fails: bool) -> list[str]:
    """Return the LLVM kinds of what a function returns: its status, if it may fail, and its value."""
    return ["i32"] * fails + list(parts_of(kind))


def struct_of(parts: list[str]) -> str:
    """Return the LLVM kind of several values."""
    return "void" if not parts else parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"
