"""What a function reaches, in the form in which Numba takes it."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from numba.extending import register_jitable

from moereplay.simulator.jit.freezing import frozen
from moereplay.simulator.jit.marks import MARKED, Builtin, Reader


class Parts:
    """What an entry reaches, as Numba takes it; with constants in place of what it would read of the state."""

    def __init__(
        self,
        constants: Mapping[str, int],
        marks: Mapping[str, Callable],
        reader: Callable[[Reader], Any],
        builtins: Mapping[str, Any],
    ) -> None:
        """`constants` by the names of the state's numbers; `marks`: how what is marked is compiled."""
        self._constants, self._marks, self._reader, self._builtins = constants, marks, cache(reader), builtins
        self._made: dict[Any, Any] = {}

    def globals_of(self, function: FunctionType, code: CodeType) -> dict[str, Any]:
        """The function's globals, with what this code of it names made."""
        named = {line.argval for line in dis.get_instructions(code) if line.opname == "LOAD_GLOBAL"}
        found = {name: value for name, value in function.__globals__.items() if name in named}
        return function.__globals__ | {name: self._of(value) for name, value in found.items()}

    def _of(self, value: Any) -> Any:
        if isinstance(value, Reader):
            return self._reader(value)
        if isinstance(value, Builtin):
            return self._builtins[value.name]
        if not isinstance(value, FunctionType) or value not in MARKED:
            return value
        if value not in self._made:
            self._made[value] = self._marks[MARKED[value]](self._function(value))
        return self._made[value]

    def _function(self, given: FunctionType) -> FunctionType:
        frozen_here = self._constants and not given.__closure__  # `listeners.notifier` knows its event by one
        code = frozen(given, self._constants) if frozen_here else given.__code__
        return with_globals(given, self.globals_of(given, code), code)


def with_globals(function: FunctionType, names: dict[str, Any], code: CodeType | None = None) -> FunctionType:
    """A copy of a function with other globals, and perhaps other code."""
    return FunctionType(
        code or function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


@cache
def part_of_callers(function: FunctionType, **options: Any) -> None:
    """Make a function known to Numba, for code that calls it; a call would hand over table by table."""
    register_jitable(forceinline=True, **options)(function)
