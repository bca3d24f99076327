"""What the machine code of a function is made of: every function and value that it reaches, and a digest of them.

Names are followed generously: what a function might mean by one counts, even if it only is a column of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import EnumMeta
from hashlib import sha256
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

#: Numba knows these itself, and their versions are part of the folder's name.
LIBRARIES = ("numpy", "numba", "math", "builtins", "cmath", "operator")
NUMBERS = (bool, int, float, complex, str, bytes, range, type(None), type(...))


class Unnameable(Exception):  # noqa: N818 - not an error: code of such a function is not kept
    """A function reaches an object of which it is not known what machine code makes of it."""


def reached_from(function: FunctionType) -> list[FunctionType]:
    """The function and all that it may call, however deep and by whatever way, but for libraries' own."""
    found = [function]
    for caller in found:  # which grows
        for _, value in _reached_values(caller):
            called = getattr(value, "py_func", value)  # of a function that is compiled already
            if isinstance(called, FunctionType) and called not in found and not _is_library(called):
                found.append(called)
    return found


def digest(functions: list[FunctionType], *others: object) -> str | None:
    """Of the code of the functions and of every value that they reach; None if one of those cannot be told.

    Code as it was read, not the file as it is: that may have changed since.
    """
    hasher = sha256(repr(others).encode())
    try:
        for function in functions:
            hasher.update(repr((function.__name__, _code(function.__code__))).encode())
            for name, value in _reached_values(function):
                hasher.update(repr((name, _told(value))).encode())
    except Unnameable:
        return None
    return hasher.hexdigest()[:16]


def _reached_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Cells of closures, defaults, globals, and what modules and tuples among those hold, each with its name."""
    names = _names(function.__code__)
    values = [(name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys())]
    values += [("defaults", function.__defaults__), ("keywords", tuple((function.__kwdefaults__ or {}).items()))]
    values += zip(
        function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True
    )
    seen: set[str] = set()
    for name, value in values:  # which grows
        yield name, value
        if isinstance(value, tuple):
            values += [(f"{name}[{at}]", each) for at, each in enumerate(value)]
        if isinstance(value, ModuleType) and value.__name__ not in seen and not _is_library(value):
            seen.add(value.__name__)
            values += [(f"{name}.{each}", vars(value)[each]) for each in sorted(names & vars(value).keys())]


def _names(code: CodeType) -> set[str]:
    """Names of globals and of attributes in code and in the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_library(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    return name.split(".")[0] in LIBRARIES


def _told(value: Any) -> Any:
    """A value as text may show it, the same in every process; functions are told by their code. Raises Unnameable."""
    if isinstance(value, NUMBERS):
        return type(value).__name__, repr(value)
    if isinstance(value, tuple):
        return type(value).__name__, getattr(value, "_fields", ()), list(map(_told, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.dtype.descr, value.shape, value.tobytes()
    if isinstance(value, EnumMeta):
        return [(member.name, _told(member.value)) for member in value]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(type(value), EnumMeta):
        return type(value).__name__, value.name, _told(value.value)
    if isinstance(value, FunctionType | ModuleType):
        return value.__name__
    return _told_of_object(value)


def _told_of_object(value: Any) -> Any:
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
    place = (code.co_filename, code.co_firstlineno, code.co_linetable)  # which machine code names in what it raises
    return code.co_code, constants, names, counts, place, code.co_exceptiontable


def _constant(constant: Any) -> str:
    """Sets have another order in every process."""
    members = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
    return f"{type(constant).__name__} {members}"
