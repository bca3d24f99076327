"""From marked functions to machine code: the only way to the compiler, taken where nothing is kept.

`_nrt=False` forbids allocation, and with it the atomic reference counts around every call of a policy's hook, which
cost ten times the call itself. Division in kernels is C's, as no divisor is ever zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from moereplay.simulator.jit import internals
from moereplay.simulator.jit.machine_code import Built
from moereplay.simulator.jit.marks import NotCompiledError, Shape
from moereplay.simulator.jit.parts import Parts, part_of_callers, with_globals

OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
UNWRAPPED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
#: How what is marked is compiled.
MARKS: dict[str, Callable] = {
    "inlined": njit(pipeline_class=internals.InlinedCompiler, **UNWRAPPED, **OPTIONS),
    "plain": njit(pipeline_class=internals.PartCompiler, **UNWRAPPED, **OPTIONS),
    "merged": njit(inline="always", **OPTIONS),
}


def built(
    function: FunctionType,
    signature: Any,
    constants: Mapping[str, int] | None = None,
    vectorised: bool = True,
    **options: Any,
) -> Built:
    """A function and all that it reaches; numbers of the state may be frozen. Raises NotCompiledError."""
    made = with_globals(
        function,
        Parts(constants or {}, MARKS, internals.reader, internals.BUILTINS).globals_of(function, function.__code__),
    )
    try:
        dispatcher: Any = njit(signature, pipeline_class=internals.WholeCompiler, **UNWRAPPED, **options)(made)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise NotCompiledError(str(error)) from error
    result = next(iter(dispatcher.overloads.values()))
    entry = result.fndesc.llvm_func_name
    code, undefined = result.library.object_code(entry, vectorised)
    return Built(code, entry, undefined)


# kernels and hooks


def kernel(
    entry: FunctionType, state: np.dtype, hooks: type, shapes: Iterable[Shape], constants: Mapping[str, int]
) -> Built:
    """A kernel that takes the state and pointers to these hooks."""
    pointers = types.NamedTuple([_pointers(shape, state) for shape in shapes], hooks)
    return built(entry, types.void(numba.from_dtype(state), pointers), constants, vectorised=False, **OPTIONS)


def _signature(shape: Shape, state: np.dtype) -> Any:
    answer = types.int64 if shape.answers else types.void
    return answer(numba.from_dtype(state), *[types.int64] * shape.numbers)


def _pointers(shape: Shape, state: np.dtype) -> Any:
    pointer = internals.HookPointer(_signature(shape, state))
    return types.UniTuple(pointer, shape.listeners) if shape.listeners else pointer


def hook(adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool) -> Built:
    """An adapter with the hook that it calls, which reaches these functions. Raises NotCompiledError."""
    for function in reached:
        part_of_callers(function)
    with internals.bounds_checks(checked):
        try:  # without lists no references need be counted, which cost more than many a hook
            return built(adapter, _signature(shape, state), _nrt=False)
        except NotCompiledError:
            return built(adapter, _signature(shape, state))


def of_arguments(function: FunctionType, arguments: Iterable[Any]) -> Built:
    """A function of numbers and arrays like these."""
    return built(function, types.void(*map(numba.typeof, arguments)), **OPTIONS)
