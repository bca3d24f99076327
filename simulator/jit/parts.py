"""What a function reaches, in the form in which Numba takes it."""

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
        frozen_here = self._constants and not given.__closure__  # `state.notifier` knows its event by one
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


# freezing: numbers of the state that become constants


def frozen(function: FunctionType, constants: Mapping[str, int]) -> CodeType:
    """The function's code with these constants in place of what it would read of the state."""
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
    """Puts constants in place of `s["name"]`, and leaves out what is never run then."""

    def __init__(self, constants: Mapping[str, int]) -> None:
        """`constants` by name."""
        self._constants = constants

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """A number of the state."""
        name = str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
        if isinstance(node.value, ast.Name) and node.value.id == "s" and name in self._constants:
            return ast.copy_location(ast.Constant(self._constants[name]), node)
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Two constants."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if not all(isinstance(side, ast.Constant) for side in sides):
            return node
        return ast.copy_location(ast.Constant(eval(compile(ast.Expression(node), "", "eval"))), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """What decides ends it; what cannot decide is left out."""
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
        """The side that is left."""
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    def visit_If(self, node: ast.If) -> Any:
        """The branch that is left."""
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self._body(node.body if test.value else node.orelse) or ast.copy_location(ast.Pass(), node)
        node.test = test
        node.body, node.orelse = self._body(node.body), self._body(node.orelse)
        return node

    def visit_For(self, node: ast.For) -> Any:
        """A loop of one turn is no loop: `for link in range(1)`."""
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
