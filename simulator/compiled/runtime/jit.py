"""How the functions of this package are compiled, and how they reach a run's arrays.

A run's whole state is one record of numbers: among them the addresses of its arrays. So every function takes
one pointer, and the compiler need not carry a hundred arrays from call to call. `_nrt=False` forbids allocation, and
with it the atomic reference counts around every call of a policy's hook, which cost ten times the call itself. Division
is C's, as no divisor is ever zero.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from simulator.compiled.runtime.linking import HintedCompiler, PartCompiler, WholeCompiler

OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
#: What Python calls; what machine code calls through a pointer.
ENTRY: dict[str, Any] = {"pipeline_class": WholeCompiler, "nogil": True, **OPTIONS}
UNWRAPPED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
WHOLE: dict[str, Any] = {"pipeline_class": WholeCompiler, **UNWRAPPED}
SETTINGS: Any = config  # its attributes are set when it is imported
#: NUMBA_DISABLE_JIT=1: the same functions as plain Python, over a state that keeps its arrays by name.
IS_PYTHON = bool(SETTINGS.DISABLE_JIT)
WORD = ir.IntType(64)

#: A line or two, or called from one place only: merged unless it is large.
fast = njit(pipeline_class=HintedCompiler, **UNWRAPPED, **OPTIONS)
#: Merged or called, as the compiler sees fit.
called = njit(pipeline_class=PartCompiler, **UNWRAPPED, **OPTIONS)
#: Put into its caller before either is compiled: what it returns cannot be returned.
merged = njit(inline="always", **OPTIONS)


def array_reader(name: str, dtype: Any, *axes: str, readonly: bool = False, whole: bool = False) -> Any:
    """A function from the state to one of its arrays; `axes` are the numbers of the state that say its shape.

    Unless it is `whole`, the array may be indexed but neither cut nor measured: it says that its first axis is empty,
    so that nothing is left of the additions that Numba makes for indices from the end.
    """
    if IS_PYTHON:
        return lambda s: s.arrays[name]
    size = np.dtype(dtype).itemsize
    kind = types.Array(numba.from_dtype(np.dtype(dtype)), len(axes), "C", readonly=readonly)

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(kind)(context, builder)
            first = _number(builder, s, arguments[0], axes[0]) if whole else ir.Constant(WORD, 0)
            shape = [first, *(_number(builder, s, arguments[0], axis) for axis in axes[1:])]
            strides = [ir.Constant(WORD, size)]
            for length in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], length))
            data = builder.inttoptr(_number(builder, s, arguments[0], f"at_{name}"), array.data.type)
            populate_array(array, data, shape, strides, ir.Constant(WORD, size), meminfo=None)
            return array._getvalue()

        return kind(s), generate

    return read


def record_reader(name: str, dtype: np.dtype) -> Any:
    """A function from the state to one of its records."""
    if IS_PYTHON:
        return lambda s: s.arrays[name][0]
    kind = numba.from_dtype(dtype)

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(_number(builder, s, arguments[0], f"at_{name}"), context.get_value_type(kind))

        return kind(s), generate

    return read


def _bit_length(typing: Any, number: Any) -> Any:
    """The position of the highest bit of a number that is not negative, from 1; 0 of 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(WORD, WORD.width), zeros)

    return types.int64(types.int64), generate


bit_length: Any = (lambda number: int(number).bit_length()) if IS_PYTHON else intrinsic(_bit_length)


def _bit_count(typing: Any, number: Any) -> Any:
    """How many bits of a number are set, of a negative one's two's complement."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


bit_count: Any = (
    (lambda number: (int(number) & (1 << WORD.width) - 1).bit_count()) if IS_PYTHON else intrinsic(_bit_count)
)


def _whole_number(typing: Any, answer: Any) -> Any:
    """What a hook answers; one that may answer with a float does not compile, as it would be cut without a word."""
    if not isinstance(answer, types.Integer | types.Boolean):
        raise TypingError(f"it answers with {answer}, where an integer is expected")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return answer(answer), generate


whole_number: Any = (lambda answer: answer) if IS_PYTHON else intrinsic(_whole_number)


def _number(builder: Any, kind: Any, state: Any, name: str) -> Any:
    """A length or an address, which do not change in a run: the compiler need not read it again after every store."""
    load = builder.load(cgutils.get_record_member(builder, state, kind.offset(name), WORD))
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load
