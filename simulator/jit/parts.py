"""Preparation of functions for Numba: replace what they call by compiled parts, and freeze numbers of the state.

Numbers that are the same in most runs become constants before compilation. The compiler then neither sees nor compiles
hooks that are never called, the log, side buffers and the like. Functions name the state `s`.
"""

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


class Freezer(ast.NodeTransformer):
    """Replaces `s["name"]` by constants and removes branches that never run."""

    def __init__(self, constants: Mapping[str, int]) -> None:
        """`constants` by name."""
        self._constants = constants

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Replace a number of the state."""
        name = str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
        if isinstance(node.value, ast.Name) and node.value.id == "s" and name in self._constants:
            return ast.copy_location(ast.Constant(self._constants[name]), node)
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Evaluate a comparison of constants."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if not all(isinstance(side, ast.Constant) for side in sides):
            return node
        return ast.copy_location(ast.Constant(eval(compile(ast.Expression(node), "", "eval"))), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Stop at a constant that decides, and omit those that cannot."""
        deciding, values = isinstance(node.op, ast.Or), []
        for value in map(self.visit, node.values):
            if not isinstance(value, ast.Constant):
                values.append(value)
            elif bool(value.value) == deciding:
                values.append(value)
                break
        if not values:
            return ast.copy_location(ast.Constant(not deciding), node)
        if len(values) == 1:
            return values[0]
        return ast.copy_location(ast.BoolOp(node.op, values), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Keep the side that a constant test selects."""
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    def visit_If(self, node: ast.If) -> Any:
        """Keep the branch that a constant test selects."""
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self._body(node.body if test.value else node.orelse) or ast.copy_location(ast.Pass(), node)
        node.test = test
        node.body, node.orelse = self._body(node.body), self._body(node.orelse)
        return node

    def visit_For(self, node: ast.For) -> Any:
        """Unroll a loop of one iteration, such as `for link in range(1)`."""
        node = ast.For(node.target, self.visit(node.iter), self._body(node.body), node.orelse, lineno=node.lineno)
        leaves = any(isinstance(each, ast.Break | ast.Continue) for line in node.body for each in ast.walk(line))
        if leaves or ast.unparse(node.iter) != "range(1)":
            return node
        return [ast.copy_location(ast.Assign([node.target], ast.Constant(0)), node), *node.body]

    def _body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [each for line in body for each in self._lines(line)]

    def _lines(self, line: ast.stmt) -> list[ast.stmt]:
        made = self.visit(line)
        return made if isinstance(made, list) else [made]
