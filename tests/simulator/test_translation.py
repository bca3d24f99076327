"""Translated functions compute what Python does, and refuse what they do not know."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from moereplay.simulator.jit import translation
from moereplay.simulator.jit.calls import caller, flat
from moereplay.simulator.jit.machine_code import unkept
from moereplay.simulator.jit.marks import IS_PYTHON, NotCompiledError, called

pytestmark = pytest.mark.skipif(IS_PYTHON, reason="there is no compiler in plain Python")
ROW = np.dtype([("x", np.int8), ("y", np.int64)], align=True)
STATE = np.dtype(
    [
        ("a", np.int64),
        ("b", np.int64),
        ("real", np.float64),
        *((name, np.int64) for name in ("floor", "rest", "least", "most", "size", "chain", "either", "seen", "total")),
        ("ratio", np.float64),
        ("rows", ROW, (4,)),
    ],
    align=True,
)


class NoHooks(NamedTuple):
    """A kernel without hooks."""


def kernel(s: Any, hooks: Any) -> None:
    """Use every operator once."""
    a, b = s["a"], s["b"]
    if b != 0:
        s["floor"], s["rest"] = a // b, a % b
    s["least"], s["most"], s["size"] = min(a, b, 3), max(a, b, 3), abs(a - b)
    s["chain"] = 1 if -3 <= a < b else 0
    s["either"] = 1 if (a > 2 or b > 2) and not (a > b) else 0
    s["seen"] = seen(a, b)
    s["total"] = total(s)
    s["ratio"] = max(s["real"], 0.5) * a - b / 3


@called
def seen(a, b):
    """Hold a truth value and a number in one variable."""
    found = a > b
    beyond = a > 2 or b > 2
    if a == b:
        found = 2
    return 0 + found + 4 * beyond + (a > 0)  # numpy adds truth values to a truth value


@called
def total(s):
    """Loop with a step, continue, break, and a copy of a record."""
    found, rows = 0, s["rows"]
    for i in range(0, 40, 2):
        if i == 4:
            continue
        if i > 4 + s["a"] + s["b"]:
            break
        found += i
    rows[1] = rows[0]
    rows[-1]["x"] += 1
    found += rows[3]["x"]
    rows[0]["y"] = found
    while found > 7:
        found -= rows[1]["x"] + 1
    return found


def test_operators_have_pythons_meaning() -> None:
    address = unkept(lambda: translation.kernel(kernel, (STATE, {}), NoHooks, (), {}))
    for a, b in itertools.product((-7, -2, -1, 0, 1, 2, 5, 6), repeat=2):
        state = np.zeros(1, STATE)
        state["a"], state["b"], state["real"], state["rows"]["x"] = a, b, a / 7, (3, 1, 2, -5)
        other = state.copy()
        caller(address, list(flat((state.ctypes.data, NoHooks()))))()
        kernel(other[0], NoHooks())
        assert state == other, (a, b, state, other)


def by_zero(s: Any, hooks: Any) -> None:
    """Divide without a test."""
    s["floor"], s["rest"] = s["a"] // s["b"], s["a"] % s["b"]


def test_a_divisor_of_zero_gives_zero_as_in_numpy() -> None:
    state = np.ones(1, STATE)
    state["b"] = 0
    address = unkept(lambda: translation.kernel(by_zero, (STATE, {}), NoHooks, (), {}))
    caller(address, list(flat((state.ctypes.data, NoHooks()))))()
    assert (state["floor"][0], state["rest"][0]) == (0, 0)


def fraction(s: Any, hooks: Any) -> None:
    """Store a fraction in a whole number."""
    s["a"] = s["real"]


def unmarked(s: Any, hooks: Any) -> None:
    """Call a function without a mark."""
    fraction(s, hooks)


def two_kinds(s: Any, hooks: Any) -> None:
    """Hold a number and a record in one variable."""
    found = s["a"]
    if found > 0:
        found = s["rows"][0]


@pytest.mark.parametrize(
    ("function", "message"),
    [(fraction, "a fraction in place of"), (unmarked, "is the function marked"), (two_kinds, "two kinds of values")],
)
def test_what_has_no_translation_is_refused_with_its_line(function: Any, message: str) -> None:
    with pytest.raises(NotCompiledError, match=rf"test_translation.py: line \d+: .*{message}"):
        translation.translated(function, "kernel", (STATE, {}), NoHooks, (), {})
