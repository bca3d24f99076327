"""The functions and values that a function reaches, and a digest of them that names its machine code.

Names are matched generously: a global counts even if the code only uses an attribute of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import EnumMeta
from hashlib import sha256
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

#: Libraries that Numba supports; their versions are part of the folder's name.
LIBRARIES = ("numpy", "numba", "math", "builtins", "cmath", "operator")
NUMBERS = (bool, int, float, complex, str, bytes, range, type(None), type(...))


class Unnameable(Exception):  # noqa: N818 - not an error: code of such a function is not kept
    """A function reaches an object whose compiled form is unknown, so its code has no digest and is not kept."""


def reached_from(function: FunctionType) -> list[FunctionType]:
    """Return the function and all that it may call, directly or not, except for libraries' functions."""
    found = [function]
    for caller in found:  # grows in the loop
        for _, value in _reached_values(caller):
            called = getattr(value, "py_func", value)  # the Python source of a compiled function
            if isinstance(called, FunctionType) and called not in found and not _is_library(called):
                found.append(called)
    return found


def texts_of(functions: list[FunctionType]) -> set[str]:
    """Return the texts that functions hold as constants, and those that they reach by name."""
    found = {value for function in functions for _, value in _reached_values(function) if isinstance(value, str)}
    return found.union(*(_texts(function.__code__) for function in functions))


def _texts(code: CodeType) -> set[str]:
    constants = list(code.co_consts)
    for each in constants:  # grows in the loop
        constants += each if isinstance(each, tuple | frozenset) else ()
    inner = [each for each in constants if isinstance(each, CodeType)]
    return {each for each in constants if isinstance(each, str)}.union(*map(_texts, inner))


def digest(functions: list[FunctionType], *others: object) -> str | None:
    """Return a digest of the functions' code and of all values that they reach; None if a value has none.

    The code is that in memory, because the file may have changed since it was read.
    """
    hasher = sha256(repr(others).encode())
    try:
        for function in functions:
            hasher.update(repr((function.__name__, _code(function.__code__))).encode())
            for name, value in _reached_values(function):
                hasher.update(repr((name, _describe(value))).encode())
    except Unnameable:
        return None
    return hasher.hexdigest()[:16]


def _reached_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield closure cells, defaults and globals, and what modules and tuples among them hold, with names."""
    names = _names(function.__code__)
    values = [(name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys())]
    values += [("defaults", function.__defaults__), ("keywords", tuple((function.__kwdefaults__ or {}).items()))]
    values += zip(
        function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True
    )
    seen: set[str] = set()
    for name, value in values:  # grows in the loop
        yield name, value
        if isinstance(value, tuple):
            values += [(f"{name}[{at}]", each) for at, each in enumerate(value)]
        if isinstance(value, ModuleType) and value.__name__ not in seen and not _is_library(value):
            seen.add(value.__name__)
            values += [(f"{name}.{each}", vars(value)[each]) for each in sorted(names & vars(value).keys())]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in code and in functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_library(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    return name.split(".")[0] in LIBRARIES


def _describe(value: Any) -> Any:
    """Return a description of a value that is the same in every process. Raises Unnameable."""
    if isinstance(value, NUMBERS):
        return type(value).__name__, repr(value)
    if isinstance(value, tuple):
        return type(value).__name__, getattr(value, "_fields", ()), list(map(_describe, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.dtype.descr, value.shape, value.tobytes()
    if isinstance(value, EnumMeta):
        return [(member.name, _describe(member.value)) for member in value]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(type(value), EnumMeta):
        return type(value).__name__, value.name, _describe(value.value)
    if isinstance(value, FunctionType | ModuleType):
        return value.__name__
    return _describe_object(value)


def _describe_object(value: Any) -> Any:
    if hasattr(value, "py_func"):
        return value.py_func.__name__, repr(sorted(getattr(value, "targetoptions", {}).items()))
    if isinstance(value, type) and issubclass(value, tuple):
        return value.__name__, getattr(value, "_fields", ())
    if _is_library(value) or isinstance(value, np.dtype | np.ufunc):
        return repr(value)
    raise Unnameable


def _code(code: CodeType) -> Any:
    constants = [_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_name)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    place = (code.co_filename, code.co_firstlineno, code.co_linetable)  # exceptions contain the location
    return code.co_code, constants, names, counts, place, code.co_exceptiontable


def _constant(constant: Any) -> str:
    """Return a constant as text; the order of sets differs between processes, so they are sorted."""
    members = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
    return f"{type(constant).__name__} {members}"
