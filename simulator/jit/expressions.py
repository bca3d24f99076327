"""Instructions in LLVM's language: blocks, memory, arithmetic, and the expressions of kernels, with Numba's meaning."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from moereplay.simulator.jit.marks import MARKED, NotCompiledError, Reader
from moereplay.simulator.jit.values import (
    MEMORY,
    NOTHING,
    REAL,
    SHORT,
    TRUTH,
    WHOLE,
    Array,
    Group,
    Hooks,
    Known,
    Layout,
    Number,
    Pointer,
    Record,
    Value,
    common,
    constant,
    group,
    layout,
    members,
    number_at,
    parts_of,
    real,
    returned_parts,
    struct_of,
)

WHOLE_OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or"}
WHOLE_OPERATIONS |= {ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "ashr"}
REAL_OPERATIONS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
COMPARISONS = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
TO_NUMBER = {np.int64: WHOLE, int: WHOLE, np.float64: REAL, float: REAL, np.float32: SHORT, bool: TRUTH}
INT64 = layout(np.dtype(np.int64))
INVARIANT = ", !invariant.load !0"  #: a load of what never changes during a run
UNLIKELY = ", !prof !1"  #: a branch that is hardly ever taken
NO_VALUE = -2  #: the status of a hook that returns nothing


class Block:
    """Lines without a branch; `end`: its last line, or a return whose line depends on all returns of the function."""

    def __init__(self, name: str) -> None:
        """Start empty."""
        self.name, self.lines = name, list[str]()
        self.end: Any = None


class Emitter:
    """Instructions of one function."""

    def __init__(self, needed: dict[str, str]) -> None:
        """Start with one empty block; functions of LLVM's that are called are added to `needed`."""
        self.needed, self.loop_hint = needed, ""
        self.blocks, self.slots, self._names = [Block("b0")], list[str](), 0
        self.block: Block | None = self.blocks[0]  #: None after its end

    # lines and blocks

    def emit(self, text: str) -> str:
        """Append an instruction and return its result's name."""
        self._names += 1
        self.line(f"%v{self._names} = {text}")
        return f"%v{self._names}"

    def line(self, text: str) -> None:
        """Append an instruction without a result."""
        assert self.block is not None
        self.block.lines.append(text)

    def new_block(self) -> Block:
        """Return an empty block, after all others."""
        self.blocks.append(Block(f"b{len(self.blocks)}"))
        return self.blocks[-1]

    def end(self, end: Any) -> None:
        """End the current block, if it can be reached."""
        if self.block is not None:
            self.block.end = end
        self.block = None

    def jump(self, to: Block) -> None:
        """Continue in a block."""
        self.end(f"br label %{to.name}")

    def branch(self, test: str, yes: Block, no: Block, weights: str = "") -> None:
        """Continue in one of two blocks."""
        self.end(f"br i1 {test}, label %{yes.name}, label %{no.name}{weights}")

    def slot(self, llvm: str) -> str:
        """Return the address of memory for a number, for the whole call."""
        self.slots.append(f"%s{len(self.slots)} = alloca {llvm}")
        return f"%s{len(self.slots) - 1}"

    # memory

    def behind(self, address: str, offset: Any) -> str:
        """Return the address some bytes behind another."""
        return address if offset in (0, "0") else self.emit(f"getelementptr inbounds i8, ptr {address}, i64 {offset}")

    def load(self, address: str, of: Layout, more: str = "") -> Value:
        """Load a number."""
        name = of.dtype.str[1:]
        if name not in MEMORY and name != "b1" and of.dtype.kind != "u":
            raise NotCompiledError(f"numbers of type {of.dtype} in memory")
        llvm = MEMORY.get(name) or f"i{of.size * 8}"
        found = self.emit(f"load {llvm}, ptr {address}, align {of.align}{more}")
        if llvm in ("double", "float"):
            return Value(Number(llvm), (found,))
        if of.dtype.kind == "b":
            return Value(TRUTH, (self.emit(f"icmp ne i8 {found}, 0"),))
        if llvm != "i64":
            found = self.emit(f"{'zext' if of.dtype.kind == 'u' else 'sext'} {llvm} {found} to i64")
        return Value(WHOLE, (found,))

    def store(self, address: str, of: Layout, value: Value) -> None:
        """Store a number; whole numbers lose their upper bits, as in numpy."""
        if of.dtype.kind == "f":
            llvm = MEMORY[of.dtype.str[1:]]
            operand = self.number(value, Number(llvm))
        else:
            operand, llvm = self.number(value, WHOLE), f"i{of.size * 8}"
            if llvm != "i64":
                operand = self.emit(f"trunc i64 {operand} to {llvm}")
        self.line(f"store {llvm} {operand}, ptr {address}, align {of.align}")

    def fill(self, array: Value, value: Value) -> None:
        """Set all numbers of an array."""
        total = "1"
        for length in array.parts[1:]:
            total = self.emit(f"mul i64 {total}, {length}")

        def one(at: str, _continue: Block, _break: Block) -> None:
            kind = array.kind
            self.store(self.behind(array.parts[0], self.times(at, kind.layout.size)), kind.layout, value)

        self.loop("0", total, 1, one)

    def loop(self, start: str, stop: str, step: int, body: Callable[[str, Block, Block], None]) -> None:
        """Translate a loop by one call of `body`, with the number of the turn and where `continue` and `break` go."""
        counter, test, turn, following, after = self.slot("i64"), *(self.new_block() for _ in range(4))
        self.line(f"store i64 {start}, ptr {counter}")
        self.jump(test)
        self.block = test
        at = self.emit(f"load i64, ptr {counter}")
        self.branch(self.emit(f"icmp {'slt' if step > 0 else 'sgt'} i64 {at}, {stop}"), turn, after)
        self.block = turn
        body(at, following, after)
        self.jump(following)
        self.block = following
        self.line(f"store i64 {self.emit(f'add nsw i64 {at}, {step}')}, ptr {counter}")
        self.end(f"br label %{test.name}{self.loop_hint}")
        self.block = after

    # numbers

    def number(self, value: Value, kind: Number) -> str:
        """Convert a number to another kind; never a fraction to a whole number."""
        have = value.kind
        if not isinstance(have, Number):
            raise NotCompiledError(f"{have} in place of a number")
        (operand,) = value.parts
        if have == kind:
            return operand
        if kind == TRUTH:
            return self.truth(value)
        if have.is_whole and not kind.is_whole:
            return self.emit(f"{'uitofp' if have == TRUTH else 'sitofp'} {have.llvm} {operand} to {kind.llvm}")
        change = {(TRUTH, WHOLE): "zext", (SHORT, REAL): "fpext", (REAL, SHORT): "fptrunc"}.get((have, kind))
        if change is None:
            raise NotCompiledError("a fraction in place of a whole number")
        if operand in ("true", "false"):
            return str(int(operand == "true"))
        return self.emit(f"{change} {have.llvm} {operand} to {kind.llvm}")

    def convert(self, value: Value, kind: Any) -> Value:
        """Convert a value to a kind that takes it (`common`)."""
        if value.kind == kind:
            return value
        if isinstance(kind, Group):
            return group(
                [self.convert(each, k) for each, k in zip(members(value), kind.kinds, strict=True)], kind.names
            )
        return Value(kind, (self.number(value, kind),) if isinstance(kind, Number) else value.parts)

    def truth(self, value: Value) -> str:
        """Return whether a value counts as true."""
        if value.kind == TRUTH:
            return value.parts[0]
        if value.kind == WHOLE:
            return self.emit(f"icmp ne i64 {value.parts[0]}, 0")
        raise NotCompiledError(f"a test of {value.kind}")

    def operation(self, operator: ast.operator, a: Value, b: Value) -> Value:
        """Calculate with two numbers, as Numba does."""
        known, kind = type(operator), self.number_kind(operator, a, b)
        x, y = self.number(a, kind), self.number(b, kind)
        if not kind.is_whole and known in REAL_OPERATIONS:
            return Value(kind, (self.emit(f"{REAL_OPERATIONS[known]} {kind.llvm} {x}, {y}"),))
        if kind.is_whole and known in WHOLE_OPERATIONS:
            return Value(kind, (self.emit(f"{WHOLE_OPERATIONS[known]} {kind.llvm} {x}, {y}"),))
        if kind == WHOLE and known in (ast.FloorDiv, ast.Mod):
            return Value(kind, (self._divided(known is ast.Mod, x, y),))
        raise NotCompiledError(f"the operator {known.__name__} of {kind.llvm}")

    @staticmethod
    def number_kind(operator: Any, a: Value, b: Value) -> Number:
        """Return the kind in which an operator, or None, takes two numbers."""
        for each in (a, b):
            if not isinstance(each.kind, Number):
                raise NotCompiledError(f"{each.kind} in place of a number")
        kinds = {a.kind, b.kind}
        if isinstance(operator, ast.BitAnd | ast.BitOr | ast.BitXor) and kinds == {TRUTH}:
            return TRUTH
        if kinds <= {WHOLE, TRUTH}:
            return REAL if isinstance(operator, ast.Div) else WHOLE
        return SHORT if kinds == {SHORT} else REAL

    def _divided(self, rest: bool, x: str, y: str) -> str:
        """Divide and round down; 0 for a divisor of 0."""
        divisor = y if y.lstrip("-").isdigit() and int(y) > 0 else ""
        if not divisor:
            none = self.emit(f"icmp eq i64 {y}, 0")
            divisor = self.emit(f"select i1 {none}, i64 1, i64 {y}")
        remainder = self.emit(f"srem i64 {x}, {divisor}")
        apart = self.emit(f"icmp slt i64 {self.emit(f'xor i64 {remainder}, {divisor}')}, 0")
        down = self.emit(f"and i1 {apart}, {self.emit(f'icmp ne i64 {remainder}, 0')}")
        if rest:
            more = self.emit(f"select i1 {down}, i64 {divisor}, i64 0")
            return self.emit(f"add i64 {remainder}, {more}")  # a divisor of 0 became 1, whose remainder is 0
        quotient = self.emit(f"sdiv i64 {x}, {divisor}")
        found = self.emit(f"add i64 {quotient}, {self.emit(f'sext i1 {down} to i64')}")
        return found if divisor == y else self.emit(f"select i1 {none}, i64 0, i64 {found}")  # pyright: ignore[reportPossiblyUnboundVariable]

    def compare(self, operator: ast.cmpop, a: Value, b: Value) -> str:
        """Compare two numbers."""
        name, kinds = COMPARISONS.get(type(operator)), {a.kind, b.kind}
        if name is None:
            raise NotCompiledError(f"the comparison {type(operator).__name__}")
        kind = TRUTH if kinds == {TRUTH} and name in ("eq", "ne") else self.number_kind(operator, a, b)
        x, y = self.number(a, kind), self.number(b, kind)
        if kind.is_whole:
            return self.emit(f"icmp {name if name in ('eq', 'ne') else 's' + name} {kind.llvm} {x}, {y}")
        return self.emit(f"fcmp {'une' if name == 'ne' else 'o' + name} {kind.llvm} {x}, {y}")

    def times(self, at: str, size: int) -> str:
        """Multiply a position by a size."""
        return at if size == 1 else str(int(at) * size) if at.isdigit() else self.emit(f"mul nsw i64 {at}, {size}")

    # functions of Python and numpy

    def copy(self, to: str, of: str, size: int) -> None:
        """Copy a record."""
        self.needed["llvm.memcpy"] = "void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"
        self.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {of}, i64 {size}, i1 false)")

    def _load_ahead_of(self, record: Value) -> Value:
        """Prefetch the cache line at the start of a record, to be written, into all caches."""
        self.needed["llvm.prefetch"] = "void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        self.line(f"call void @llvm.prefetch.p0(ptr {record.parts[0]}, i32 1, i32 3, i32 1)")
        return Value(NOTHING)

    def _min_of(self, *given: Value) -> Value:
        return self._extreme(ast.Lt(), given)

    def _max_of(self, *given: Value) -> Value:
        return self._extreme(ast.Gt(), given)

    def _extreme(self, operator: ast.cmpop, given: Sequence[Value]) -> Value:
        """Select from left to right, as Python does: a later number replaces an earlier one only if it is beyond it."""
        best = given[0]
        for each in given[1:]:
            kind = self.number_kind(None, best, each)
            a, b = Value(kind, (self.number(best, kind),)), Value(kind, (self.number(each, kind),))
            test = self.compare(operator, b, a)
            best = Value(kind, (self.emit(f"select i1 {test}, {kind.llvm} {b.parts[0]}, {kind.llvm} {a.parts[0]}"),))
        return best

    def _abs_of(self, of: Value) -> Value:
        if of.kind in (REAL, SHORT):
            return self._intrinsic(f"fabs.f{64 if of.kind == REAL else 32}", of.kind, of)
        operand = self.number(of, WHOLE)
        negative, other = self.emit(f"icmp slt i64 {operand}, 0"), self.emit(f"sub i64 0, {operand}")
        return Value(WHOLE, (self.emit(f"select i1 {negative}, i64 {other}, i64 {operand}"),))

    def _rint_of(self, of: Value) -> Value:
        return self._intrinsic("rint.f64", REAL, of)

    def _bit_length_of(self, of: Value) -> Value:
        zeros = self._intrinsic("ctlz.i64", WHOLE, of, ", i1 false").parts[0]
        return Value(WHOLE, (self.emit(f"sub i64 64, {zeros}"),))

    def _bit_count_of(self, of: Value) -> Value:
        return self._intrinsic("ctpop.i64", WHOLE, of)

    def _intrinsic(self, name: str, kind: Number, of: Value, more: str = "") -> Value:
        self.needed[f"llvm.{name}"] = f"{kind.llvm} @llvm.{name}({kind.llvm}{', i1' if more else ''})"
        call = f"call {kind.llvm} @llvm.{name}({kind.llvm} {self.number(of, kind)}{more})"
        return Value(kind, (self.emit(call),))


class Expressions(Emitter):
    """Expressions of one function; `translation` adds statements."""

    def __init__(self, given: FunctionType, of_module: Any) -> None:
        """`of_module` translates the functions that are called."""
        super().__init__(of_module.needed)
        self.given, self._module = given, of_module
        self.kinds: dict[str, Any] = {}  #: of variables
        self._bound: dict[str, Value] | None = None  # in a merged function: its arguments
        self.fails = False  #: whether a hook is called, directly or not

    # expressions

    def value(self, node: ast.expr) -> Value:
        """Translate an expression."""
        translate = getattr(self, f"_on_{type(node).__name__.lower()}", None)
        if translate is None:
            raise NotCompiledError(f"{ast.unparse(node)!r}: an expression that kernels do not use")
        return translate(node)

    def _on_constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _on_name(self, node: ast.Name) -> Value:
        if self._bound is not None and node.id in self._bound:
            return self._bound[node.id]
        if self._bound is None and node.id in self.kinds:
            return self.variable(node.id)
        code = self.given.__code__
        if node.id in code.co_freevars:
            return constant((self.given.__closure__ or ())[code.co_freevars.index(node.id)].cell_contents)
        if node.id in self.given.__globals__:
            return constant(self.given.__globals__[node.id])
        if not hasattr(builtins, node.id):
            raise NotCompiledError(f"the variable {node.id} before it is set")
        return constant(getattr(builtins, node.id))

    def variable(self, name: str) -> Value:
        """Load a variable."""
        kind = self.kinds[name]
        return Value(kind, tuple(self.emit(f"load {llvm}, ptr %{name}.{at}") for at, llvm in enumerate(parts_of(kind))))

    def _on_tuple(self, node: ast.Tuple) -> Value:
        return group(self._values(node.elts))

    def _values(self, nodes: Sequence[ast.expr]) -> list[Value]:
        found = []
        for each in nodes:
            found += members(self.value(each.value)) if isinstance(each, ast.Starred) else [self.value(each)]
        return found

    def _on_binop(self, node: ast.BinOp) -> Value:
        return self.operation(node.op, self.value(node.left), self.value(node.right))

    def _on_unaryop(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Value(TRUTH, (self.emit(f"xor i1 {self.truth(self.value(node.operand))}, true"),))
        of = self.value(node.operand)
        if not isinstance(node.op, ast.USub) or of.kind not in (WHOLE, REAL, SHORT):
            raise NotCompiledError(f"{ast.unparse(node)!r}: an operator that kernels do not use")
        if of.kind == WHOLE:
            known = number_at(of)
            return constant(-known) if known is not None else Value(WHOLE, (self.emit(f"sub i64 0, {of.parts[0]}"),))
        return Value(of.kind, (self.emit(f"fneg {of.kind.llvm} {of.parts[0]}"),))

    def _on_compare(self, node: ast.Compare) -> Value:
        if len(node.ops) > 1:
            return self._one_of_two(node)
        return Value(TRUTH, (self.compare(node.ops[0], self.value(node.left), self.value(node.comparators[0])),))

    def _on_boolop(self, node: ast.BoolOp) -> Value:
        """Stop at the first operand that decides."""
        after, found = self.new_block(), list[tuple[Block, Value]]()
        tests = list[tuple[Block, str, Block]]()
        for each in node.values[:-1]:
            value = self.value(each)
            assert self.block is not None
            found.append((self.block, value))
            tests.append((self.block, self.truth(value), self.new_block()))
            self.block = tests[-1][2]
        value = self.value(node.values[-1])
        assert self.block is not None
        found.append((self.block, value))
        kind, parts = self._in_common(found)
        self.jump(after)
        for block, test, more in tests:
            self.block = block
            self.branch(test, *((after, more) if isinstance(node.op, ast.Or) else (more, after)))
        return self._joined(after, kind, parts)

    def _in_common(self, found: list[tuple[Block, Value]]) -> tuple[Any, list[tuple[Block, tuple[str, ...]]]]:
        """Convert the values at the ends of blocks to one kind; the last block is the current one."""
        kind, last = found[0][1].kind, self.block
        for _, value in found[1:]:
            kind = common(kind, value.kind)
        parts = []
        for block, value in found:
            self.block = block
            parts.append((block, self.convert(value, kind).parts))
        self.block = last
        return kind, parts

    def _joined(self, after: Block, kind: Any, parts: list[tuple[Block, tuple[str, ...]]]) -> Value:
        """Continue after several blocks, with the value of the one before."""
        self.block = after
        return Value(
            kind,
            tuple(
                self.emit(f"phi {llvm} " + ", ".join(f"[{of[at]}, %{block.name}]" for block, of in parts))
                for at, llvm in enumerate(parts_of(kind))
            ),
        )

    def _on_ifexp(self, node: ast.IfExp) -> Value:
        yes, no, after = self.new_block(), self.new_block(), self.new_block()
        self.test(node.test, yes, no)
        self.block, found = yes, list[tuple[Block, Value]]()
        value = self.value(node.body)
        found.append((self.block, value))  # pyright: ignore[reportArgumentType]
        self.block = no
        value = self.value(node.orelse)
        found.append((self.block, value))  # pyright: ignore[reportArgumentType]
        kind, parts = self._in_common(found)
        for block, _ in parts:
            self.block = block
            self.jump(after)
        return self._joined(after, kind, parts)

    def test(self, node: ast.expr, yes: Block, no: Block) -> None:
        """Branch on an expression, whose operands after one that decides are not evaluated."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.test(node.operand, no, yes)
        elif isinstance(node, ast.BoolOp):
            for each in node.values[:-1]:
                more = self.new_block()
                self.test(each, *((yes, more) if isinstance(node.op, ast.Or) else (more, no)))
                self.block = more
            self.test(node.values[-1], yes, no)
        else:
            self.branch(self.truth(self.value(node)), yes, no)

    def _one_of_two(self, node: ast.Compare) -> Value:
        """Compare a < b <= c: evaluate each operand once, and stop at the first that is false."""
        if len(node.ops) != 2:
            raise NotCompiledError(f"{ast.unparse(node)!r}: a chain of comparisons")
        left, middle = self.value(node.left), self.value(node.comparators[0])
        first = self.compare(node.ops[0], left, middle)
        begin, more, after = self.block, self.new_block(), self.new_block()
        assert begin is not None
        self.branch(first, more, after)
        self.block = more
        second = self.compare(node.ops[1], middle, self.value(node.comparators[1]))
        last = self.block
        self.jump(after)
        return self._joined(after, TRUTH, [(begin, ("false",)), (last, (second,))])

    # parts of values

    def _on_attribute(self, node: ast.Attribute) -> Value:
        of = self.value(node.value)
        if of.kind == self._module.state and node.attr in self._module.readers:
            return self._read(self._module.readers[node.attr], of)
        if isinstance(of.kind, Hooks):
            return self._hook(of, of.kind.names.index(node.attr))
        if isinstance(of.kind, Group) and node.attr in of.kind.names:
            return members(of)[of.kind.names.index(node.attr)]
        if isinstance(of.kind, Known) and isinstance(of.kind.value, ModuleType):
            return constant(getattr(of.kind.value, node.attr))
        raise NotCompiledError(f"{ast.unparse(node)!r}: an attribute that kernels do not use")

    def _hook(self, table: Value, at: int) -> Value:
        """Return a hook, or the tuple of an event's listeners."""
        shape, first, (address,) = table.kind.shapes[at], table.kind.first[at], table.parts
        place = self.emit(f"load ptr, ptr {address}, align 8")
        found = [
            Value(Pointer(shape), (self.load(self.behind(address, 8 * at), layout(np.dtype(np.int64))).parts[0], place))
            for at in range(first, first + (shape.listeners or 1))
        ]
        return group(found) if shape.listeners else found[0]

    def _on_subscript(self, node: ast.Subscript) -> Value:
        of, place = self.place(node)
        return place if of == "value" else self.load(place.parts[0], place.kind)

    def place(self, node: ast.Subscript) -> tuple[str, Value]:
        """Return what a subscript selects: a value, or the address of a "number", which may be "readonly"."""
        of = self.value(node.value)
        if isinstance(of.kind, Array):
            nodes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self._element(of, [self.number(self.value(each), WHOLE) for each in nodes])
        key = self.value(node.slice)
        if isinstance(of.kind, Record) and isinstance(key.kind, Known):
            return self._field(of, key.kind.value)
        at = number_at(key)
        if at is None:
            raise NotCompiledError(f"{ast.unparse(node)!r}: an index that kernels do not use")
        if isinstance(of.kind, Hooks):
            return "value", self._hook(of, at)
        if isinstance(of.kind, Group):
            return "value", members(of)[at]
        assert isinstance(of.kind, Known)
        return "value", constant(of.kind.value[at])

    @staticmethod
    def _found(kind: Layout, address: str) -> tuple[str, Value]:
        return ("value", Value(Record(kind), (address,))) if kind.is_record else ("number", Value(kind, (address,)))

    def _field(self, of: Value, name: str) -> tuple[str, Value]:
        fields = of.kind.layout.dtype.fields or {}
        if name not in fields:
            raise NotCompiledError(f"the field {name!r}, which a record does not have")
        dtype, offset = fields[name][:2]
        address = self.behind(of.parts[0], offset)
        if dtype.subdtype is None:
            return self._found(layout(dtype), address)
        base, shape = dtype.subdtype
        return "value", Value(Array(layout(base), len(shape), False), (address, *map(str, shape)))

    def _element(self, of: Value, indices: list[str]) -> tuple[str, Value]:
        """Index the first axes; a negative index counts from the end, if the length is known."""
        address, lengths, kind = of.parts[0], of.parts[1:], of.kind
        at = "0"
        for axis, length in enumerate(lengths):
            if axis and at != "0":
                at = self.emit(f"mul nsw i64 {at}, {length}")
            if axis < len(indices):
                index = self._from_start(indices[axis], length)
                at = index if at == "0" else self.emit(f"add nsw i64 {at}, {index}")
        address = self.behind(address, self.times(at, kind.layout.size))
        left = lengths[len(indices) :]
        if left:
            return "value", Value(Array(kind.layout, len(left), kind.readonly), (address, *left))
        found = self._found(kind.layout, address)
        if kind.readonly and found[0] == "number":
            return "readonly", found[1]
        return found

    def _from_start(self, index: str, length: str) -> str:
        if length == "0" or index.isdigit():
            return index
        behind = self.emit(f"add i64 {index}, {length}")
        return self.emit(f"select i1 {self.emit(f'icmp slt i64 {index}, 0')}, i64 {behind}, i64 {index}")

    # calls

    def _on_call(self, node: ast.Call) -> Value:
        if node.keywords:
            raise NotCompiledError(f"{ast.unparse(node)!r}: an argument by name")
        function, arguments = self.value(node.func), self._values(node.args)
        if isinstance(function.kind, Pointer):
            return self._call_hook(function, arguments)
        of = function.kind.value if isinstance(function.kind, Known) else None
        if isinstance(of, Reader):
            return self._read(of, arguments[0])
        if isinstance(of, type) and issubclass(of, tuple):
            return group(arguments, of._fields)  # pyright: ignore[reportAttributeAccessIssue]
        if of in TO_NUMBER:
            return self._to_number(arguments[0], TO_NUMBER[of])
        translate = getattr(self, f"_{getattr(of, 'name', getattr(of, '__name__', ''))}_of", None)
        if isinstance(of, FunctionType) and of in MARKED and translate is None:
            return self._merge(of, arguments) if MARKED[of] == "merged" else self._call(of, arguments)
        if translate is None:
            raise NotCompiledError(f"{ast.unparse(node)!r}: a call that kernels do not use; is the function marked?")
        return translate(*arguments)

    def _read(self, of: Reader, state: Value) -> Value:
        """Read the address and the lengths of an array, or the address of a record."""
        number = self._invariant(state, f"at_{of.name}")
        address = self.emit(f"inttoptr i64 {number} to ptr")
        if not of.axes:
            return Value(Record(layout(of.dtype)), (address,))
        lengths = ["0" if not (at or of.whole) else self._invariant(state, axis) for at, axis in enumerate(of.axes)]
        return Value(Array(layout(of.dtype), len(lengths), of.readonly), (address, *lengths))

    def _invariant(self, state: Value, name: str) -> str:
        """Load a length or an address as invariant, so that it need not be loaded again after every store."""
        offset = state.kind.layout.dtype.fields[name][1]
        return self.load(self.behind(state.parts[0], offset), INT64, INVARIANT).parts[0]

    def _merge(self, of: FunctionType, arguments: list[Value]) -> Value:
        """Translate a function's only expression in place."""
        (statement,) = [each for each in self._module.tree_of(of).body if not isinstance(each, ast.Expr)]
        given, bound = self.given, self._bound
        self.given, self._bound = of, dict(zip(of.__code__.co_varnames, arguments, strict=False))
        found = self.value(statement.value)
        self.given, self._bound = given, bound
        return found

    def _call(self, of: FunctionType, arguments: list[Value]) -> Value:
        """Call a translated function; if it fails, return its status."""
        name, kind, fails = self._module.function(of, tuple(each.kind for each in arguments))
        returned = returned_parts(kind, fails)
        given = ", ".join(
            f"{llvm} {part}" for each in arguments for llvm, part in zip(parts_of(each.kind), each.parts, strict=True)
        )
        if not returned:
            self.line(f"call void @{name}({given})")
            return Value(kind)
        found = self.emit(f"call {struct_of(returned)} @{name}({given})")
        parts = [found]
        if len(returned) > 1:
            parts = [self.emit(f"extractvalue {struct_of(returned)} {found}, {at}") for at in range(len(returned))]
        if fails:
            status = parts.pop(0)
            self._check(status, self.emit(f"icmp ne i32 {status}, 0"))
        return Value(kind, tuple(parts))

    def _check(self, status: str, failed: str) -> None:
        """Return the status of a call that failed."""
        self.fails = True
        fail, go_on = self.new_block(), self.new_block()
        self.branch(failed, fail, go_on, UNLIKELY)
        fail.end = ("failed", status)
        self.block = go_on

    def _call_hook(self, hook: Value, arguments: list[Value]) -> Value:
        """Call a hook by Numba's convention (`calls`)."""
        (address, place), result = hook.parts, self.slot("i64")
        numbers = "".join(f", i64 {self.number(each, WHOLE)}" for each in arguments[1:])
        function = self.emit(f"inttoptr i64 {address} to ptr")
        status = self.emit(f"call i32 {function}(ptr {result}, ptr {place}, ptr {arguments[0].parts[0]}{numbers})")
        bad = self.emit(f"icmp ne i32 {status}, 0")
        self._check(status, self.emit(f"and i1 {bad}, {self.emit(f'icmp ne i32 {status}, {NO_VALUE}')}"))
        return self.load(result, INT64) if hook.kind.shape.returns else Value(NOTHING)

    def _to_number(self, of: Value, kind: Number) -> Value:
        if kind == WHOLE and of.kind in (REAL, SHORT):
            return Value(WHOLE, (self.emit(f"fptosi {of.kind.llvm} {of.parts[0]} to i64"),))
        if kind == SHORT and of.kind.is_whole and of.parts[0].isdigit():
            return Value(SHORT, (real(float(np.float32(int(of.parts[0])))),))
        return Value(kind, (self.number(of, kind),))

    def _len_of(self, of: Value) -> Value:
        if isinstance(of.kind, Group):
            return constant(len(of.kind.kinds))
        if not isinstance(of.kind, Array):
            raise NotCompiledError(f"the length of {of.kind}")
        return Value(WHOLE, (of.parts[1],))
