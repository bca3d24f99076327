"""Compilation of hooks and functions of arrays through Numba, when no machine code is on disk.

`_nrt=False` forbids allocation, and with it the atomic reference counts around every call of a policy's hook, which
cost ten times the call itself. Division is C's, because no divisor is ever zero.

All uses of Numba and LLVM below their public names are here, except for the calling convention in `calls`.
`pyproject.toml` pins the versions that have these names; `make test-numba` runs the oldest and the newest of them.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import CellType, FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.errors import NumbaError, TypingError, UnsupportedBytecodeError
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer, signature
from numba.extending import intrinsic, models, register_jitable, register_model, type_callable
from numba.np.arrayobj import fix_integer_index, populate_array

from moereplay.simulator.jit.machine_code import Built, optimised, symbols
from moereplay.simulator.jit.marks import MARKED, Builtin, Column, NotCompiledError, Reader, Shape, Table

WORD = ir.IntType(64)

# readers of the state and bit operations, as `marks` declares them


def array_reader(of: Reader) -> Any:
    """Return a function from the state to an array."""
    size = of.dtype.itemsize
    kind = types.Array(numba.from_dtype(of.dtype), len(of.axes), "C", readonly=of.readonly)

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(kind)(context, builder)
            first = _number(builder, s, arguments[0], of.axes[0]) if of.whole else ir.Constant(WORD, 0)
            shape = [first, *(_number(builder, s, arguments[0], axis) for axis in of.axes[1:])]
            strides = [ir.Constant(WORD, size)]
            for length in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], length))
            data = builder.inttoptr(_number(builder, s, arguments[0], f"at_{of.name}"), array.data.type)
            populate_array(array, data, shape, strides, ir.Constant(WORD, size), meminfo=None)
            return array._getvalue()

        return kind(s), generate

    return read


def record_reader(of: Reader) -> Any:
    """Return a function from the state to a record."""
    kind = numba.from_dtype(of.dtype)

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(_number(builder, s, arguments[0], f"at_{of.name}"), context.get_value_type(kind))

        return kind(s), generate

    return read


def _number(builder: Any, kind: Any, state: Any, name: str) -> Any:
    """Load a length or an address as invariant, so that the compiler need not reload it after every store."""
    load = builder.load(cgutils.get_record_member(builder, state, kind.offset(name), WORD))
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load


# tables: values of two new kinds, for which Numba learns `len(table)`, `table[i]` and `row["column"]`


class TableKind(types.Type):
    """A table: the address of the state."""

    def __init__(self, of: Table, state: Any) -> None:
        """`state`: the record's type."""
        super().__init__(f"{of.name}({', '.join(column.name for column in of.columns)})")
        self.of, self.state = of, state


class RowKind(types.Type):
    """A row of a table: the address of the state, and the row's number."""

    def __init__(self, table: TableKind) -> None:
        """A row of this table."""
        super().__init__(f"row of {table.name}")
        self.table = table


register_model(TableKind)(lambda manager, kind: manager.lookup(kind.state))
register_model(RowKind)(
    lambda manager, kind: models.StructModel(manager, kind, [("state", kind.table.state), ("at", types.intp)])
)


def table_reader(of: Table) -> Any:
    """Return a function from the state to a table."""

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        return TableKind(of, s)(s), lambda context, builder, signature, arguments: arguments[0]

    return read


def _kind_of_row(table: Any, at: Any) -> Any:
    if isinstance(table, RowKind) and isinstance(at, types.StringLiteral):  # a name that a loop takes from a tuple
        return signature(_kind_of_cell(table, at.literal_value), table, at)
    found = isinstance(table, TableKind) and isinstance(at, types.Integer)
    return signature(RowKind(table), table, types.intp) if found else None


type_callable(len)(lambda context: lambda table: types.intp if isinstance(table, TableKind) else None)
type_callable(operator.getitem)(lambda context: _kind_of_row)


class KindOfCell(AbstractTemplate):
    """The kind of `row["column"]`."""

    key = "static_getitem"

    def generic(self, args: Any, kws: Any) -> Any:
        """Return the signature. Raises TypingError for a column that is not there."""
        row, name = args
        if not isinstance(row, RowKind) or not isinstance(name, str):
            return None
        return signature(_kind_of_cell(row, name), row, types.literal(name))


infer(KindOfCell)


def _kind_of_cell(row: RowKind, name: str) -> Any:
    if _column(row, name) is None:
        raise TypingError(f"undeclared read of '{name}'")
    return types.int64


def _column(row: RowKind, name: str) -> Column | None:
    return next((column for column in row.table.of.columns if column.name == name), None)


@lower_builtin(len, TableKind)
def _length(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind = signature.args[0]
    return _number(builder, kind.state, arguments[0], kind.of.length)


@lower_builtin(operator.getitem, TableKind, types.intp)
def _row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    table, rows = signature.args[0], _length(context, builder, signature, arguments)
    at = fix_integer_index(context, builder, types.intp, arguments[1], rows)
    if context.enable_boundscheck:
        cgutils.do_boundscheck(context, builder, at, rows)
    row = cgutils.create_struct_proxy(RowKind(table))(context, builder)
    row.state, row.at = arguments[0], at
    return row._getvalue()


@lower_builtin("static_getitem", RowKind, types.StringLiteral)
@lower_builtin(operator.getitem, RowKind, types.StringLiteral)
def _cell(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind, column = signature.args[0], _column(signature.args[0], signature.args[1].literal_value)
    assert column is not None  # its kind is known
    row, state = cgutils.create_struct_proxy(kind)(context, builder, arguments[0]), kind.table.state
    at: Any = row.at
    if column.every:
        at = builder.mul(at, _number(builder, state, row.state, column.every))
    fields: Any = column.record.fields
    dtype, offset = fields[column.field][:2]
    place = builder.add(builder.mul(at, ir.Constant(WORD, column.record.itemsize)), ir.Constant(WORD, offset))
    place = builder.add(place, _number(builder, state, row.state, f"at_{column.array}"))
    kept = ir.IntType(8 * dtype.itemsize)
    return builder.sext(builder.load(builder.inttoptr(place, kept.as_pointer())), WORD)


def _bit_length(typing: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(WORD, WORD.width), zeros)

    return types.int64(types.int64), generate


def _bit_count(typing: Any, number: Any) -> Any:
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


def _whole_number(typing: Any, answer: Any) -> Any:
    if not isinstance(answer, types.Integer | types.Boolean):
        raise TypingError(f"invalid result type {answer}: expected an integer")
    return answer(answer), lambda context, builder, signature, arguments: arguments[0]


BUILTINS = {
    "bit_length": intrinsic(_bit_length),
    "bit_count": intrinsic(_bit_count),
    "whole_number": intrinsic(_whole_number),
}


# linking: one module of machine code, optimized once
#
# Numba would optimize and load every function by itself with all that it calls, and again in each of its callers.


class NotLoaded:
    """Stub for Numba's JIT engine: parts are linked, never loaded."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Ignore the environment: code that is not loaded has none."""


class Part(JITCodeLibrary):
    """A function that is linked into others."""

    hint = ""  #: an attribute of LLVM's, on every function
    codegen = NotLoaded  # pyright: ignore[reportAssignmentType]

    def add_llvm_module(self, ll_module: Any) -> None:
        """Link the module without optimizing it."""
        for function in ll_module.functions if self.hint else ():
            if not function.is_declaration:
                function.add_function_attribute(self.hint)
        ll_module.data_layout = self._codegen._data_layout
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        """Mark as finalized without optimizing or loading."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: parts are never loaded on their own."""
        return 0


class Inlined(Part):
    """A function that is inlined into its callers."""

    hint = "alwaysinline"


class Whole(Part):
    """A function that is called from outside, linked with every part that it reaches."""

    def object_code(self, entry: str, vectorised: bool) -> tuple[bytes, list[str]]:
        """Return machine code that exports only `entry`, and the names of its undefined symbols.

        `vectorised`: vectorize loops; False where most loops have few iterations.
        """
        for library in _reached_from(self):
            part = library._final_module if isinstance(library, Part) else library._get_module_for_linking()
            self._final_module.link_in(part, preserve=True)
        for each in symbols(self._final_module):
            if not each.is_declaration and each.name != entry:
                each.linkage = binding.Linkage.internal
        return optimised(self._final_module, self._codegen._tm, vectorised)


def _reached_from(library: Any) -> Iterator[Any]:
    """Yield every library that is called, once; a library that is not a part has linked its own."""
    waiting, seen = list(library._linking_libraries), set()
    for each in waiting:  # grows in the loop
        if each not in seen:
            seen.add(each)
            waiting += each._linking_libraries if isinstance(each, Part) else ()
            yield each


class PartCompiler(CompilerBase):
    """Numba's default passes, with a `Part` as their library."""

    library: type[Part] = Part

    def define_pipelines(self) -> list[Any]:
        """Return Numba's pipeline with our library."""
        self.state.library = self.library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


class InlinedCompiler(PartCompiler):
    """Numba's default passes, with an `Inlined` part."""

    library = Inlined


class WholeCompiler(PartCompiler):
    """Numba's default passes, with a `Whole`."""

    library = Whole


@contextmanager
def changed(of: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of Numba's within the context."""
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)


# compiling

OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
UNWRAPPED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
#: The compiler of each mark.
MARKS: dict[str, Callable] = {
    "inlined": njit(pipeline_class=InlinedCompiler, **UNWRAPPED, **OPTIONS),
    "plain": njit(pipeline_class=PartCompiler, **UNWRAPPED, **OPTIONS),
    "merged": njit(inline="always", **OPTIONS),
}


def built(function: FunctionType, signature: Any, **options: Any) -> Built:
    """Compile a function with all that it calls. Raises NotCompiledError."""
    # Numba prints a record by its name: printing its fields takes a quarter of compilation
    with changed(types.Record, "__repr__", types.Record.__str__):
        try:
            dispatcher: Any = njit(signature, pipeline_class=WholeCompiler, **UNWRAPPED, **options)(
                _with_compiled(function, {})
            )
        except (NumbaError, UnsupportedBytecodeError) as error:
            raise NotCompiledError(str(error)) from error
    result = next(iter(dispatcher.overloads.values()))
    entry = result.fndesc.llvm_func_name
    code, undefined = result.library.object_code(entry, vectorised=True)
    return Built(code, entry, undefined)


def _with_compiled(function: FunctionType, made: dict[Any, Any]) -> FunctionType:
    """Copy a function with the marked functions and readers that it names in their compiled form, kept in `made`."""
    named = {line.argval for line in dis.get_instructions(function.__code__) if line.opname == "LOAD_GLOBAL"}
    names = {name: _compiled(value, made) for name, value in function.__globals__.items() if name in named}
    closure = tuple(CellType(_compiled(cell.cell_contents, made)) for cell in function.__closure__ or ())
    return FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, closure
    )


def _compiled(value: Any, made: dict[Any, Any]) -> Any:
    if isinstance(value, Builtin):
        return BUILTINS[value.name]
    is_marked = isinstance(value, FunctionType) and value in MARKED
    if not (is_marked or isinstance(value, Reader | Table)):
        return value
    if value not in made:
        if isinstance(value, Table):
            made[value] = table_reader(value)
        elif isinstance(value, Reader):
            made[value] = array_reader(value) if value.axes else record_reader(value)
        else:
            made[value] = MARKS[MARKED[value]](_with_compiled(value, made))
    return made[value]


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Register a function with Numba as inlined: a call would pass all tables one by one."""
    register_jitable(forceinline=True)(function)


def hook(adapter: FunctionType, state: np.dtype, shape: Shape, reached: Iterable[FunctionType], checked: bool) -> Built:
    """Compile an adapter with its hook and the functions that the hook reaches. Raises NotCompiledError."""
    for function in reached:
        _part_of_callers(function)
    result = types.int64 if shape.returns else types.void
    kinds = result(numba.from_dtype(state), *[types.int64] * shape.numbers)
    # an option of njit would not apply to functions that the hook calls
    with changed(config, "BOUNDSCHECK", 1) if checked else nullcontext():
        try:  # without lists, reference counts are not needed; they cost more than many hooks
            return built(adapter, kinds, _nrt=False)
        except NotCompiledError:
            return built(adapter, kinds)


def of_arguments(function: FunctionType, arguments: Iterable[Any]) -> Built:
    """Compile a function for the types of these arguments."""
    return built(function, types.void(*map(numba.typeof, arguments)), **OPTIONS)
