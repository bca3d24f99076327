"""Hooks twice: plain Python over dict rows and lists, and compiled over structured arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable

from moereplay.policies.contract import COPY, EXPERT, NOW, Own, Policy, Step
from moereplay.policies.hooks import HOOKS, given_by
from moereplay.simulator.jit.reached import reached_from

RESULTS = {int: numba.types.int64, type(None): numba.types.void, bool: numba.types.boolean}
#: Empty tables, from which the types of array arguments follow.
EMPTY: dict[str, Any] = {"experts": (), "copies": (), "own": Own(*[()] * 5), "step": Step(*[()] * 12)}
STEP_AXES: dict[str, tuple[int, type]] = dict.fromkeys(("ids", "weight"), (2, np.int64))
STEP_AXES |= dict.fromkeys(("logits", "choice"), (2, np.float64))
STEP_AXES |= {"gate": (2, np.int32), "look_order": (3, np.int16), "look_score": (3, np.int32)}
STEP_AXES |= dict.fromkeys(("expert", "rank", "mass", "tokens", "unfetched"), (1, np.int64))
OWN_AXES = {"rows": (2, np.int64), "regs": (2, np.int64), "reals": (2, np.float64)}
OWN_AXES |= {"par": (1, np.float64), "capacity": (1, np.int64)}


def hook_of(policy: Policy, name: str) -> FunctionType:
    """A hook that the policy is known to give."""
    return dict(given_by(policy))[name]


@cache
def compiled(name: str, hook: FunctionType) -> Callable:
    """The hook as machine code, for the arrays that `as_arrays` makes."""
    for function in reached_from(hook)[1:]:
        register_jitable(function)
    declared = HOOKS[name]
    return numba.njit(RESULTS[declared.result](*(_type(name, argument) for argument in declared.arguments)))(hook)


def _type(hook: str, argument: str) -> numba.types.Type:
    if argument == "now":
        return numba.from_dtype(NOW)
    return numba.typeof(as_arrays(hook, argument, EMPTY.get(argument, 0 if _axes(hook, argument) == 0 else ())))


def _axes(hook: str, argument: str) -> int:
    """Return the axes of a list of int64 that a hook takes in addition to the tables."""
    return next((each.axes for each in HOOKS[hook].own_arguments if each.name == argument), 0)


def as_arrays(hook: str, argument: str, value: Any) -> Any:
    """A copy of a hook's argument in the form in which compiled code takes it; plain numbers stay."""
    if argument == "now":
        return _rows([value], NOW)[0]
    if argument in ("experts", "copies"):
        return _rows(value, EXPERT if argument == "experts" else COPY)
    if argument == "own":
        return Own(*(_array(getattr(value, name), *OWN_AXES[name]) for name in Own._fields))
    if argument == "step":
        return Step(*(_array(getattr(value, name), *STEP_AXES[name]) for name in Step._fields))
    axes = _axes(hook, argument)
    return _array(value, axes, np.int64) if axes else value


def _rows(rows: Any, dtype: np.dtype) -> np.ndarray:
    return np.array(list(map(itemgetter(*(dtype.names or ())), rows)), dtype)


def _array(values: Any, axes: int, dtype: type) -> np.ndarray:
    array = np.array(values, dtype)
    return array if array.ndim == axes else np.zeros((0,) * axes, dtype)


def duplicate(arrays: Any) -> Any:
    """Copy the arrays, for compiled code to write to."""
    if isinstance(arrays, tuple):
        return type(arrays)(*map(duplicate, arrays))
    return arrays.copy() if hasattr(arrays, "copy") else arrays


def same(one: Any, other: Any) -> bool:
    """Equal, element by element and bit for bit, in arrays and tuples of arrays."""
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def twin(name: str, hook: FunctionType) -> Callable:
    """The Python hook, which on every call checks what the contract promises and that the compiled one agrees."""

    declared = HOOKS[name]
    written = {each.name for each in declared.own_arguments if each.written} | ({"own"} if declared.writes else set())

    def call(*arguments: Any) -> Any:
        names = declared.arguments
        before = [as_arrays(name, *pair) for pair in zip(names, arguments, strict=True)]
        copies = [duplicate(arrays) for arrays in before]
        result = hook(*arguments)
        after = [as_arrays(name, *pair) for pair in zip(names, arguments, strict=True)]
        # Compiled code would cut a float or a bool to an integer without a word.
        assert type(result) is declared.result, f"{name} returns {result!r}"
        assert compiled(name, hook)(*copies) == result
        for argument, was, python, fast in zip(names, before, after, copies, strict=True):
            assert same(python, fast), f"{name}: {argument} differs between Python and compiled code"
            assert argument in written or same(was, python), f"{name} writes {argument}, which it may only read"
        return result

    return call
