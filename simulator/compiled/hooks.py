"""Policies' hooks as machine code: one signature per hook, so that one kernel calls them all through pointers.

A pointer, not a function that the kernel is compiled with: closures and dispatchers as arguments are never kept on
disk, and every policy would cost a compilation of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numba
from numba import types
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.extending import register_jitable

from policies.contract import Policy
from simulator.compiled import absent, asking
from simulator.compiled.own_hooks import bounds_checked, is_bounds_checked, refusal
from simulator.compiled.runtime import state
from simulator.compiled.runtime.layout import STATE
from simulator.compiled.runtime.machine_code import compile_kept, compile_unkept
from simulator.compiled.runtime.reached import digest, reached_from
from simulator.compiled.runtime.readable import readable
from simulator.config import KINDS

INT, NOTHING = types.int64, types.void


class Signature(NamedTuple):
    """What the kernels get from a hook, and how many numbers they give it beside the world."""

    result: Any
    numbers: int


#: Every hook of the contract, as `asking` asks it.
SIGNATURES = {
    "on_gate": Signature(NOTHING, 0),
    "on_use": Signature(NOTHING, 1),
    "on_insert": Signature(NOTHING, 2),
    "on_evict": Signature(NOTHING, 1),
    "on_predict": Signature(NOTHING, 1),
    "choose": Signature(NOTHING, 0),
    "suggest": Signature(INT, 0),
    "want": Signature(NOTHING, 0),
    "resolve": Signature(NOTHING, 2),
    "substitute": Signature(INT, 2),
    "key": Signature(NOTHING, 1),
    "victim": Signature(INT, 2),
    "admit": Signature(INT, 3),
}
MEMORY = {
    "routing": state.own_routing,
    "prefetch": state.own_prefetch,
    "eviction": state.own_eviction,
    "miss": state.own_miss,
}


def signature_of(hook: str) -> Any:
    """How a kernel sees a hook."""
    result, numbers = SIGNATURES[hook]
    return result(numba.from_dtype(STATE), *[INT] * numbers)


def given_by(policy: Policy) -> Iterator[tuple[str, FunctionType]]:
    """The hooks that a policy gives, by name."""
    for name in SIGNATURES:
        hook = getattr(policy, name, None)
        if isinstance(hook, FunctionType):
            yield name, hook


# compiling


def compiled(hook: str, policy: Policy) -> Callable:
    """A policy's hook as machine code, or one that does nothing. Raises PolicyError if it does not compile."""
    given = getattr(policy, hook, None)
    if given is None:
        return _machine(hook, getattr(absent, hook, absent.on_event), KINDS[0], frozenset())
    try:
        with bounds_checked(policy):
            return _machine(hook, given, policy.kind, policy.may_read)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise refusal(policy, hook, given, str(error)) from error


@cache
def _machine(hook: str, given: FunctionType, kind: str, reads: frozenset[str]) -> Callable:
    """Machine code, kept on disk under a name that changes with everything that went into it."""
    reached, asks = reached_from(given), getattr(asking, hook)
    for function in reached:
        _part_of_callers(function)
    tables = {"hook": given, "own": MEMORY[kind]} | readable(reads)
    code = FunctionType(asks.__code__, asks.__globals__ | tables, given.__name__)
    named = digest(reached, given.__module__, sorted(reads), is_bounds_checked())
    code.__module__, code.__qualname__ = given.__module__, f"{hook}_{given.__name__}_{kind}_{named}"
    compiler = compile_kept if named else compile_unkept
    try:  # without lists no references need be counted, which cost more than many a hook; the cache keeps either kind
        return compiler(signature_of(hook), code, _nrt=False)
    except NumbaError:
        return compiler(signature_of(hook), code)


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Known to Numba, for code that calls it; a call would hand over table by table."""
    register_jitable(forceinline=True)(function)
