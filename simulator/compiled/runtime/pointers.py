"""Pointers to hooks as Numba sees them: called by Numba's own convention, so that what a hook raises goes on.

Numba's own type of functions looks for a Python object behind every pointer, at every call, and has a name as long as
its signature, which would be part of every function's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature
from numba.extending import NativeValue, lower_builtin, models, register_model, unbox

WORD = ir.IntType(64)


class HookPointer(types.Callable):
    """The address of a hook of this signature."""

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


class _Address(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: HookPointer) -> None:
        super().__init__(manager, kind, WORD)


def _of_number(kind: HookPointer, number: Any, c: Any) -> NativeValue:
    return NativeValue(c.pyapi.long_as_ulonglong(number))


def _call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    of = sig.args[0].of
    function = builder.inttoptr(args[0], context.call_conv.get_function_type(of.return_type, of.args).as_pointer())
    status, result = context.call_conv.call_function(builder, function, of.return_type, of.args, args[1:])
    with cgutils.if_unlikely(builder, status.is_error):
        context.call_conv.return_status_propagate(builder, status)
    return result


register_model(HookPointer)(_Address)
unbox(HookPointer)(_of_number)
lower_builtin(HookPointer, HookPointer, types.VarArg(types.Any))(_call)


def address_of(code: Any) -> Any:
    """Where a compiled function is; a plain one stands for itself."""
    if not hasattr(code, "overloads"):
        return code
    made = next(iter(code.overloads.values()))
    return made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
