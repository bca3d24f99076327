"""A small program that uses every private part of Numba on which `internals` and `calls` depend; run by `trial`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moereplay.simulator.jit import compiling, translation
from moereplay.simulator.jit.calls import caller, flat
from moereplay.simulator.jit.machine_code import unkept
from moereplay.simulator.jit.marks import (
    NotCompiledError,
    Reader,
    Shape,
    array_reader,
    bit_count,
    bit_length,
    called,
    fast,
    merged,
    whole_number,
)

#: A state like the engine's: numbers, addresses and a record.
STATE = np.dtype(
    [
        *((name, np.int64) for name in ("n", "m", "frozen", "at_table", "at_grid", "at_box")),
        ("inner", np.dtype([("sum", np.int64), ("last", np.int64)], align=True)),
    ],
    align=True,
)
BOX = np.dtype([("value", np.int64)], align=True)
ITEM = np.dtype([("id", np.int64), ("weight", np.float64)], align=True)
SHAPE = Shape(numbers=1, returns=True)
EVENT = Shape(numbers=1, returns=False, listeners=2)
LIMIT = 10


class Hooks(NamedTuple):
    """Pointers to hooks: one that returns a number, and the listeners of an event."""

    ask: Any
    notify: Any


table = array_reader("table", ITEM, "n")
grid = array_reader("grid", np.int64, "n", "m", whole=True)
box: Any = Reader("box", BOX)


@fast
def add(s, amount):
    """Add to the sum, inlined in its caller."""
    s["inner"]["sum"] += amount


@called
def visit(s, hooks, i):
    """Process one row with readers, a hook, both listeners and bit counts."""
    answer = hooks.ask(s, i)
    hooks.notify[0](s, answer)
    hooks.notify[1](s, answer)
    add(s, answer + bit_length(i) + bit_count(-1 - i))
    table(s)[i]["weight"] += 0.5
    s["inner"]["last"] = i


@merged
def row(s, i):
    """Return an array: only merged functions can."""
    return grid(s)[i]


def kernel(s, hooks):
    """Process all rows; a frozen number removes a branch."""
    for i in range(s["n"]):
        visit(s, hooks, i)
    if s["frozen"] == 1:
        s["inner"]["sum"] = -1


def ask(s, i):
    """Use a list, memory and an exception, as hooks may."""
    made = [i, 2 * i]
    if i > LIMIT:
        raise ValueError("beyond the limit", LIMIT)
    return whole_number(row(s, i)[0] + made[1] + box(s)["value"])


def notify(s, number):
    """Listen to an event."""
    box(s)["value"] += number % 3


def refused(s, i):
    """Return a float, which does not compile."""
    return whole_number(table(s)[i]["weight"])


def outside(s, i):
    """Use an index beyond the array, which bounds checks must reject."""
    return whole_number(grid(s)[i + 1000, 0])


def main() -> None:
    """Run the trial. Raises on the first failure."""

    def hook(adapter: Any, shape: Shape, checked: bool = False) -> int:
        return unkept(lambda: compiling.hook(adapter, STATE, shape, [], checked))

    listener = hook(notify, EVENT)
    pointers = Hooks(hook(ask, SHAPE), (listener, listener))
    code = unkept(lambda: translation.kernel(kernel, STATE, Hooks, (SHAPE, EVENT), {"frozen": 0}))
    state, arrays = example(7)
    caller(code, list(flat((state.ctypes.data, pointers))))()
    wanted = expected(7)
    found = (int(state["inner"]["sum"][0]), int(state["inner"]["last"][0]), int(arrays[2]["value"][0]))
    assert found == wanted, f"a kernel computed {found}, expected {wanted}"
    assert arrays[0]["weight"].tolist() == [0.5] * 7
    state, _ = example(LIMIT + 2)
    try:
        caller(code, list(flat((state.ctypes.data, pointers))))()
        raise AssertionError("an error of a hook was lost")
    except ValueError as error:
        assert error.args == ("beyond the limit", LIMIT), f"a hook raised {error.args}"
    try:
        hook(refused, SHAPE)
        raise AssertionError("a float was taken for a whole number")
    except NotCompiledError as error:
        assert "expected an integer" in str(error)
    checked = Hooks(hook(outside, SHAPE, checked=True), (listener, listener))
    try:
        caller(code, list(flat((state.ctypes.data, checked))))()
        raise AssertionError("an index outside of an array was not seen")
    except IndexError:
        pass
    print("passed")


def example(n: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return a state of n rows with its arrays."""
    state, arrays = np.zeros(1, STATE), (np.zeros(n, ITEM), np.arange(n * 3).reshape(n, 3).copy(), np.zeros(1, BOX))
    state["n"], state["m"] = n, 3
    for name, array in zip(("at_table", "at_grid", "at_box"), arrays, strict=True):
        state[name] = array.ctypes.data
    return state, arrays


def expected(n: int) -> tuple[int, int, int]:
    """Return the sum, the last row and the box, computed without the functions above."""
    total, value = 0, 0
    for i in range(n):
        answer = 3 * i + 2 * i + value
        value += 2 * (answer % 3)
        total += answer + i.bit_length() + (64 - i.bit_count())
    return total, n - 1, value
