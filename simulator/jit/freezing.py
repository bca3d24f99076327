"""Numbers of the state that become constants before compilation.

The compiler then neither sees nor compiles hooks that are never called, the log, side buffers and the like. Functions
name the state `s`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


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
