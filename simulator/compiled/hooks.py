"""Policies' hooks as machine code, called by kernels through pointers, with one signature per hook.

Hooks are pointers, not functions that a kernel is compiled with: Numba keeps no code on disk for functions as
arguments, and every policy would compile the kernel again.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from moereplay.policies.contract import OPTIONAL_ARRAYS, OPTIONAL_COLUMNS, Policy, PolicyError, Step
from moereplay.policies.files import complaint
from moereplay.policies.hooks import HOOKS, KINDS
from moereplay.simulator.compiled import adapters, state
from moereplay.simulator.compiled.layout import IF_NAMED, STATE
from moereplay.simulator.compiled.state import (
    COPIES,
    EXPERTS,
    all_batch_order,
    all_batch_score,
    all_batch_scores,
    all_demand_expert,
    all_demand_tokens,
    all_look_order,
    all_look_score,
    all_token_scores,
    all_weights,
    now,
    whole,
)
from moereplay.simulator.config import PolicySet
from moereplay.simulator.jit.machine_code import kept, unkept
from moereplay.simulator.jit.marks import (
    IS_PYTHON,
    NotCompiledError,
    Shape,
    Table,
    fast,
    merged,
    table_reader,
    whole_number,
)
from moereplay.simulator.jit.reached import digest, reached_from, texts_of

if TYPE_CHECKING:
    from moereplay.simulator.jit.compiling import Built


# The tables as one policy's hooks receive them, without columns and arrays that are absent from its `reads`.
#
# A hook that reads an undeclared column does not compile, however it obtains the name. In plain Python, a row does not
# have the column, and indexing None fails for an array.

#: Columns that are not always kept.
NOT_ALWAYS = OPTIONAL_COLUMNS.union(*IF_NAMED.values())


def named_by(policy: Policy, hooks: Iterable[str] = HOOKS) -> frozenset[str]:
    """Return which of the columns in IF_NAMED these hooks of a policy name and may read."""
    given = (getattr(policy, name, None) for name in hooks)
    return frozenset().union(*map(_named_in, filter(None, given))) - (OPTIONAL_COLUMNS - policy.may_read)


@cache
def _named_in(hook: FunctionType) -> frozenset[str]:
    return frozenset().union(*IF_NAMED.values()) & texts_of(reached_from(hook))


def readable(reads: frozenset[str]) -> dict[str, Callable]:
    """Return `all_experts`, `all_copies` and `step_of`, by these names, for hooks of a policy that reads `reads`."""
    tables = {"all_experts": _table(EXPERTS, reads), "all_copies": _table(COPIES, reads)}
    return tables | {"step_of": _step(reads & OPTIONAL_ARRAYS)}


@cache
def _table(of: Table, reads: frozenset[str]) -> Any:
    """Return a table without the columns that are kept for those who name them only."""
    hidden = NOT_ALWAYS - reads
    return table_reader(of._replace(columns=tuple(each for each in of.columns if each.name not in hidden)))


@cache
def _step(reads: frozenset[str]) -> Callable:
    """Return `step_of` with functions that return None for undeclared arrays."""
    hidden = dict.fromkeys(OPTIONAL_ARRAYS - reads, nothing)
    return merged(FunctionType(step_of.__code__, step_of.__globals__ | hidden, step_of.__name__))


def step_of(s, demanded):
    """Return the gate's arrays, with `demanded` experts: 0 before routing has chosen."""
    return Step(
        ids(s),
        logits(s),
        choice(s),
        wide(scores(s)),
        wide(order(s)),
        wide(score(s)),
        all_demand_expert(s)[:demanded],
        rank(s, demanded),
        mass(s, demanded),
        all_demand_tokens(s)[:demanded],
        weight(s),
        unfetched(s, demanded),
    )


@merged
def wide(array):
    """Return an array as int64 in plain Python, where numpy would keep calculating in its 16 or 32 bits."""
    return array.astype(np.int64) if IS_PYTHON else array


# recorded arrays of the pass's tokens: in place if they are adjacent, else as `demand` gathered them


@merged
def scores(s):
    """Return scores, (T, E)."""
    if s["batched"] == 1:
        return all_batch_scores(s)[: s["compute"]["tokens"]]
    return all_token_scores(s)[s["compute"]["start"] : s["compute"]["start"] + s["compute"]["tokens"], now(s)["layer"]]


@merged
def order(s):
    """Return look-ahead orders, (D, T, E)."""
    return of_pass(s, all_batch_order(s), all_look_order(s))


@merged
def score(s):
    """Return look-ahead scores, (D, T, E)."""
    return of_pass(s, all_batch_score(s), all_look_score(s))


@merged
def of_pass(s, gathered, recorded):
    """Return (D, T, E) of the current pass and layer, from gathered tokens (D, T, E) or all (D, T, L, E)."""
    first, tokens = s["compute"]["start"], s["compute"]["tokens"]
    if s["batched"] == 1:
        return gathered[:, :tokens]
    return recorded[:, first : first + tokens, now(s)["layer"]]


# optional arrays, by their names in OPTIONAL_ARRAYS


@merged
def nothing(s, demanded=0):
    """Return None in place of an array."""


def _of_tokens(name: str) -> Callable:
    """Return the function from the state to an array's rows of the pass's tokens."""
    array = whole(name)

    @merged
    def rows(s):
        return array(s)[: s["compute"]["tokens"]]

    return rows


def _of_demand(name: str) -> Callable:
    """Return the function from the state to an array's first entries, one per demanded expert."""
    array = whole(name)

    @merged
    def entries(s, demanded):
        return array(s)[:demanded]

    return entries


ids, logits, choice = map(_of_tokens, ("ids", "logits", "choice"))  # (T, k), (T, E), (T, E)
rank, mass, unfetched = map(_of_demand, ("demand_rank", "demand_mass", "unfetched"))  # (n,)


@merged
def weight(s):
    """Return (T, k), or (0, k) if the trace has no weights and routing is unchanged."""
    return all_weights(s)[: s["compute"]["tokens"] if s["weighted"] == 1 or s["demand"]["changed"] == 1 else 0]


#: Placeholder for a hook that a policy does not have; kernels never call it.
ABSENT = None if IS_PYTHON else 0
#: Pointers that a kernel takes: one per hook, and for an event one per kind of policy, in the order of KINDS.
BoundHooks = namedtuple("BoundHooks", HOOKS)
MEMORY: dict[str, Callable] = dict(
    zip(KINDS, (state.own_routing, state.own_prefetch, state.own_eviction, state.own_miss), strict=True)
)


def bound(names: tuple[str, ...], chosen: PolicySet) -> tuple[Any, ...]:
    """Return pointers to these hooks of the four policies. Raises PolicyError for one that does not compile."""
    return tuple(_bound(name, chosen) for name in names)


def _bound(name: str, chosen: PolicySet) -> Any:
    pointers = tuple(compiled(name, getattr(chosen, kind).policy) for kind in HOOKS[name].kinds)
    return pointers if HOOKS[name].is_event else pointers[0]


@cache
def shape(name: str) -> Shape:
    """Return a hook's signature: its adapter's numbers, whether it returns one, and its listeners."""
    returns = HOOKS[name].result is not NoneType and _adapter(name) not in adapters.BATCHED
    return Shape(_adapter(name).__code__.co_argcount - 1, returns, len(KINDS) if HOOKS[name].is_event else 0)


def _adapter(name: str) -> FunctionType:
    return getattr(adapters, name, adapters.BY_NUMBERS[len(HOOKS[name].own_arguments)])


# compiling


def compiled(name: str, policy: Policy) -> Any:
    """Return the address of a policy's hook. Raises PolicyError if the hook does not compile."""
    given = getattr(policy, name, None)
    if given is None:
        return ABSENT
    try:
        return _machine(name, given, policy.kind, policy.may_read | named_by(policy), bool(policy.version))
    except NotCompiledError as error:
        raise refusal(policy, name, given, str(error)) from error


@cache
def _machine(name: str, given: FunctionType, kind: str, reads: frozenset[str], checked: bool) -> Any:
    """Return the address, or the adapter in plain Python. Indices of users' hooks are `checked`."""
    code = _with(_adapter(name), {"hook": given} | _around(name, kind, reads), given.__name__)
    if IS_PYTHON:
        return code
    reached = reached_from(given)
    build = partial(_built, name, code, reached, checked)
    named = name_of(name, given, kind, reads, checked)
    return kept(named, build) if named else unkept(build)


def name_of(name: str, given: FunctionType, kind: str, reads: frozenset[str], checked: bool) -> str:
    """Return the name of a hook's code on disk, a digest of all its inputs; empty if one has no digest."""
    content = digest(reached_from(given), given.__module__, sorted(reads), checked)
    return f"{name}_{given.__name__}_{kind}_{content}" if content else ""


def _built(name: str, code: FunctionType, reached: list[FunctionType], checked: bool) -> Built:
    from moereplay.simulator.jit import compiling  # numba takes half a second to import

    return compiling.hook(code, STATE, shape(name), reached, checked)


def _around(name: str, kind: str, reads: frozenset[str]) -> dict[str, Callable]:
    """Return the globals of an adapter: the tables that its hook may read, and the conversion of its result."""
    reading = readable(reads) | {"own": MEMORY[kind]}
    tables = adapters.with_step if HOOKS[name].at_gate else adapters.without_step
    result_of = no_result if HOOKS[name].result is NoneType else whole_number
    return reading | {"tables": merged(_with(tables, reading, tables.__name__)), "result_of": result_of}


def _with(function: FunctionType, values: dict[str, Any], name: str) -> FunctionType:
    """Copy a function with more globals."""
    return FunctionType(function.__code__, function.__globals__ | values, name)


@fast
def no_result(answer):
    """Discard the return value of a hook declared to return nothing."""


# hooks that do not compile: one line from Numba's report

#: Colour codes of Numba's messages, where colorama is installed.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: The start of a report on one compilation attempt; reports on called functions are nested in the caller's.
STAGE = re.compile(r"\(step: [^)]*\)")
#: The reason why the intended implementation does not accept these types.
SPECIFIC = re.compile(r"raised a specific error:\s*\w+: (.*)")
#: A location at the end of a reason; the error states it itself.
PLACE = re.compile(r"[.,]* *(defined at|Raised from) .*")


def refusal(policy: Policy, hook: str, given: FunctionType, report: str) -> PolicyError:
    """Return the error for a hook that does not compile, with the line in the user's file and a workaround."""
    report = COLOUR.sub("", report)
    name = re.escape(Path(given.__code__.co_filename).name)  # Numba may write the folder differently
    place = re.search(rf'{name}(?:", line | \()(\d+)', report)
    reason = _reason(report[: place.end()] if place else report)
    if policy.reads is not None:
        reason += f"; declared reads: {', '.join(sorted(policy.reads)) or 'none'}"
    what = f"hook {hook} does not compile ({reason}); replay it with --engine reference"
    if policy.version:
        return complaint(given, what, int(place[1]) if place else 0)
    return PolicyError(f"{policy.kind} {policy.name}: {what}")


def _reason(report: str) -> str:
    """Return the message of a specific error in Numba's report, or else the first line of its innermost part."""
    innermost = STAGE.split(report)[-1]
    lines = (PLACE.sub("", line).strip(" :") for line in (*SPECIFIC.findall(innermost), *innermost.splitlines()))
    return next(filter(None, lines), "no reason in Numba's report")
