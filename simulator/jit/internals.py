"""Numba and LLVM below their public names: this file, and the calling convention in `calls`.

First what `marks` only names, in LLVM's language: readers of the state, bits, and pointers to hooks. Then how functions
become one piece of machine code: put together first, and optimised once. Numba would optimise and load every function
by itself, with all that it calls, and once more in each of its callers. `canary` tries all of it before it is used, and
`plain` does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
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


# -- one piece of machine code ---------------------------------------------------------------------------------------

LEVEL = 3  #: of optimisation: Numba's own


class NotLoaded:
    """Stands for Numba's engine, which loads what is called from Python."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """What has not been loaded has no environment."""


class Part(JITCodeLibrary):
    """A function that others are made with."""

    hint = ""  #: an attribute of LLVM's, on every function
    codegen = NotLoaded  # pyright: ignore[reportAssignmentType]

    def add_llvm_module(self, ll_module: Any) -> None:
        """Keep it as it is."""
        for function in ll_module.functions if self.hint else ():
            if not function.is_declaration:
                function.add_function_attribute(self.hint)
        ll_module.data_layout = self._codegen._data_layout
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        """Nothing is added from here on."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """It is nowhere."""
        return 0


class Inlined(Part):
    """One that its callers take in."""

    hint = "alwaysinline"


class Whole(Part):
    """What is called from outside, with every part that it reaches."""

    def object_code(self, entry: str, vectorised: bool) -> tuple[bytes, list[str]]:
        """Machine code, of which only `entry` is seen from outside, and the names of what it does not define.

        Loops are not to be `vectorised` where most of them have a few turns.
        """
        for library in _reached_from(self):
            part = library._final_module if isinstance(library, Part) else library._get_module_for_linking()
            self._final_module.link_in(part, preserve=True)
        for each in _defined(self._final_module):
            if each.name != entry:
                each.linkage = binding.Linkage.internal
        machine = self._codegen._tm
        options = binding.create_pipeline_tuning_options(speed_level=LEVEL)
        options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = vectorised
        builder = binding.create_pass_builder(machine, options)
        builder.getModulePassManager().run(self._final_module, builder)
        return machine.emit_object(self._final_module), _undefined(self._final_module)


def _reached_from(library: Any) -> Iterator[Any]:
    """Every library that it calls, once; what is no part has linked its own."""
    waiting, seen = list(library._linking_libraries), set()
    for each in waiting:  # which grows
        if each not in seen:
            seen.add(each)
            waiting += each._linking_libraries if isinstance(each, Part) else ()
            yield each


def _named(module: Any) -> list[Any]:
    return [*module.functions, *module.global_variables]


def _defined(module: Any) -> list[Any]:
    return [each for each in _named(module) if not each.is_declaration]


def _undefined(module: Any) -> list[str]:
    return [each.name for each in _named(module) if each.is_declaration and not each.name.startswith("llvm.")]


class PartCompiler(CompilerBase):
    """Numba's own passes, into a part."""

    library: type[Part] = Part

    def define_pipelines(self) -> list[Any]:
        """Numba's, with a library of our own."""
        self.state.library = self.library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


class InlinedCompiler(PartCompiler):
    """Numba's own passes, into a part that is merged."""

    library = Inlined


class WholeCompiler(PartCompiler):
    """Numba's own passes, into what is called from outside."""

    library = Whole


def register_runtime() -> None:
    """Make known to LLVM what hooks that allocate or print need of Numba; takes half a second."""
    assert cpu_target.target_context


@contextmanager
def bounds_checks(wanted: bool) -> Iterator[None]:
    """Compile meanwhile so that an index outside of an array raises IndexError.

    Not by the option of njit, which functions that the hook calls would not inherit.
    """
    settings: Any = config  # its attributes are set when it is imported
    before = settings.BOUNDSCHECK
    settings.BOUNDSCHECK = 1 if wanted else before
    try:
        yield
    finally:
        settings.BOUNDSCHECK = before
