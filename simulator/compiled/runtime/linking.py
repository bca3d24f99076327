"""How the functions of a kernel become one piece of machine code: put together first, and optimised once.

Numba would optimise and load every function by itself, with all that it calls, and once more in each of its callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

LEVEL = 3  #: Numba's own


class NotLoaded:
    """Stands for Numba's engine where a part reports to it."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Nobody calls a part from Python."""


class Part(JITCodeLibrary):
    """A function that others are made with: neither optimised nor loaded by itself."""

    hint = ""  #: to LLVM, on every function
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


class Hinted(Part):
    """One that its callers had better take in."""

    hint = "inlinehint"


class Whole(JITCodeLibrary):
    """What is called from outside, with every part that it reaches."""

    def add_llvm_module(self, ll_module: Any) -> None:
        """Keep it as it is."""
        ll_module.data_layout = self._codegen._data_layout
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        """Put the parts in, hide them, optimise once, and load."""
        own = {each.name for each in _defined(self._final_module)}
        for library in _reached_from(self):
            module = library._final_module if isinstance(library, Part) else library._get_module_for_linking()
            self._final_module.link_in(module, preserve=True)
        for each in _defined(self._final_module):
            if each.name not in own:
                each.linkage = binding.Linkage.internal
        _optimise(self._final_module, self._codegen._tm)
        self._finalize_final_module()


def _optimise(module: Any, machine: Any) -> None:
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=LEVEL))
    builder.getModulePassManager().run(module, builder)


def _defined(module: Any) -> list[Any]:
    return [each for each in (*module.functions, *module.global_variables) if not each.is_declaration]


def _reached_from(library: Any) -> Iterator[Any]:
    """Every library that it calls, once; what is no part has linked its own."""
    waiting, seen = list(library._linking_libraries), set()
    for each in waiting:  # which grows
        if each not in seen:
            seen.add(each)
            waiting += each._linking_libraries if isinstance(each, Part) else ()
            yield each


class PartCompiler(CompilerBase):
    """Numba's own passes, into a part."""

    library = Part

    def define_pipelines(self) -> list[Any]:
        """Numba's, with a library of our own."""
        self.state.library = self.library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


class HintedCompiler(PartCompiler):
    """Numba's own passes, into a part that is merged."""

    library = Hinted


class WholeCompiler(PartCompiler):
    """Numba's own passes, into what is called from outside."""

    library = Whole
