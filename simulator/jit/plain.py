"""The same functions through Numba's public names alone: what is used where `canary` finds that the others changed.

Nothing is kept on disk, so every process compiles again; arrays that policies may only read can be written to; an error
of a user's hook does not name its line. Results are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.core.errors import NumbaError, NumbaExperimentalFeatureWarning, TypingError, UnsupportedBytecodeError
from numba.extending import intrinsic, overload

from moereplay.simulator.jit.marks import NotCompiledError, Reader, Shape
from moereplay.simulator.jit.parts import Parts, part_of_callers, with_globals

#: Hooks in a tuple are functions as values, which Numba calls experimental.
warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
#: How what is marked is compiled; what is merged may return records, which functions cannot.
MARKS = {"inlined": njit(**OPTIONS), "plain": njit(**OPTIONS), "merged": njit(inline="always", **OPTIONS)}


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """A number as an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def reader(of: Reader) -> Any:
    """The function that a reader stands for: an array or a record where the state says that it lies."""
    at, dtype, axes = f"at_{of.name}", of.dtype, of.axes
    if not axes:
        return njit(inline="always")(lambda s: carray(pointer(s[at]), 1, dtype)[0])
    a, b, c, d = (*axes, "", "", "")[:4]
    return njit(
        (
            lambda s: carray(pointer(s[at]), (s[a],), dtype),
            lambda s: carray(pointer(s[at]), (s[a], s[b]), dtype),
            lambda s: carray(pointer(s[at]), (s[a], s[b], s[c]), dtype),
            lambda s: carray(pointer(s[at]), (s[a], s[b], s[c], s[d]), dtype),
        )[len(axes) - 1]
    )


@njit
def bit_length(number):
    """The position of the highest bit of a number that is not negative, from 1; 0 of 0."""
    length = 0
    while number > 0:
        number >>= 1
        length += 1
    return length


@njit
def bit_count(number):
    """How many bits of a number are set, of a negative one's two's complement."""
    left, count = np.uint64(number), 0
    while left > np.uint64(0):
        left &= left - np.uint64(1)
        count += 1
    return count


def _whole(answer):  # no annotations: Numba compares them with those of the implementation
    return answer


def _whole_typed(answer):
    if not isinstance(answer, types.Integer | types.Boolean):
        raise TypingError(f"it answers with {answer}, where an integer is expected")
    return lambda answer: answer


overload(_whole, inline="always")(_whole_typed)


@njit
def whole_number(answer):
    """What a hook answers; a float is refused."""
    return _whole(answer)


BUILTINS = {"bit_length": bit_length, "bit_count": bit_count, "whole_number": whole_number}


def _njit(function: FunctionType, signature: Any, constants: Mapping[str, int], **more: Any) -> Any:
    parts = Parts(constants, MARKS, reader, BUILTINS)
    made = with_globals(function, parts.globals_of(function, function.__code__))
    try:
        return njit(signature, **OPTIONS, **more)(made) if signature else njit(**OPTIONS)(made)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise NotCompiledError(str(error)) from error


def function(of: FunctionType) -> Callable[..., None]:
    """A function of numbers and arrays, compiled when it is called."""
    return _njit(of, None, {})


def kernel(entry: FunctionType, constants: Mapping[str, int]) -> Callable[[Any, Any], None]:
    """A kernel of the state, a record, and a named tuple of hooks; compiled for each set of hooks."""
    return _njit(entry, None, constants)


def hook(
    adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool
) -> Callable[..., Any]:
    """An adapter with the hook that it calls, which reaches these functions. Raises NotCompiledError."""
    for each in reached:
        part_of_callers(each, boundscheck=checked)
    return _njit(adapter, _signature(shape, state), {}, boundscheck=checked)


@cache
def absent(state: np.dtype, shape: Shape) -> Callable[..., Any]:
    """In place of a hook that a policy does not give: kernels name it, and call it never."""
    answer = 0 if shape.answers else None
    bodies = (lambda s: answer, lambda s, a: answer, lambda s, a, b: answer, lambda s, a, b, c: answer)
    return njit(_signature(shape, state))(bodies[shape.numbers])


def _signature(shape: Shape, state: np.dtype) -> Any:
    answer = types.int64 if shape.answers else types.void
    return answer(from_dtype(state), *[types.int64] * shape.numbers)
