"""Policies' hooks as machine code, which kernels call through pointers: one signature per hook, made from their table.

A pointer, not a function that the kernel is compiled with: closures and dispatchers as arguments are never kept on
disk, and every policy would cost a compilation of the kernel.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

from moereplay.policies.contract import Policy
from moereplay.policies.hooks import HOOKS, KINDS
from moereplay.simulator.compiled import adapters, state
from moereplay.simulator.compiled.layout import STATE
from moereplay.simulator.compiled.readable import readable
from moereplay.simulator.compiled.user_hooks import refusal
from moereplay.simulator.config import PolicySet
from moereplay.simulator.jit.machine_code import kept, unkept
from moereplay.simulator.jit.marks import IS_PYTHON, NotCompiledError, Shape, fast, merged, whole_number
from moereplay.simulator.jit.reached import digest, reached_from
from moereplay.simulator.jit.trial import is_sound

if TYPE_CHECKING:
    from moereplay.simulator.jit.compiling import Built

#: In place of a hook that a policy does not give; kernels call none of them.
ABSENT = None if IS_PYTHON else 0
#: What a kernel takes: a pointer per hook, and for an event one per kind of policy, in the order of KINDS.
BoundHooks = namedtuple("BoundHooks", HOOKS)
MEMORY: dict[str, Callable] = dict(
    zip(KINDS, (state.own_routing, state.own_prefetch, state.own_eviction, state.own_miss), strict=True)
)


def bound(names: tuple[str, ...], chosen: PolicySet) -> tuple[Any, ...]:
    """Pointers to these hooks of the four policies. Raises PolicyError for one that does not compile."""
    return tuple(_bound(name, chosen) for name in names)


def _bound(name: str, chosen: PolicySet) -> Any:
    pointers = tuple(compiled(name, getattr(chosen, kind).policy) for kind in HOOKS[name].kinds)
    return pointers if HOOKS[name].is_event else pointers[0]


def shapes_of(names: tuple[str, ...]) -> list[Shape]:
    """What a kernel that takes these hooks knows of them."""
    return [_shape(name) for name in names]


@cache
def _shape(name: str) -> Shape:
    """A kernel hands over the simulation state and the numbers that the adapter takes."""
    answers = HOOKS[name].result is not NoneType and _adapter(name) not in adapters.BATCHED
    return Shape(_adapter(name).__code__.co_argcount - 1, answers, len(KINDS) if HOOKS[name].is_event else 0)


def _adapter(name: str) -> FunctionType:
    return getattr(adapters, name, adapters.BY_NUMBERS[len(HOOKS[name].own_arguments)])


# compiling


def plain() -> Any:
    """The way through Numba's public names; numba takes half a second to import."""
    from moereplay.simulator.jit import plain as through_public_names

    return through_public_names


def compiled(name: str, policy: Policy) -> Any:
    """Where a policy's hook is as machine code. Raises PolicyError if it does not compile."""
    given = getattr(policy, name, None)
    if given is None:
        return ABSENT if IS_PYTHON or is_sound() else plain().absent(STATE, _shape(name))
    try:
        return _machine(name, given, policy.kind, policy.may_read, bool(policy.version))
    except NotCompiledError as error:
        raise refusal(policy, name, given, str(error)) from error


@cache
def _machine(name: str, given: FunctionType, kind: str, reads: frozenset[str], checked: bool) -> Any:
    """The address; in plain Python the adapter. Indices of users' own hooks are `checked`."""
    code = _with(_adapter(name), {"hook": given} | _around(name, kind, reads), given.__name__)
    if IS_PYTHON:
        return code
    reached = reached_from(given)
    if not is_sound():
        return plain().hook(code, STATE, _shape(name), reached, checked)
    build = partial(_built, name, code, reached, checked)
    named = name_of(name, given, kind, reads, checked)
    return kept(named, build) if named else unkept(build)


def name_of(name: str, given: FunctionType, kind: str, reads: frozenset[str], checked: bool) -> str:
    """Under which a hook is kept: it changes with everything that goes into its code; empty if that cannot be told."""
    content = digest(reached_from(given), given.__module__, sorted(reads), checked)
    return f"{name}_{given.__name__}_{kind}_{content}" if content else ""


def _built(name: str, code: FunctionType, reached: list[FunctionType], checked: bool) -> Built:
    from moereplay.simulator.jit import compiling  # numba takes half a second to import

    return compiling.hook(code, STATE, _shape(name), reached, checked)


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
