"""Instructions in LLVM's language: blocks, memory and arithmetic, with Numba's meaning."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from moereplay.simulator.jit.marks import NotCompiledError
from moereplay.simulator.jit.values import (
    MEMORY,
    NOTHING,
    PLAIN_POINTERS,
    POINTER,
    REAL,
    SHORT,
    TRUTH,
    WHOLE,
    Group,
    Layout,
    Number,
    Value,
    group,
    members,
)

WHOLE_OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or"}
WHOLE_OPERATIONS |= {ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "ashr"}
REAL_OPERATIONS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
COMPARISONS = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


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
        self.needed = needed
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

    def typed(self, address: str, llvm: str) -> str:
        """Return an operand that addresses this kind of number."""
        return f"ptr {address}" if PLAIN_POINTERS else f"{llvm}* {self.emit(f'bitcast i8* {address} to {llvm}*')}"

    def behind(self, address: str, offset: Any) -> str:
        """Return the address some bytes behind another."""
        return (
            address
            if offset in (0, "0")
            else self.emit(f"getelementptr inbounds i8, {POINTER} {address}, i64 {offset}")
        )

    def load(self, address: str, of: Layout, more: str = "") -> Value:
        """Load a number."""
        name = of.dtype.str[1:]
        if name not in MEMORY and name != "b1" and of.dtype.kind != "u":
            raise NotCompiledError(f"numbers of type {of.dtype} in memory")
        llvm = MEMORY.get(name) or f"i{of.size * 8}"
        found = self.emit(f"load {llvm}, {self.typed(address, llvm)}, align {of.align}{more}")
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
        self.line(f"store {llvm} {operand}, {self.typed(address, llvm)}, align {of.align}")

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
        here = f"{'ptr' if PLAIN_POINTERS else 'i64*'} {counter}"
        self.line(f"store i64 {start}, {here}")
        self.jump(test)
        self.block = test
        at = self.emit(f"load i64, {here}")
        self.branch(self.emit(f"icmp {'slt' if step > 0 else 'sgt'} i64 {at}, {stop}"), turn, after)
        self.block = turn
        body(at, following, after)
        self.jump(following)
        self.block = following
        self.line(f"store i64 {self.emit(f'add nsw i64 {at}, {step}')}, {here}")
        self.jump(test)
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
        name = "llvm.memcpy.p0.p0.i64" if PLAIN_POINTERS else "llvm.memcpy.p0i8.p0i8.i64"
        self.needed[name] = f"void @{name}({POINTER}, {POINTER}, i64, i1)"
        self.line(f"call void @{name}({POINTER} {to}, {POINTER} {of}, i64 {size}, i1 false)")

    def _load_ahead_of(self, record: Value) -> Value:
        """Prefetch the cache line at the start of a record, to be written, into all caches."""
        name = "llvm.prefetch.p0" if PLAIN_POINTERS else "llvm.prefetch.p0i8"
        self.needed[name] = f"void @{name}({POINTER}, i32, i32, i32)"
        self.line(f"call void @{name}({POINTER} {record.parts[0]}, i32 1, i32 3, i32 1)")
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
