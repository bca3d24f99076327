"""Preparation of functions for Numba: replace what they call by compiled parts, and freeze numbers of the state."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from numba.extending import register_jitable

from moereplay.simulator.jit.freezing import Freezer
from moereplay.simulator.jit.marks import MARKED, Builtin, Reader


class Parts:
    """The compiled form of all functions that an entry reaches, with frozen numbers of the state."""

    def __init__(
        self,
        constants: Mapping[str, int],
        marks: Mapping[str, Callable],
        reader: Callable[[Reader], Any],
        builtins: Mapping[str, Any],
    ) -> None:
        """`constants` by the names of the state's numbers; `marks`: the compiler of each mark."""
        self._constants, self._marks, self._reader, self._builtins = constants, marks, cache(reader), builtins
        self._made: dict[Any, Any] = {}

    def globals_of(self, function: FunctionType, code: CodeType) -> dict[str, Any]:
        """Return the function's globals, with the names in `code` replaced by their compiled form."""
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
        frozen_here = self._constants and not given.__closure__  # the closures of `state.notifier` hold their event
        code = frozen(given, self._constants) if frozen_here else given.__code__
        return with_globals(given, self.globals_of(given, code), code)


def with_globals(function: FunctionType, names: dict[str, Any], code: CodeType | None = None) -> FunctionType:
    """Copy a function with other globals, and optionally other code."""
    return FunctionType(
        code or function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


@cache
def part_of_callers(function: FunctionType, **options: Any) -> None:
    """Register a function with Numba as inlined: a call would pass all tables one by one."""
    register_jitable(forceinline=True, **options)(function)


# freezing numbers of the state


def frozen(function: FunctionType, constants: Mapping[str, int]) -> CodeType:
    """Return the function's code with constants in place of numbers of the state."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    tree = ast.increment_lineno(ast.fix_missing_locations(Freezer(constants).visit(tree)), first - 1)
    names: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), names)
    return names[function.__name__].__code__
