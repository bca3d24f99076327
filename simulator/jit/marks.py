"""What is to be compiled, and how it reaches a run's arrays. Nothing here needs the compiler.

A run's whole state is one record of numbers: among them the addresses of its arrays. So every function takes one
pointer, and the compiler need not carry a hundred arrays from call to call. Functions and readers are marked here, and
`compiling` makes machine code of them where none is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable)

#: NUMBA_DISABLE_JIT=1: the same functions as plain Python, over a state that keeps its arrays by name.
IS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
#: Functions that are compiled with what calls them, and how.
MARKED: dict[Callable, str] = {}


def fast(function: F) -> F:
    """A line or two, or called from one place only: part of what calls it."""
    MARKED[function] = "inlined"
    return function


def called(function: F) -> F:
    """Merged or called, as the compiler sees fit."""
    MARKED[function] = "plain"
    return function


def merged(function: F) -> F:
    """Put into its caller before either is compiled: what it returns cannot be returned."""
    MARKED[function] = "merged"
    return function


class Shape(NamedTuple):
    """What a kernel knows of a hook that it calls: what goes in beside the state, and what comes out."""

    numbers: int
    answers: bool  #: with a number
    listeners: int = 0  #: how many hooks there are, for an event


class NotCompiledError(Exception):
    """The compiler refuses a function, and says why."""


class Reader(NamedTuple):
    """Stands for a function from the state to one of its arrays, or without axes to one of its records."""

    name: str
    dtype: np.dtype
    axes: tuple[str, ...] = ()  #: the numbers of the state that say its shape
    readonly: bool = False
    whole: bool = False


class Builtin(NamedTuple):
    """Stands for one of `intrinsics`."""

    name: str


def array_reader(name: str, dtype: Any, *axes: str, readonly: bool = False, whole: bool = False) -> Any:
    """A function from the state to one of its arrays; `axes` are the numbers of the state that say its shape.

    Unless it is `whole`, the array may be indexed but neither cut nor measured: it says that its first axis is empty,
    so that nothing is left of the additions that Numba makes for indices from the end.
    """
    return (lambda s: s.arrays[name]) if IS_PYTHON else Reader(name, np.dtype(dtype), axes, readonly, whole)


def record_reader(name: str, dtype: np.dtype) -> Any:
    """A function from the state to one of its records."""
    return (lambda s: s.arrays[name][0]) if IS_PYTHON else Reader(name, dtype)


#: The position of the highest bit of a number that is not negative, from 1; 0 of 0.
bit_length: Any = (lambda number: int(number).bit_length()) if IS_PYTHON else Builtin("bit_length")
#: How many bits of a number are set, of a negative one's two's complement.
bit_count: Any = (lambda number: (int(number) & (1 << 64) - 1).bit_count()) if IS_PYTHON else Builtin("bit_count")
#: What a hook answers; one that may answer with a float does not compile, as it would be cut without a word.
whole_number: Any = (lambda answer: answer) if IS_PYTHON else Builtin("whole_number")
