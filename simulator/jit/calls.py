"""Calls of machine code from Python: arguments in Numba's calling convention, and exceptions.

Numba's convention is a pointer for the result, one for an exception, then all numbers of all arguments one by one. The
GIL is released during a call.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import FunctionType
from typing import Any

import numpy as np

from moereplay.simulator.jit.machine_code import COMPILING, any_kept, kept
from moereplay.simulator.jit.marks import IS_PYTHON

DONE, NOTHING = 0, -2  #: status codes without an exception


class Raised(ctypes.Structure):
    """Numba's record of an exception."""

    _fields_ = [
        ("pickled", ctypes.c_void_p),
        ("size", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("unwrap", ctypes.c_void_p),
        ("dynamic", ctypes.c_int32),
    ]


class Compiled:
    """A function of numbers, arrays and tuples of them that returns nothing, compiled at its first call."""

    def __init__(self, function: FunctionType) -> None:
        """Arguments must have the same types at every call."""
        self._function, self._addresses = function, dict[str, int]()
        self._name = f"{function.__module__}{function.__name__}"

    @property
    def is_kept(self) -> bool:
        """True if machine code for some argument types is on disk."""
        return any_kept(self._name)

    def __call__(self, *arguments: Any) -> None:
        """Call the function. Raises its exceptions."""
        caller(self._address(arguments, kinds(arguments)), list(flat(arguments)))()

    def _address(self, arguments: tuple[Any, ...], kind: str) -> int:
        with COMPILING:
            if kind not in self._addresses:
                name = f"{self._name}_{sha256(kind.encode()).hexdigest()[:16]}"
                self._addresses[kind] = kept(name, lambda: self._built(arguments))
            return self._addresses[kind]

    def _built(self, arguments: tuple[Any, ...]) -> Any:
        from moereplay.simulator.jit import compiling  # numba takes half a second to import

        return compiling.of_arguments(self._function, arguments)


def compiled(function: Callable) -> Callable:
    """Return a function compiled together with the marked functions that it calls."""
    assert isinstance(function, FunctionType)
    return function if IS_PYTHON else Compiled(function)


def kinds(argument: Any) -> str:
    """Return the types of an argument, as text."""
    if isinstance(argument, tuple):
        return f"{type(argument).__name__}({','.join(map(kinds, argument))})"
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return f"{argument.dtype.str}{argument.ndim}{'w' if argument.flags.writeable else 'r'}"
    return "b" if isinstance(argument, bool) else "i"


def flat(argument: Any) -> Iterator[Any]:
    """Yield the numbers of an argument. An array: no owner, length, bytes per item, address, shape, strides."""
    if isinstance(argument, tuple):
        for each in argument:
            yield from flat(each)
    elif isinstance(argument, np.ndarray):
        yield from map(ctypes.c_void_p, (0, 0))
        yield from map(ctypes.c_int64, (argument.size, argument.itemsize))
        yield ctypes.c_void_p(argument.ctypes.data)
        yield from map(ctypes.c_int64, (*argument.shape, *argument.strides))
    else:
        yield ctypes.c_int8(argument) if isinstance(argument, bool) else ctypes.c_int64(argument)


def caller(address: int, numbers: list[Any]) -> Callable[[], None]:
    """Return a function that calls the code at an address with these arguments, and raises its exceptions."""
    code = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *map(type, numbers))(address)
    result, raised = ctypes.c_void_p(), ctypes.POINTER(Raised)()

    def called() -> None:
        if code(ctypes.addressof(result), ctypes.addressof(raised), *numbers) not in (DONE, NOTHING):
            _raise(raised.contents)

    return called


def _raise(raised: Raised) -> None:
    """Raise an exception that Numba pickled, with its location as the traceback's last line."""
    kind, arguments, place = pickle.loads(ctypes.string_at(raised.pickled, raised.size))
    if raised.dynamic > 0:  # arguments that were known only at run time
        values = iter(ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(raised.unwrap)(raised.values))
        arguments = [each if isinstance(each, str | int | float | None) else next(values) for each in arguments]
    error = kind(*(arguments or ()))
    if place is None:
        raise error
    name, file, line = place
    exec(compile("\n" * (line - 1) + "raise error", file, "exec").replace(co_name=name), {"error": error})
