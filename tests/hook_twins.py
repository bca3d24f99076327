"""Hooks twice: plain Python over dict rows and lists, and compiled over structured arrays, as engines call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

from policies.contract import COPY, EXPERT, NOW, Own, Policy, Step

TABLES = ("now", "experts", "copies", "own")
AT_GATE = ("now", "step", "experts", "copies", "own")
INT, NOTHING, YES_NO = numba.int64, numba.void, numba.boolean
#: Compiled code would cut a float or a bool to an integer without a word, so the Python result must be exact.
PYTHON_TYPES = {INT: int, NOTHING: type(None), YES_NO: bool}


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
#: Parameters that are lists of int64, by axes; `out` of a routing hook has two.
LISTS = {"missing": 1, "verdict": 1, "eligible": 1}
STEP_AXES = {"ids": (2, np.int64), "logits": (2, np.float64), "choice": (2, np.float64), "gate": (2, np.int64)}
STEP_AXES |= {"weight": (2, np.int64)}
STEP_AXES |= {"look_order": (3, np.int64), "look_score": (3, np.int64)}
STEP_AXES |= dict.fromkeys(("expert", "rank", "mass", "tokens"), (1, np.int64))
OWN_AXES = {"rows": (2, np.int64), "regs": (2, np.int64), "reals": (2, np.float64)}
OWN_AXES |= {"par": (1, np.float64), "capacity": (1, np.int64)}

_compiled: dict[Callable, Callable] = {}
_callable_from_compiled: set[FunctionType] = set()


def hooks(policy: Policy) -> Iterator[tuple[str, FunctionType]]:
    """The hooks that a policy gives."""
    for name in SIGNATURES:
        hook = getattr(policy, name, None)
        if isinstance(hook, FunctionType):
            yield name, hook


def hook_of(policy: Policy, name: str) -> FunctionType:
    """A hook that the policy is known to give."""
    return dict(hooks(policy))[name]


def compiled(name: str, hook: FunctionType) -> Callable:
    """The hook as machine code of its contract's types; compiled once per session."""
    if hook not in _compiled:
        _let_compiled_code_call(hook)
        result, names = SIGNATURES[name]
        _compiled[hook] = numba.njit(result(*(_type(name, argument) for argument in names)))(hook)
    return _compiled[hook]


def _let_compiled_code_call(function: FunctionType) -> None:
    """Register the policies' own functions that this one calls, however deep."""
    for called in _names(function.__code__):
        helper = function.__globals__.get(called)
        if not isinstance(helper, FunctionType) or helper in _callable_from_compiled:
            continue
        if helper.__module__.startswith("policies."):
            _callable_from_compiled.add(helper)
            register_jitable(helper)
            _let_compiled_code_call(helper)


def _names(code: CodeType) -> set[str]:
    """Global names used by code and by the comprehensions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _type(hook: str, argument: str) -> numba.types.Type:
    if argument == "now":
        return numba.from_dtype(NOW)
    if argument in ("experts", "copies"):
        return numba.from_dtype(EXPERT if argument == "experts" else COPY)[::1]
    if argument in ("own", "step"):
        empty = as_arrays(hook, argument, Own(*[()] * 5) if argument == "own" else Step(*[()] * 10))
        return numba.typeof(empty)
    axes = _out_axes(hook) if argument == "out" else LISTS.get(argument, 0)
    return numba.types.Array(INT, axes, "C") if axes else INT


def _out_axes(hook: str) -> int:
    return 2 if hook == "choose" else 1


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
    axes = _out_axes(hook) if argument == "out" else LISTS.get(argument, 0)
    return _array(value, axes, np.int64) if axes else value


def _rows(rows: Any, dtype: np.dtype) -> np.ndarray:
    return np.array(list(map(itemgetter(*(dtype.names or ())), rows)), dtype)


def _array(values: Any, axes: int, dtype: type) -> np.ndarray:
    array = np.array(values, dtype)
    return array if array.ndim == axes else np.zeros((0,) * axes, dtype)


def duplicate(arrays: Any) -> Any:
    """The same arrays again, for compiled code to write to."""
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

    def call(*arguments: Any) -> Any:
        names = SIGNATURES[name].names
        before = [as_arrays(name, *pair) for pair in zip(names, arguments, strict=True)]
        machine = [duplicate(arrays) for arrays in before]
        result = hook(*arguments)
        after = [as_arrays(name, *pair) for pair in zip(names, arguments, strict=True)]
        assert type(result) is PYTHON_TYPES[SIGNATURES[name].result], f"{name} returns {result!r}"
        assert compiled(name, hook)(*machine) == result
        for argument, was, python, fast in zip(names, before, after, machine, strict=True):
            assert same(python, fast), f"{name}: {argument} differs between Python and compiled code"
            written = argument in ("own", "out", "verdict")
            assert written or same(was, python), f"{name} writes {argument}, which it may only read"
        return result

    return call
