"""What `jit` only names, in LLVM's language: readers of the state, bits, and pointers to hooks."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.core.typing.templates import signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import populate_array

from moereplay.simulator.jit.marks import Reader

WORD = ir.IntType(64)


def reader(of: Reader) -> Any:
    """The function that a reader stands for."""
    return array_reader(of) if of.axes else record_reader(of)


def array_reader(of: Reader) -> Any:
    """From the state to an array."""
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
    """From the state to a record."""
    kind = numba.from_dtype(of.dtype)

    @intrinsic
    def read(typing: Any, s: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(_number(builder, s, arguments[0], f"at_{of.name}"), context.get_value_type(kind))

        return kind(s), generate

    return read


def _number(builder: Any, kind: Any, state: Any, name: str) -> Any:
    """A length or an address, which do not change in a run: the compiler need not read it again after every store."""
    load = builder.load(cgutils.get_record_member(builder, state, kind.offset(name), WORD))
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load


def _bit_length(typing: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(WORD, WORD.width), zeros)

    return types.int64(types.int64), generate


def _bit_count(typing: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


def _whole_number(typing: Any, answer: Any) -> Any:
    if not isinstance(answer, types.Integer | types.Boolean):
        raise TypingError(f"it answers with {answer}, where an integer is expected")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return answer(answer), generate


BUILTINS = {
    "bit_length": intrinsic(_bit_length),
    "bit_count": intrinsic(_bit_count),
    "whole_number": intrinsic(_whole_number),
}


class HookPointer(types.Callable):
    """The address of a hook of this signature, called by Numba's own convention, so that what it raises goes on.

    Numba's own type of functions looks for a Python object behind every pointer, at every call, and has a name as long
    as its signature, which would be part of every function's.
    """

    def __init__(self, of: Any) -> None:
        """`of`: its signature, the state first."""
        self.of = of
        super().__init__(name=f"hook{len(of.args) - 1}{of.return_type}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """The one signature, with the pointer before its arguments."""
        return signature(self.of.return_type, *self.of.args, recvr=self)

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        """The one signature."""
        return [self.of], False

    def get_impl_key(self, sig: Any) -> Any:
        """All are called alike."""
        return HookPointer


class Address(models.PrimitiveModel):
    """A pointer is a number."""

    def __init__(self, manager: Any, kind: HookPointer) -> None:
        """Of 64 bits."""
        super().__init__(manager, kind, WORD)


def _call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    of = sig.args[0].of
    function = builder.inttoptr(args[0], context.call_conv.get_function_type(of.return_type, of.args).as_pointer())
    status, result = context.call_conv.call_function(builder, function, of.return_type, of.args, args[1:])
    with cgutils.if_unlikely(builder, status.is_error):
        context.call_conv.return_status_propagate(builder, status)
    return result


register_model(HookPointer)(Address)
lower_builtin(HookPointer, HookPointer, types.VarArg(types.Any))(_call)
