"""Numbers of a state that are the same in most runs, frozen to constants before anything is compiled.

The compiler is given the same functions without what these constants rule out, so that it neither sees nor compiles
hooks that are never called, the log, side buffers and the like. Functions name the state `s`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any


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
