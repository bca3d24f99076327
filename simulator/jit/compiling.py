"""From marked functions to machine code: the only way to the compiler, taken where nothing is kept.

`_nrt=False` forbids allocation, and with it the atomic reference counts around every call of a policy's hook, which
cost ten times the call itself. Division in kernels is C's, as no divisor is ever zero.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import numba
from numba import njit, types
from numba.core import config
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.extending import register_jitable

from moereplay.simulator.compiled.layout import STATE
from moereplay.simulator.compiled.shapes import Shape
from moereplay.simulator.compiled.variants import frozen
from moereplay.simulator.jit.intrinsics import BUILTINS, HookPointer, reader
from moereplay.simulator.jit.linking import InlinedCompiler, PartCompiler, WholeCompiler
from moereplay.simulator.jit.machine_code import Built
from moereplay.simulator.jit.marks import MARKED, Builtin, NotCompiledError, Reader

OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
UNWRAPPED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
#: How what is marked is compiled.
MARKS: dict[str, Callable] = {
    "inlined": njit(pipeline_class=InlinedCompiler, **UNWRAPPED, **OPTIONS),
    "plain": njit(pipeline_class=PartCompiler, **UNWRAPPED, **OPTIONS),
    "merged": njit(inline="always", **OPTIONS),
}
SETTINGS: Any = config  # its attributes are set when it is imported


def built(
    function: FunctionType,
    signature: Any,
    constants: Mapping[str, int] | None = None,
    vectorised: bool = True,
    **options: Any,
) -> Built:
    """A function and all that it reaches; numbers of the state may be frozen. Raises NotCompiledError."""
    made = FunctionType(
        function.__code__,
        Parts(constants or {}).globals_of(function, function.__code__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    try:
        dispatcher: Any = njit(signature, pipeline_class=WholeCompiler, **UNWRAPPED, **options)(made)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise NotCompiledError(str(error)) from error
    result = next(iter(dispatcher.overloads.values()))
    entry = result.fndesc.llvm_func_name
    code, undefined = result.library.object_code(entry, vectorised)
    return Built(code, entry, undefined)


class Parts:
    """What an entry reaches, as Numba takes it; with constants in place of what it would read of the state."""

    def __init__(self, constants: Mapping[str, int]) -> None:
        """`constants` by the names of `layout.STATE`."""
        self._constants = constants
        self._made: dict[Any, Any] = {}

    def globals_of(self, function: FunctionType, code: CodeType) -> dict[str, Any]:
        """The function's globals, with what this code of it names made."""
        named = {line.argval for line in dis.get_instructions(code) if line.opname == "LOAD_GLOBAL"}
        found = {name: value for name, value in function.__globals__.items() if name in named}
        return function.__globals__ | {name: self._of(value) for name, value in found.items()}

    def _of(self, value: Any) -> Any:
        if isinstance(value, Reader):
            return _reader(value)
        if isinstance(value, Builtin):
            return BUILTINS[value.name]
        if not isinstance(value, FunctionType) or value not in MARKED:
            return value
        if value not in self._made:
            self._made[value] = MARKS[MARKED[value]](self._function(value))
        return self._made[value]

    def _function(self, given: FunctionType) -> FunctionType:
        frozen_here = self._constants and not given.__closure__  # `listeners.notifier` knows its event by one
        code = frozen(given, self._constants) if frozen_here else given.__code__
        globals_ = self.globals_of(given, code)
        return FunctionType(code, globals_, given.__name__, given.__defaults__, given.__closure__)


@cache
def _reader(of: Reader) -> Any:
    return reader(of)


# kernels and hooks


def kernel(entry: FunctionType, hooks: type, shapes: Iterable[Shape], constants: Mapping[str, int]) -> Built:
    """A kernel that takes the state and pointers to these hooks."""
    pointers = types.NamedTuple([_pointers(shape) for shape in shapes], hooks)
    return built(entry, types.void(numba.from_dtype(STATE), pointers), constants, vectorised=False, **OPTIONS)


def _signature(shape: Shape) -> Any:
    answer = types.int64 if shape.answers else types.void
    return answer(numba.from_dtype(STATE), *[types.int64] * shape.numbers)


def _pointers(shape: Shape) -> Any:
    pointer = HookPointer(_signature(shape))
    return types.UniTuple(pointer, shape.listeners) if shape.listeners else pointer


def hook(adapter: FunctionType, shape: Shape, reached: Iterable[FunctionType], checked: bool) -> Built:
    """An adapter with the hook that it calls, which reaches these functions. Raises NotCompiledError."""
    for function in reached:
        _part_of_callers(function)
    with _bounds(checked):
        try:  # without lists no references need be counted, which cost more than many a hook
            return built(adapter, _signature(shape), _nrt=False)
        except NotCompiledError:
            return built(adapter, _signature(shape))


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Known to Numba, for code that calls it; a call would hand over table by table."""
    register_jitable(forceinline=True)(function)


@contextmanager
def _bounds(checked: bool) -> Iterator[None]:
    """What is compiled meanwhile raises IndexError where it would leave an array."""
    before = SETTINGS.BOUNDSCHECK  # not an option of njit: functions that the hook calls would not inherit it
    SETTINGS.BOUNDSCHECK = 1 if checked else before
    try:
        yield
    finally:
        SETTINGS.BOUNDSCHECK = before


def of_arguments(function: FunctionType, arguments: Iterable[Any]) -> Built:
    """A function of numbers and arrays like these."""
    return built(function, types.void(*map(numba.typeof, arguments)), **OPTIONS)
