"""How functions become one piece of machine code: put together first, and optimised once.

Numba would optimise and load every function by itself, with all that it calls, and once more in each of its callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

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
