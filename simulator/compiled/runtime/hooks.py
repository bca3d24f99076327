"""Policies' hooks as machine code, which kernels call through pointers: one signature per hook, made from their table.

A pointer, not a function that the kernel is compiled with: closures and dispatchers as arguments are never kept on
disk, and every policy would cost a compilation of the kernel.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from types import FunctionType, NoneType
from typing import Any

import numba
from numba import types
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.extending import register_jitable

from policies.contract import NONE, Policy
from policies.hooks import HOOKS, KINDS
from simulator.compiled.runtime import adapters, state
from simulator.compiled.runtime.jit import WHOLE, fast, merged, whole_number
from simulator.compiled.runtime.layout import STATE
from simulator.compiled.runtime.machine_code import compile_kept, compile_unkept
from simulator.compiled.runtime.pointers import HookPointer, address_of
from simulator.compiled.runtime.reached import digest, reached_from
from simulator.compiled.runtime.readable import readable
from simulator.compiled.runtime.user_hooks import bounds_checked, is_bounds_checked, refusal
from simulator.config import PolicySet

INT, NOTHING = types.int64, types.void
#: What a kernel takes: a pointer per hook, and for an event one per kind of policy, in the order of KINDS.
BoundHooks = namedtuple("BoundHooks", HOOKS)
MEMORY: dict[str, Callable] = dict(
    zip(KINDS, (state.own_routing, state.own_prefetch, state.own_eviction, state.own_miss), strict=True)
)


def bound(names: tuple[str, ...], chosen: PolicySet) -> tuple[Any, ...]:
    """Pointers to these hooks of the four policies. Raises PolicyError for one that does not compile."""
    return tuple(_bound(name, chosen) for name in names)


def _bound(name: str, chosen: PolicySet) -> Any:
    pointers = tuple(address_of(compiled(name, getattr(chosen, kind).policy)) for kind in HOOKS[name].kinds)
    return pointers if HOOKS[name].is_event else pointers[0]


def types_of(names: tuple[str, ...]) -> list[Any]:
    """The types of these pointers, as a kernel is compiled for them."""
    return [_type_of(name) for name in names]


def _type_of(name: str) -> Any:
    pointer = HookPointer(signature_of(name))
    return types.UniTuple(pointer, len(KINDS)) if HOOKS[name].is_event else pointer


@cache
def signature_of(name: str) -> Any:
    """How a kernel sees a hook: it takes the simulation state and the numbers that its adapter takes."""
    return _signature(_numbers(name), _answers(name))


@cache
def _signature(numbers: int, answers: bool) -> Any:
    return (INT if answers else NOTHING)(numba.from_dtype(STATE), *[INT] * numbers)


def _adapter(name: str) -> FunctionType:
    return getattr(adapters, name, adapters.BY_NUMBERS[len(HOOKS[name].own_arguments)])


def _numbers(name: str) -> int:
    return _adapter(name).__code__.co_argcount - 1


def _answers(name: str) -> bool:
    return HOOKS[name].result is not NoneType and _adapter(name) not in adapters.BATCHED


# compiling


def compiled(name: str, policy: Policy) -> Callable:
    """A policy's hook as machine code, or one that does nothing. Raises PolicyError if it does not compile."""
    given = getattr(policy, name, None)
    if given is None:
        return _absent(_numbers(name), _answers(name))
    try:
        with bounds_checked(policy):
            return _machine(name, given, policy.kind, policy.may_read)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise refusal(policy, name, given, str(error)) from error


@cache
def _absent(numbers: int, answers: bool) -> Callable:
    """For hooks that a policy does not give; kernels call none of them."""
    adapter = adapters.ABSENT[numbers]
    code = _with(adapter, {"answer": NONE if answers else None}, adapter.__name__)
    return compile_kept(_signature(numbers, answers), code, _nrt=False, **WHOLE)


@cache
def _machine(name: str, given: FunctionType, kind: str, reads: frozenset[str]) -> Callable:
    """Machine code, kept on disk under a name that changes with everything that went into it."""
    reached = reached_from(given)
    for function in reached:
        _part_of_callers(function)
    code = _with(_adapter(name), {"hook": given} | _around(name, kind, reads), given.__name__)
    named = digest(reached, given.__module__, sorted(reads), is_bounds_checked())
    code.__module__, code.__qualname__ = given.__module__, f"{name}_{given.__name__}_{kind}_{named}"
    compiler = compile_kept if named else compile_unkept
    try:  # without lists no references need be counted, which cost more than many a hook; the cache keeps either kind
        return compiler(signature_of(name), code, _nrt=False, **WHOLE)
    except NumbaError:
        return compiler(signature_of(name), code, **WHOLE)


def _around(name: str, kind: str, reads: frozenset[str]) -> dict[str, Callable]:
    """What an adapter reads for a hook, and what it does with the result."""
    reading = readable(reads) | {"own": MEMORY[kind]}
    tables = adapters.with_step if HOOKS[name].at_gate else adapters.without_step
    result_of = no_result if HOOKS[name].result is NoneType else whole_number
    return reading | {"tables": merged(_with(tables, reading, tables.__name__)), "result_of": result_of}


def _with(function: FunctionType, values: dict[str, Any], name: str) -> FunctionType:
    """A copy of a function with more globals."""
    return FunctionType(function.__code__, function.__globals__ | values, name)


@fast
def no_result(answer):
    """For hooks that return nothing, whatever they return."""


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Known to Numba, for code that calls it; a call would hand over table by table."""
    register_jitable(forceinline=True)(function)
