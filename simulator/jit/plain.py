"""The fallback through Numba's public names alone, used where `canary` fails.

Nothing is kept on disk, so every process compiles again; read-only arrays can be written to; an error in a user's hook
does not name its line. Results are the same.
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

# Hooks in a tuple are first-class functions, which Numba calls experimental.
warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
#: The compiler of each mark; merged functions may return records, which other functions cannot.
MARKS = {"inlined": njit(**OPTIONS), "plain": njit(**OPTIONS), "merged": njit(inline="always", **OPTIONS)}


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Convert a number to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def reader(of: Reader) -> Any:
    """Return the function of a reader, from the state to an array or a record."""
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
    """Return the position of the highest set bit of a non-negative number, from 1; 0 for 0."""
    length = 0
    while number > 0:
        number >>= 1
        length += 1
    return length


@njit
def bit_count(number):
    """Return the number of set bits, of a negative number's two's complement."""
    left, count = np.uint64(number), 0
    while left > np.uint64(0):
        left &= left - np.uint64(1)
        count += 1
    return count


def _whole(answer):  # no annotations: Numba compares them with those of the implementation
    return answer


def _whole_typed(answer):
    if not isinstance(answer, types.Integer | types.Boolean):
        raise TypingError(f"invalid result type {answer}: expected an integer")
    return lambda answer: answer


overload(_whole, inline="always")(_whole_typed)


@njit
def whole_number(answer):
    """Return a hook's integer result; a float is rejected at compilation."""
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
    """Return a function of numbers and arrays that is compiled when it is called."""
    return _njit(of, None, {})


def kernel(entry: FunctionType, constants: Mapping[str, int]) -> Callable[[Any, Any], None]:
    """Return a kernel of the state, a record, and a named tuple of hooks; compiled for each set of hooks."""
    return _njit(entry, None, constants)


def hook(
    adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool
) -> Callable[..., Any]:
    """Return an adapter with its hook and the functions that the hook reaches. Raises NotCompiledError."""
    for each in reached:
        part_of_callers(each, boundscheck=checked)
    return _njit(adapter, _signature(shape, state), {}, boundscheck=checked)


@cache
def absent(state: np.dtype, shape: Shape) -> Callable[..., Any]:
    """Return a placeholder for a hook that a policy lacks: kernels refer to it but never call it."""
    result = 0 if shape.returns else None
    bodies = (lambda s: result, lambda s, a: result, lambda s, a, b: result, lambda s, a, b, c: result)
    return njit(_signature(shape, state))(bodies[shape.numbers])


def _signature(shape: Shape, state: np.dtype) -> Any:
    result = types.int64 if shape.returns else types.void
    return result(from_dtype(state), *[types.int64] * shape.numbers)
