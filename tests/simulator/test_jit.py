"""The tool chain: a small program that uses every private part of Numba on which the compiled engine depends."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from moereplay.simulator.compiled import engine
from moereplay.simulator.jit import translation
from moereplay.simulator.jit.calls import caller, flat
from moereplay.simulator.jit.machine_code import unkept
from moereplay.simulator.jit.marks import (
    IS_PYTHON,
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

pytestmark = pytest.mark.skipif(IS_PYTHON, reason="there is no compiler in plain Python")
ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("numba", "numba.extending", "llvmlite")

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
READERS = {"table": table}


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
    s.table[i]["weight"] += 0.5
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


def hook(adapter: Any, shape: Shape, checked: bool = False) -> int:
    from moereplay.simulator.jit import compiling

    return unkept(lambda: compiling.hook(adapter, STATE, shape, [], checked))


def bound(n: int, asked: Callable = ask, checked: bool = False) -> tuple[Callable[[], None], np.ndarray, tuple]:
    """Compile the kernel with its hooks; return it bound to a state of n rows."""
    listener = hook(notify, EVENT)
    pointers = Hooks(hook(asked, SHAPE, checked), (listener, listener))
    code = unkept(lambda: translation.kernel(kernel, (STATE, READERS), Hooks, (SHAPE, EVENT), {"frozen": 0}))
    state, arrays = example(n)
    return caller(code, list(flat((state.ctypes.data, pointers)))), state, arrays


def test_a_kernel_and_its_hooks_compute_what_python_computes() -> None:
    run, state, (items, _, boxed) = bound(7)
    run()
    assert (int(state["inner"]["sum"][0]), int(state["inner"]["last"][0]), int(boxed["value"][0])) == expected(7)
    assert items["weight"].tolist() == [0.5] * 7


def test_errors_of_hooks_come_through() -> None:
    """An exception with its arguments; a float for a whole number; an index outside of an array, where checked."""
    with pytest.raises(ValueError) as raised:
        bound(LIMIT + 2)[0]()
    assert raised.value.args == ("beyond the limit", LIMIT)
    with pytest.raises(NotCompiledError, match="expected an integer"):
        hook(refused, SHAPE)
    with pytest.raises(IndexError):
        bound(7, outside, checked=True)[0]()


def test_private_names_stand_in_one_file() -> None:
    for path in sorted((ROOT / "simulator").rglob("*.py")):
        modules = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numba")
        }
        private = {name for name in modules if name not in PUBLIC}
        assert not private or path.name == "compiling.py", path


def test_a_kernel_is_compiled_once_by_another_process_meanwhile(tmp_path, monkeypatch):
    """A program that takes the compiler's place waits for a file that this process makes in the context."""
    asked, done = tmp_path / "asked", tmp_path / "done"
    program = f"""
import sys, time
from pathlib import Path
while not Path({str(asked)!r}).exists():
    time.sleep(0.01)
Path({str(done)!r}).write_text(sys.argv[1])
"""
    monkeypatch.setattr(engine, "is_kept", lambda name: False)
    monkeypatch.setattr(engine, "_wanted", set())
    monkeypatch.setattr(engine, "BUILD", program)
    with engine.compiled_apart(engine.fast_path):
        assert not done.exists()
        asked.touch()
    assert done.read_text() == "fast_path"
    done.unlink()
    with engine.compiled_apart(engine.fast_path):  # it was asked for: this process now compiles it itself
        pass
    assert not done.exists()


def test_nobody_waits_for_a_kernel_after_an_error(monkeypatch):
    children, start = [], engine.started
    monkeypatch.setattr(engine, "is_kept", lambda name: False)
    monkeypatch.setattr(engine, "_wanted", set())
    monkeypatch.setattr(engine, "BUILD", "import time; time.sleep(600)")
    monkeypatch.setattr(engine, "started", lambda name: children.append(start(name)) or children[0])
    with pytest.raises(LookupError), engine.compiled_apart(engine.kernel):
        raise LookupError
    assert children[0].returncode
