"""Compilation of hooks and functions of arrays through Numba, when no machine code is on disk.

`_nrt=False` forbids allocation, and with it the atomic reference counts around every call of a policy's hook, which
cost ten times the call itself. Division is C's, because no divisor is ever zero.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.extending import register_jitable

from moereplay.simulator.jit import internals
from moereplay.simulator.jit.machine_code import Built
from moereplay.simulator.jit.marks import MARKED, Builtin, NotCompiledError, Reader, Shape

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
    with internals.short_names():
        try:
            dispatcher: Any = njit(signature, pipeline_class=internals.WholeCompiler, **UNWRAPPED, **options)(
                _with_compiled(function, {})
            )
        except (NumbaError, UnsupportedBytecodeError) as error:
            raise NotCompiledError(str(error)) from error
    result = next(iter(dispatcher.overloads.values()))
    entry = result.fndesc.llvm_func_name
    code, undefined = result.library.object_code(entry, vectorised=True)
    return Built(code, entry, undefined)


def _with_compiled(function: FunctionType, made: dict[Any, Any]) -> FunctionType:
    """Copy a function with the marked functions and readers that it names in their compiled form, kept in `made`."""
    named = {line.argval for line in dis.get_instructions(function.__code__) if line.opname == "LOAD_GLOBAL"}
    names = {name: _compiled(value, made) for name, value in function.__globals__.items() if name in named}
    return FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )


def _compiled(value: Any, made: dict[Any, Any]) -> Any:
    if isinstance(value, Builtin):
        return internals.BUILTINS[value.name]
    is_marked = isinstance(value, FunctionType) and value in MARKED
    if not is_marked and not isinstance(value, Reader):
        return value
    if value not in made:
        made[value] = MARKS[MARKED[value]](_with_compiled(value, made)) if is_marked else internals.reader(value)
    return made[value]


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Register a function with Numba as inlined: a call would pass all tables one by one."""
    register_jitable(forceinline=True)(function)


def _signature(shape: Shape, state: np.dtype) -> Any:
    result = types.int64 if shape.returns else types.void
    return result(numba.from_dtype(state), *[types.int64] * shape.numbers)


def hook(adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool) -> Built:
    """Compile an adapter with its hook and the functions that the hook reaches. Raises NotCompiledError."""
    for function in reached:
        _part_of_callers(function)
    with internals.bounds_checks(checked):
        try:  # without lists, reference counts are not needed; they cost more than many hooks
            return built(adapter, _signature(shape, state), _nrt=False)
        except NotCompiledError:
            return built(adapter, _signature(shape, state))


def of_arguments(function: FunctionType, arguments: Iterable[Any]) -> Built:
    """Compile a function for the types of these arguments."""
    return built(function, types.void(*map(numba.typeof, arguments)), **OPTIONS)
