"""Translation of a kernel's functions into one module in LLVM's language, without Numba.

Numba needs a thirtieth of a second for a function, and a kernel has three hundred. They use a small part of Python:
numbers, records, arrays, loops and calls of marked functions, with Numba's meaning; anything else is refused.

A function returns its values in registers, after a status if it may fail. Only hooks fail: the status is theirs, and
callers return it. A function is translated once for each set of kinds of arguments. If a variable turns out to hold
truth values and whole numbers, its function is translated again with whole numbers from the start.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from moereplay.simulator.jit.expressions import Block, Expressions
from moereplay.simulator.jit.machine_code import Built, machine_code_of
from moereplay.simulator.jit.marks import MARKED, VECTORIZED, NotCompiledError, Reader, Shape
from moereplay.simulator.jit.values import (
    NOTHING,
    WHOLE,
    Array,
    Group,
    Hooks,
    Record,
    Value,
    common,
    layout,
    members,
    number_at,
    parts_of,
    returned_parts,
    struct_of,
)

ENTRY = "kernel"
#: The numbers of a run, and what attributes of the state stand for.
State = tuple[np.dtype, Mapping[str, Reader]]
VECTORIZE = ", !llvm.loop !2"


class Freezer(ast.NodeTransformer):
    """Replaces numbers `s["name"]` of the state by constants and removes branches that never run.

    The compiler then neither sees nor compiles hooks that are never called, the log, side buffers and the like.
    """

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
        made = map(self.visit, body)
        return [line for each in made for line in (each if isinstance(each, list) else [each])]


class Function(Expressions):
    """One function for one set of kinds of arguments."""

    def __init__(
        self, given: FunctionType, of_module: Module, arguments: tuple[Any, ...], kinds: dict[str, Any]
    ) -> None:
        """`kinds` of variables, from an earlier attempt."""
        super().__init__(given, of_module)
        self.kinds, self._arguments = kinds, arguments
        self._loops: list[tuple[Block, Block]] = []  # where `continue` and `break` go
        self.has_widened = False
        self.loop_hint = VECTORIZE if given in VECTORIZED else ""

    def translate(self) -> None:
        """Translate the body."""
        tree = self._module.tree_of(self.given)
        for name, kind, at in self._parameters():
            self.set(name, Value(kind, tuple(f"%a{at}.{part}" for part in range(len(parts_of(kind))))))
        self._body(tree.body)
        self.end(("value", Value(NOTHING)))

    def _parameters(self) -> Iterable[tuple[str, Any, int]]:
        """Yield the name, the kind and the number of each parameter; `*numbers` becomes a tuple."""
        code, kinds = self.given.__code__, list(self._arguments)
        count = code.co_argcount
        if code.co_flags & inspect.CO_VARARGS:
            kinds[count:] = [Group((), tuple(kinds[count:]))]
            count += 1
        if len(kinds) != count:
            raise NotCompiledError(f"{len(kinds)} arguments of {self.given.__name__}, which takes {count}")
        return zip(code.co_varnames, kinds, range(count), strict=False)

    def set(self, name: str, value: Value) -> None:
        """Set a variable."""
        if name not in self.kinds:
            self.kinds[name] = value.kind
        kind = common(self.kinds[name], value.kind)
        if kind != self.kinds[name]:
            self.kinds[name], self.has_widened = kind, True
        stored = zip(parts_of(kind), self.convert(value, kind).parts, strict=True)
        for at, (llvm, part) in enumerate(stored):
            self.line(f"store {llvm} {part}, ptr %{name}.{at}")

    # statements

    def _body(self, body: list[ast.stmt]) -> None:
        """Translate statements up to the first after which nothing is reached."""
        for each in body:
            if self.block is None:
                return
            translate = getattr(self, f"_on_{type(each).__name__.lower()}", None)
            try:
                if translate is None:
                    raise NotCompiledError(f"{ast.unparse(each)!r}: a statement that kernels do not use")
                translate(each)
            except NotCompiledError as error:
                if ": line " in str(error):
                    raise
                raise NotCompiledError(f"{self.given.__code__.co_filename}: line {each.lineno}: {error}") from None

    def _on_expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def _on_pass(self, node: ast.Pass) -> None:
        pass

    def _on_assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        self._assign(target, self.value(node.value))

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Tuple):
            for each, one in zip(target.elts, members(value), strict=True):
                self._assign(each, one)
        elif isinstance(target, ast.Name):
            self.set(target.id, value)
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice):
            self._fill(target, value)
        elif isinstance(target, ast.Subscript):
            of, place = self.place(target)
            if of == "value" and isinstance(place.kind, Record) and value.kind == place.kind:
                self.copy(place.parts[0], value.parts[0], place.kind.layout.size)
                return
            if of != "number":
                raise NotCompiledError(f"{ast.unparse(target)!r} is set: it is not a number that may be written")
            self.store(place.parts[0], place.kind, value)  # pyright: ignore[reportArgumentType]
        else:
            raise NotCompiledError(f"{ast.unparse(target)!r} is set")

    def _fill(self, target: ast.Subscript, value: Value) -> None:
        of = self.value(target.value)
        if ast.unparse(target.slice) != ":" or not isinstance(of.kind, Array) or of.kind.readonly:
            raise NotCompiledError(f"{ast.unparse(target)!r} is set")
        self.fill(of, value)

    def _on_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            before = self.variable(node.target.id)
            self.set(node.target.id, self.operation(node.op, before, self.value(node.value)))
            return
        assert isinstance(node.target, ast.Subscript)
        of, place = self.place(node.target)
        if of != "number":
            raise NotCompiledError(f"{ast.unparse(node.target)!r} is set: it is not a number that may be written")
        before = self.load(place.parts[0], place.kind)
        self.store(place.parts[0], place.kind, self.operation(node.op, before, self.value(node.value)))

    def _on_return(self, node: ast.Return) -> None:
        none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        self.end(("value", Value(NOTHING) if none or node.value is None else self.value(node.value)))

    def _on_if(self, node: ast.If) -> None:
        yes, no, after = self.new_block(), self.new_block(), self.new_block()
        self.test(node.test, yes, no)
        for block, body in ((yes, node.body), (no, node.orelse)):
            self.block = block
            self._body(body)
            self.jump(after)
        self.block = after if any(f"%{after.name}" in str(each.end) for each in self.blocks) else None
        if self.block is None:
            self.blocks.remove(after)

    def _on_while(self, node: ast.While) -> None:
        begin, turn, after = self.new_block(), self.new_block(), self.new_block()
        self.jump(begin)
        self.block = begin
        self.test(node.test, turn, after)
        self.block = turn
        self._loops.append((begin, after))
        self._body(node.body)
        self._loops.pop()
        self.jump(begin)
        self.block = after

    def _on_break(self, node: ast.Break) -> None:
        self.jump(self._loops[-1][1])

    def _on_continue(self, node: ast.Continue) -> None:
        self.jump(self._loops[-1][0])

    def _on_for(self, node: ast.For) -> None:
        assert isinstance(node.target, ast.Name)
        start, stop, step, array = "0", "0", 1, None
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range":
            given = [self.value(each) for each in node.iter.args]
            numbers = [self.number(each, WHOLE) for each in given]
            start, stop = (numbers[0], numbers[1]) if len(numbers) > 1 else ("0", numbers[0])
            step = number_at(given[2]) if len(given) > 2 else 1
        else:
            array = self.value(node.iter)
            if not isinstance(array.kind, Array) or array.kind.axes != 1 or array.kind.layout.is_record:
                raise NotCompiledError(f"{ast.unparse(node.iter)!r}: a loop over neither a range nor numbers")
            stop = array.parts[1]
        if not step:
            raise NotCompiledError(f"{ast.unparse(node.iter)!r}: a step that is not known")
        name = node.target.id

        def turn(at: str, following: Block, after: Block) -> None:
            self.set(name, self._item(array, at) if array else Value(WHOLE, (at,)))
            self._loops.append((following, after))
            self._body(node.body)
            self._loops.pop()

        self.loop(start, stop, step, turn)

    def _item(self, array: Value, at: str) -> Value:
        kind = array.kind.layout
        return self.load(self.behind(array.parts[0], self.times(at, kind.size)), kind)

    # text

    def returned(self) -> Any:
        """Return the kind of the result."""
        kinds = [each.end[1].kind for each in self.blocks if isinstance(each.end, tuple) and each.end[0] == "value"]
        kind = kinds[0] if kinds else NOTHING
        for each in kinds[1:]:
            kind = common(kind, each)
        return kind

    def text(self, name: str) -> str:
        """Return the function in LLVM's language."""
        kind = self.returned()
        parts = returned_parts(kind, self.fails)
        for block in self.blocks:
            if isinstance(block.end, tuple):
                self._return(block, kind, parts)
        given = ", ".join(
            f"{llvm} %a{at}.{part}" for _, kind, at in self._parameters() for part, llvm in enumerate(parts_of(kind))
        )
        hint = " alwaysinline" if MARKED.get(self.given) == "inlined" else ""
        variables = [
            f"%{variable}.{at} = alloca {llvm}"
            for variable, of in self.kinds.items()
            for at, llvm in enumerate(parts_of(of))
        ]
        lines = [f"define internal {struct_of(parts)} @{name}({given}) nounwind{hint} {{"]
        for at, block in enumerate(self.blocks):
            lines += [f"{block.name}:", *([] if at else [*self.slots, *variables]), *block.lines, block.end]
        return "\n".join([*lines, "}", ""])

    def _return(self, block: Block, kind: Any, parts: list[str]) -> None:
        """Write the last line of a block that returns a value, or the status of a hook that failed."""
        self.block, (how, what) = block, block.end
        if how == "failed":
            values = [what, *("zeroinitializer" if llvm not in ("i32",) else "0" for llvm in parts[1:])]
        else:
            values = ["0"] * self.fails + list(self.convert(what, kind).parts)
        if len(parts) < 2:
            block.end = f"ret {parts[0]} {values[0]}" if parts else "ret void"
            return
        made = "undef"
        for at, (llvm, value) in enumerate(zip(parts, values, strict=True)):
            made = self.emit(f"insertvalue {struct_of(parts)} {made}, {llvm} {value}, {at}")
        block.end = f"ret {struct_of(parts)} {made}"


class Module:
    """All functions of a kernel."""

    def __init__(self, state: State, constants: Mapping[str, int]) -> None:
        """`constants` in place of numbers of the state."""
        self.state, self.readers = Record(layout(state[0])), state[1]
        self._constants, self._trees = constants, dict[FunctionType, ast.FunctionDef]()
        self._made: dict[tuple[FunctionType, tuple[Any, ...]], tuple[str, Any, bool]] = {}
        self.texts, self.needed = list[str](), dict[str, str]()

    def tree_of(self, of: FunctionType) -> ast.FunctionDef:
        """Return a function's syntax, with constants in place."""
        if of not in self._trees:
            lines, first = inspect.getsourcelines(of)
            tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1)
            if self._constants and not of.__closure__:  # the closures of `state.notifier` hold their event
                tree = Freezer(self._constants).visit(tree)
            self._trees[of] = tree.body[0]  # pyright: ignore[reportArgumentType]
        return self._trees[of]

    def function(self, of: FunctionType, arguments: tuple[Any, ...]) -> tuple[str, Any, bool]:
        """Return a function's name, the kind of its result, and whether it may fail; it is translated once."""
        key = (of, arguments)
        if key not in self._made:
            made = Function(of, self, arguments, {})
            made.translate()
            while made.has_widened:
                made = Function(of, self, arguments, made.kinds)
                made.translate()
            name = f"{of.__name__}.{len(self._made)}"
            self._made[key] = name, made.returned(), made.fails
            self.texts.append(made.text(name))
        return self._made[key]


def kernel(
    entry: FunctionType, state: State, hooks: Any, shapes: Iterable[Shape], constants: Mapping[str, int]
) -> Built:
    """Compile a kernel of the state and these hooks, to be called by Numba's convention. Raises NotCompiledError."""
    return machine_code_of(translated(entry, ENTRY, state, hooks, shapes, constants), ENTRY)


def translated(
    entry: FunctionType, name: str, state: State, hooks: Any, shapes: Iterable[Shape], constants: Mapping[str, int]
) -> str:
    """Return a kernel's module in LLVM's language."""
    module, table = Module(state, constants), Hooks(hooks._fields, tuple(shapes))
    called, _, fails = module.function(entry, (module.state, table))
    hooks_given = "".join(f", i64 %h{at}" for at in range(1, table.size))
    lines = [f"define i32 @{name}(ptr %result, ptr %raised, ptr %s{hooks_given}) nounwind {{"]
    lines += [f"%t = alloca [{table.size} x i64], align 8", "%h0 = ptrtoint ptr %raised to i64"]
    for at in range(table.size):
        lines.append(f"%p{at} = getelementptr inbounds i8, ptr %t, i64 {8 * at}")
        lines.append(f"store i64 %h{at}, ptr %p{at}, align 8")
    if fails:
        lines += [f"%status = call i32 @{called}(ptr %s, ptr %t)", "ret i32 %status", "}"]
    else:
        lines += [f"call void @{called}(ptr %s, ptr %t)", "ret i32 0", "}"]
    needed = [f"declare {each}" for each in module.needed.values()]
    ends = ["!0 = !{}", '!1 = !{!"branch_weights", i32 1, i32 99}']
    ends += ["!2 = distinct !{!2, !3}", '!3 = !{!"llvm.loop.vectorize.enable", i1 true}', ""]
    return "\n".join([*module.texts, *lines, *needed, *ends])
