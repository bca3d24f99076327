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

from policies.contract import COPY, EXPERT, NOW, Own, Policy, Step
from simulator.compiled import absent
from simulator.compiled.cache import compile_kept
from simulator.compiled.layout import WORLD
from simulator.compiled.own_hooks import bounds_checked, refusal
from simulator.config import KINDS, PolicySet

TABLES = ("now", "experts", "copies", "own")
AT_GATE = ("now", "step", "experts", "copies", "own")
INT, NOTHING, YES_NO = types.int64, types.void, types.boolean


class Signature(NamedTuple):
    """What a hook returns and the names of its parameters, in order."""

    result: Any
    names: tuple[str, ...]


#: Every hook of the contract; a parameter's name says its type.
SIGNATURES = {
    "on_gate": Signature(NOTHING, AT_GATE),
    "on_use": Signature(NOTHING, (*TABLES, "y")),
    "on_insert": Signature(NOTHING, (*TABLES, "y", "prefetched")),
    "on_evict": Signature(NOTHING, (*TABLES, "y")),
    "on_predict": Signature(NOTHING, (*TABLES, "y")),
    "choose": Signature(NOTHING, (*AT_GATE, "out")),
    "suggest": Signature(INT, (*AT_GATE, "out")),
    "want": Signature(INT, (*AT_GATE, "n")),
    "resolve": Signature(NOTHING, (*AT_GATE, "missing", "free", "verdict")),
    "substitute": Signature(INT, (*AT_GATE, "t", "j", "eligible")),
    "key": Signature(INT, (*TABLES, "y")),
    "victim": Signature(INT, (*TABLES, "pool", "y_in")),
    "admit": Signature(YES_NO, (*TABLES, "y_in", "prefetched", "y_out")),
}
#: What an absent hook does, where it is not an event; the kernel calls none of them.
NOTHING_DONE = {
    "on_gate": absent.on_gate,
    "on_insert": absent.on_insert,
    "choose": absent.choose,
    "suggest": absent.suggest,
    "want": absent.want,
    "substitute": absent.substitute,
    "keys": absent.keys,
    "victim": absent.victim,
    "admit": absent.admit,
}
#: The kernel asks for many keys at once, of which it gives the copies and takes the answers in its world.
KEYS = Signature(NOTHING, ("w", "count"))


def _array(dtype: Any, axes: int, layout: str = "C", readonly: bool = False) -> types.Array:
    return types.Array(dtype, axes, layout, readonly=readonly)


def _record(dtype: np.dtype) -> Any:
    return numba.from_dtype(dtype)


NUMBERS = _array(INT, 1)
OWN = types.NamedTuple(
    [_array(INT, 2), _array(INT, 2), _array(types.float64, 2), _array(types.float64, 1), NUMBERS], Own
)
#: Views of the trace's own arrays where no copy is needed.
STEP = types.NamedTuple(
    [
        _array(INT, 2),
        _array(types.float64, 2),
        _array(types.float64, 2),
        _array(types.int32, 2, "A", readonly=True),
        _array(types.int16, 3, "A", readonly=True),
        _array(types.int32, 3, "A", readonly=True),
        *[NUMBERS] * 4,
        _array(INT, 2),
    ],
    Step,
)
TYPES = {
    "now": _record(NOW),
    "experts": _array(_record(EXPERT), 1),
    "copies": _array(_record(COPY), 1),
    "own": OWN,
    "step": STEP,
    "w": _record(WORLD),
}
TYPES |= dict.fromkeys(("missing", "verdict", "eligible"), NUMBERS)


def type_of(hook: str, name: str) -> types.Type:
    """The type of a hook's parameter."""
    if name == "out":
        return _array(INT, 2 if hook == "choose" else 1)
    return TYPES.get(name, INT)


def signature_of(hook: str) -> Any:
    """A hook's signature."""
    result, names = KEYS if hook == "keys" else SIGNATURES[hook]
    return result(*(type_of(hook, name) for name in names))


def given_by(policy: Policy) -> Iterator[tuple[str, FunctionType]]:
    """The hooks that a policy gives, by name."""
    for name in SIGNATURES:
        hook = getattr(policy, name, None)
        if isinstance(hook, FunctionType):
            yield name, hook


# compiling


def compiled(hook: str, policy: Policy) -> Callable:
    """A policy's hook as machine code, or one that does nothing. Raises PolicyError if it does not compile."""
    name = "key" if hook == "keys" else hook
    given = getattr(policy, name, None)
    if given is None:
        return _machine(hook, NOTHING_DONE.get(hook, absent.on_event))
    try:
        with bounds_checked(policy):
            return _keys(given) if hook == "keys" else _machine(hook, given)
    except (NumbaError, UnsupportedBytecodeError) as error:
        raise refusal(policy, name, given, str(error)) from error


@cache
def _machine(hook: str, function: FunctionType) -> Callable:
    return _compile(hook, function.__code__, function.__globals__, function)


@cache
def _keys(key: FunctionType) -> Callable:
    """A loop over a policy's key: one call through a pointer for many keys."""
    register_jitable(key)
    return _compile("keys", absent.ask_each.__code__, absent.ask_each.__globals__ | {"key": key}, key)


def _compile(hook: str, code: CodeType, names: dict[str, Any], of: FunctionType) -> Callable:
    """Machine code that is kept on disk under a name that changes with every source that went into it."""
    reached = reached_from(of)
    for function in reached[1:]:
        register_jitable(function)
    copy = FunctionType(code, names, of.__name__, of.__defaults__, of.__closure__)
    copy.__module__, copy.__qualname__ = of.__module__, f"{hook}_{of.__qualname__}_{_digest(reached)}"
    try:  # without lists no references need be counted, which cost more than many a hook; the cache keeps either kind
        return compile_kept(signature_of(hook), copy, _nrt=False)
    except NumbaError:
        return compile_kept(signature_of(hook), copy)


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
