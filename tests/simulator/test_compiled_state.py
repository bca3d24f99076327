"""The compiled engine's state: one file writes each part of it, and its error codes become errors with the facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.policies.contract import NOW
from moereplay.simulator.compiled import state
from moereplay.simulator.compiled.engine import check
from moereplay.simulator.compiled.layout import ARRAYS, OWNED, OWNS, PLAN_ARRAYS, RECORDS, ROWS
from moereplay.simulator.config import configure
from tests.kit.every import every

FOLDER = Path(__file__).resolve().parents[2] / "simulator" / "compiled"
FILES = sorted(FOLDER.rglob("*.py"))
#: Files that make the state before a run.
BEFORE = ("initial", "inputs")
OWNER = {name: path for path, names in OWNS.items() for name in names.split()}


def written_in(text: str) -> set[str]:
    """Return what a file's functions write of the state `s`: `record.field`, `array` or `table.column`."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {name for function in functions for name in _written_by(function)}


def _written_by(function: ast.FunctionDef) -> Iterator[str]:
    meant = _local_names(function)
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for part in (part for target in targets if target for part in _parts(target)):
            if isinstance(part, ast.Subscript):
                yield from _named(part, meant)


def _parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple) else [target]


def _local_names(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the expressions of local names, such as `mine = s.owned[y]`."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for name, value in zip(_parts(target), values, strict=False):
                    if isinstance(name, ast.Name):
                        found[name.id] = value
    return found


def _named(target: ast.expr, meant: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the name of a written part of the state; parameters have none."""
    columns: list[str] = []
    while isinstance(target, ast.Subscript) or (isinstance(target, ast.Name) and target.id in meant):
        if isinstance(target, ast.Name):
            target = meant[target.id]
            continue
        if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
            columns.insert(0, target.slice.value)
        target = target.value
    if isinstance(target, ast.Name) and target.id == "s":
        yield ".".join(columns)
    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "s":
        yield ".".join([target.attr, *columns])
    elif isinstance(target, ast.Call) and isinstance(target.func, ast.Name):  # a reader that Numba knows
        yield ".".join([target.func.id.removeprefix("all_"), *columns])


def owner_of(name: str) -> str:
    """Return the file that may write a part of the state."""
    array = name.partition(".")[0]
    return OWNER.get(name) or OWNER.get(array) or (array if array in RECORDS else "nobody")


@every("path", FILES)
def test_a_file_writes_only_what_it_owns(path: Path) -> None:
    others = {name for name in written_in(path.read_text()) if owner_of(name) != path.stem}
    assert others == set() or path.stem in BEFORE


def test_a_write_to_what_another_file_owns_is_seen() -> None:
    texts = {
        'def f(s):\n    s["link"]["last_done"] = 0': {"link.last_done"},
        'def f(s, y):\n    mine, n = s.owned[y], 1\n    mine["done"] += n': {"owned.done"},
        "def f(s, i):\n    all_asked(s)[i] = 0": {"asked"},
        'def f(s):\n    link = s["link"]\n    link["last_done"], x = 0, 1': {"link.last_done"},
        'def f(row):\n    row["needed"] = 0': set(),
    }
    for text, names in texts.items():
        assert written_in(text) == names


def test_what_has_an_owner_exists() -> None:
    tables = {name: dtype.names for name, (dtype, _) in ARRAYS.items() if isinstance(dtype, np.dtype)} | {
        "now": NOW.names,
        **{name: dtype.names for name, (dtype, _) in ROWS.items()},
        **{name: dtype.names for name, dtype in RECORDS.items()},
    }
    known = {
        *ARRAYS,
        *PLAN_ARRAYS,
        *ROWS,
        *RECORDS,
        "now",
        *(f"{table}.{column}" for table, columns in tables.items() for column in columns or ()),
    }
    assert set(OWNER) <= known
    fixed = {"owned.x", "owned.bytes", "owned.pool", "owned.kind", "owned.link"}  # as they are made before a run
    assert {f"owned.{column}" for column in OWNED.names or ()} - fixed <= set(OWNER)


# errors

CHOSEN = configure(eviction="fifo", prefetch="top_k", miss="drop", routing="prune").policy_set()


@every(
    "error, message",
    [
        (state.BAD_VICTIM, "fifo.*77"),
        (state.BAD_CHOICE, "routing prune.*77"),
        (state.BAD_NAME, "prefetch top_k.*77"),
        (state.BAD_WANT, "miss drop.*precision 77"),
        (state.BAD_VERDICT, "miss drop.*verdict 77"),
        (state.BAD_STAND_IN, "miss drop.*substitute 77"),
        (state.STUCK, "deadlock"),
    ],
)
def test_an_error_of_machine_code_names_the_policy_and_the_value(error: int, message: str) -> None:
    ended: Any = {"errors": {"error": error, "culprit": 77}}
    with pytest.raises(AssertionError, match=message):
        check(ended, CHOSEN)
