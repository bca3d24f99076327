"""Policies' hooks as machine code: one signature per hook, so that one kernel calls them all through pointers.

A pointer, not a function that the kernel is compiled with: closures and dispatchers as arguments are never kept on
disk, and every policy would cost a compilation of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.extending import register_jitable

from policies.contract import Policy
from simulator.compiled import absent, asking, state
from simulator.compiled.cache import compile_kept
from simulator.compiled.layout import WORLD
from simulator.compiled.own_hooks import bounds_checked, refusal
from simulator.config import KINDS, PolicySet

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
    return result(numba.from_dtype(WORLD), *[INT] * numbers)


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
        return _machine(hook, getattr(absent, hook, absent.on_event), KINDS[0])
    try:
        with bounds_checked(policy):
            return _machine(hook, given, policy.kind)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise refusal(policy, hook, given, str(error)) from error


@cache
def _machine(hook: str, given: FunctionType, kind: str) -> Callable:
    """Machine code that is kept on disk under a name that changes with every source that went into it."""
    reached, asks = reached_from(given), getattr(asking, hook)
    for function in reached:
        _part_of_callers(function)
    code = FunctionType(asks.__code__, asks.__globals__ | {"hook": given, "own": MEMORY[kind]}, given.__name__)
    code.__module__, code.__qualname__ = given.__module__, f"{hook}_{given.__qualname__}_{kind}_{_digest(reached)}"
    try:  # without lists no references need be counted, which cost more than many a hook; the cache keeps either kind
        return compile_kept(signature_of(hook), code, _nrt=False)
    except NumbaError:
        return compile_kept(signature_of(hook), code)


@cache
def _part_of_callers(function: FunctionType) -> None:
    """Known to Numba, for code that calls it; a call would hand over table by table."""
    register_jitable(forceinline=True)(function)


def reached_from(function: FunctionType) -> list[FunctionType]:
    """The function and all that it calls, however deep, but for libraries that numba knows."""
    found, waiting = [function], [function]
    while waiting:
        caller = waiting.pop()
        for name in sorted(_names(caller.__code__)):
            called = caller.__globals__.get(name)
            if isinstance(called, FunctionType) and called not in found and not _is_library(called):
                found.append(called)
                waiting.append(called)
    return found


@cache
def names_in(function: FunctionType) -> frozenset[str]:
    """Every text and name that the function or what it calls mentions, among them each column that they read."""
    codes = [reached.__code__ for reached in reached_from(function)]
    return frozenset(text for code in codes for text in (*_texts(code), *_names(code)))


def mentioned(chosen: PolicySet) -> frozenset[str]:
    """What any hook of the four policies mentions."""
    policies = [getattr(chosen, kind).policy for kind in KINDS]
    return frozenset().union(*(names_in(hook) for policy in policies for _, hook in given_by(policy)))


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _is_library(function: FunctionType) -> bool:
    return function.__module__.split(".")[0] in ("numpy", "numba", "math")


def _names(code: CodeType) -> set[str]:
    """Global names used by code and by the comprehensions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _digest(functions: list[FunctionType]) -> str:
    """Of the files that the functions come from, of the numbers that they find there or import, of the first one's
    place, as two policies may share a name, and of its module: a policy file may have changed since it was read.
    """
    first = functions[0]
    hasher = sha256(f"{first.__module__}:{first.__code__.co_filename}:{first.__code__.co_firstlineno}".encode())
    for path in sorted({Path(function.__code__.co_filename) for function in functions}):
        hasher.update(path.read_bytes() if path.is_file() else b"")
    for function in functions:
        hasher.update(repr(list(_constants(function))).encode())
    return hasher.hexdigest()[:16]


def _constants(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals that machine code keeps as they are when it is made."""
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, np.ndarray):
            yield name, (value.dtype.str, value.shape, value.tobytes())
        elif isinstance(value, (int, float, complex, str, bytes, tuple, np.generic)):
            yield name, value
