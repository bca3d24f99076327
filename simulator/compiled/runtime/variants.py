"""The fast variant: numbers of a state that are the same in most runs, frozen to constants before anything is compiled.

The compiler is given the same functions without what these constants rule out, so that it neither sees nor compiles
hooks that are never called, the log, side buffers and the like. A variant has an entry of its own in a file of its own,
as Numba's cache on disk tells functions by file, name and types, and does not look at what they call.
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

from policies.hooks import EVENTS
from simulator.compiled.runtime.jit import called, fast, merged
from simulator.compiled.runtime.linking import HintedCompiler

#: One link, passes of one request each, one precision, contract `atomic`, every miss fetched, no listeners, no log: a
#: cached copy is all that there is.
FROZEN = {
    "precisions": 1,
    "n_links": 1,
    "by_key": 1,
    **dict.fromkeys(("sequential", "side_slots", "logs", "keeps", "n_warm", "batched"), 0),
    **dict.fromkeys(("has_want", "has_resolve", "has_substitute", "has_admit", "asks_of_each"), 0),
    **dict.fromkeys((f"listeners_{event}" for event in EVENTS), 0),
}


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Whether a run of these numbers can be of the fast variant."""
    return all(numbers[name] == value for name, value in FROZEN.items())


def frozen_entry(entry: Callable) -> Callable:
    """A kernel's entry that calls the frozen variants of what it calls."""
    assert isinstance(entry, FunctionType)
    return FunctionType(entry.__code__, _globals_of(entry, entry.__code__), entry.__name__)


@cache
def _frozen(function: Any) -> Any:
    """A function of this package, to be compiled, with FROZEN in place of what it would read of the state."""
    given = function.py_func
    lines, first = inspect.getsourcelines(given)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    tree = ast.increment_lineno(ast.fix_missing_locations(Freezer().visit(tree)), first - 1)
    names: dict[str, Any] = {}
    exec(compile(tree, given.__code__.co_filename, "exec"), names)
    code = names[given.__name__].__code__
    made = FunctionType(code, _globals_of(given, code), given.__name__, given.__defaults__)
    if function.targetoptions.get("inline") == "always":
        return merged(made)
    return (fast if function._compiler.pipeline_class is HintedCompiler else called)(made)


def _globals_of(function: FunctionType, code: CodeType) -> dict[str, Any]:
    """The function's globals, with what this code calls frozen."""
    named = {line.argval for line in dis.get_instructions(code) if line.opname == "LOAD_GLOBAL"}
    called_here = {name: value for name, value in function.__globals__.items() if name in named}
    return function.__globals__ | {
        name: _frozen(value) for name, value in called_here.items() if hasattr(value, "py_func")
    }


class Freezer(ast.NodeTransformer):
    """Puts FROZEN in place of `s["name"]`, and leaves out what is never run then."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """A number of the state."""
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.value, ast.Name) and node.value.id == "s" and name in FROZEN:
            return ast.copy_location(ast.Constant(FROZEN[name]), node)
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
