"""Marks on functions to be compiled, and their access to a run's arrays; imports no compiler.

The whole state of a run is one record of numbers, which include the addresses of its arrays. So every function takes
one pointer, and the compiler need not pass a hundred arrays from call to call. `compiling` compiles marked functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable)

#: NUMBA_DISABLE_JIT=1: run as plain Python, over a state that holds its arrays by name.
IS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
#: Functions to be compiled with their callers, with their mark.
MARKED: dict[Callable, str] = {}
#: Those of them whose loops are vectorized in kernels: they have many iterations.
VECTORIZED: set[Callable] = set()


def fast(function: F) -> F:
    """Mark a function that is inlined into its callers: it has a line or two, or only one caller."""
    MARKED[function] = "inlined"
    return function


def called(function: F) -> F:
    """Mark a function that the compiler may inline or call."""
    MARKED[function] = "plain"
    return function


def vectorized(function: F) -> F:
    """Mark a function like `called`, whose loops have many iterations: over all experts of a layer, say."""
    VECTORIZED.add(function)
    return called(function)


def merged(function: F) -> F:
    """Mark a function that is merged into its caller before compilation, because functions cannot return its result."""
    MARKED[function] = "merged"
    return function


class Shape(NamedTuple):
    """Signature of a hook as a kernel calls it: its numbers besides the state, its result and its listeners."""

    numbers: int
    returns: bool  #: a number
    listeners: int = 0  #: number of hooks of an event


class NotCompiledError(Exception):
    """The compiler rejects a function; the message says why."""


class Reader(NamedTuple):
    """Stands for a function from the state to one of its arrays, or without axes to one of its records."""

    name: str
    dtype: np.dtype
    axes: tuple[str, ...] = ()  #: the numbers of the state that give its shape
    readonly: bool = False
    whole: bool = False


class Column(NamedTuple):
    """Where a column of a table lies: a column of an array of records, in every row or in every `every`-th."""

    name: str
    array: str
    record: np.dtype
    field: str
    every: str = ""  #: a number of the state


class Table(NamedTuple):
    """Stands for a function from the state to a table that hooks read: `table[i]["column"]`, `len(table)`."""

    name: str
    length: str  #: a number of the state
    columns: tuple[Column, ...]


class PlainTable:
    """A table in plain Python."""

    def __init__(self, of: Table, s: Any) -> None:
        """Read the arrays of a state."""
        self._of, self._s = of, s

    def __len__(self) -> int:
        return int(self._s[self._of.length])

    def __getitem__(self, at: int) -> dict[str, int]:
        row, found = range(len(self))[at], dict[str, int]()
        for name, array, _, field, every in self._of.columns:
            found[name] = int(self._s.arrays[array][row * (int(self._s[every]) if every else 1)][field])
        return found


class Builtin(NamedTuple):
    """Stands for an entry of `BUILTINS`."""

    name: str


def array_reader(name: str, dtype: Any, *axes: str, readonly: bool = False, whole: bool = False) -> Any:
    """Return a function from the state to an array; `axes` are the numbers of the state that give its shape.

    Unless it is `whole`, the array may be indexed but neither sliced nor measured: its first axis is declared empty, so
    that Numba's additions for negative indices are optimized away.
    """
    return (lambda s: s.arrays[name]) if IS_PYTHON else Reader(name, np.dtype(dtype), axes, readonly, whole)


def table_reader(of: Table) -> Any:
    """Return a function from the state to a table."""
    return (lambda s: PlainTable(of, s)) if IS_PYTHON else of


def record_reader(name: str, dtype: np.dtype) -> Any:
    """Return a function from the state to one of its records."""
    return (lambda s: s.arrays[name][0]) if IS_PYTHON else Reader(name, dtype)


#: The position of the highest set bit of a non-negative number, from 1; 0 for 0.
bit_length: Any = (lambda number: int(number).bit_length()) if IS_PYTHON else Builtin("bit_length")
#: The number of set bits; of a negative number, those of its two's complement.
bit_count: Any = (lambda number: (int(number) & (1 << 64) - 1).bit_count()) if IS_PYTHON else Builtin("bit_count")
#: A hook's result. A hook that may return a float does not compile: Numba would truncate it silently.
whole_number: Any = (lambda answer: answer) if IS_PYTHON else Builtin("whole_number")


@called
def load_ahead(record):
    """Ask the processor for a record that is used soon; the translation has an instruction for it (`expressions`)."""
