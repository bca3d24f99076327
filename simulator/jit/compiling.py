"""Compilation of hooks and functions of arrays through Numba, when no machine code is on disk.

`_nrt=False` forbids allocation, and with it the atomic reference counts around every call of a policy's hook, which
cost ten times the call itself. Division is C's, because no divisor is ever zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
#: The compiler of each mark.
MARKS: dict[str, Callable] = {
    "inlined": njit(pipeline_class=internals.InlinedCompiler, **UNWRAPPED, **OPTIONS),
    "plain": njit(pipeline_class=internals.PartCompiler, **UNWRAPPED, **OPTIONS),
    "merged": njit(inline="always", **OPTIONS),
}


def built(
    function: FunctionType,
    signature: Any,
    **options: Any,
) -> Built:
    """Compile a function with all that it calls. Raises NotCompiledError."""
    made = with_globals(
        function,
        Parts({}, MARKS, internals.reader, internals.BUILTINS).globals_of(function, function.__code__),
    )
    try:
        dispatcher: Any = njit(signature, pipeline_class=internals.WholeCompiler, **UNWRAPPED, **options)(made)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise NotCompiledError(str(error)) from error
    result = next(iter(dispatcher.overloads.values()))
    entry = result.fndesc.llvm_func_name
    code, undefined = result.library.object_code(entry, vectorised=True)
    return Built(code, entry, undefined)


def _signature(shape: Shape, state: np.dtype) -> Any:
    result = types.int64 if shape.returns else types.void
    return result(numba.from_dtype(state), *[types.int64] * shape.numbers)


def hook(adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool) -> Built:
    """Compile an adapter with its hook and the functions that the hook reaches. Raises NotCompiledError."""
    for function in reached:
        part_of_callers(function)
    with internals.bounds_checks(checked):
        try:  # without lists, reference counts are not needed; they cost more than many hooks
            return built(adapter, _signature(shape, state), _nrt=False)
        except NotCompiledError:
            return built(adapter, _signature(shape, state))


def of_arguments(function: FunctionType, arguments: Iterable[Any]) -> Built:
    """Compile a function for the types of these arguments."""
    return built(function, types.void(*map(numba.typeof, arguments)), **OPTIONS)
