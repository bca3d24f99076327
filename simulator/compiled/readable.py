"""The tables as one policy's hooks receive them, without columns and arrays that are absent from its `reads`.

A hook that reads an undeclared column does not compile, however it obtains the name. In plain Python, numpy rejects the
column, and indexing None fails for an array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from moereplay.policies.contract import EXPERT, OPTIONAL_ARRAYS, OPTIONAL_COLUMNS, Step
from moereplay.simulator.compiled.layout import ARRAYS
from moereplay.simulator.compiled.state import (
    all_batch_order,
    all_batch_score,
    all_batch_scores,
    all_choice,
    all_demand_expert,
    all_demand_mass,
    all_demand_rank,
    all_demand_tokens,
    all_experts,
    all_ids,
    all_logits,
    all_look_order,
    all_look_score,
    all_token_scores,
    all_unfetched,
    all_weights,
    now,
)
from moereplay.simulator.jit.marks import IS_PYTHON, array_reader, merged


def readable(reads: frozenset[str]) -> dict[str, Callable]:
    """Return `all_experts` and `step_of`, by these names, for hooks of a policy that reads `reads`."""
    return {"all_experts": _experts(reads & OPTIONAL_COLUMNS), "step_of": _step(reads & OPTIONAL_ARRAYS)}


@cache
def _experts(reads: frozenset[str]) -> Callable:
    """Return the expert table with the declared columns at their offsets in EXPERT."""
    if reads == OPTIONAL_COLUMNS:
        return all_experts
    every: Any = EXPERT.fields
    fields = {name: every[name] for name in EXPERT.names or () if name not in OPTIONAL_COLUMNS - reads}
    columns: Any = {"names": list(fields), "itemsize": EXPERT.itemsize}
    columns |= {"formats": [field[0] for field in fields.values()], "offsets": [field[1] for field in fields.values()]}
    narrow = np.dtype(columns, align=True)
    if IS_PYTHON:
        return lambda s: s.arrays["experts"].view(narrow)
    return array_reader("experts", narrow, *ARRAYS["experts"][1], whole=True)


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


@merged
def ids(s):
    """Return (T, k)."""
    return all_ids(s)[: s["compute"]["tokens"]]


@merged
def logits(s):
    """Return (T, E)."""
    return all_logits(s)[: s["compute"]["tokens"]]


@merged
def choice(s):
    """Return (T, E)."""
    return all_choice(s)[: s["compute"]["tokens"]]


@merged
def rank(s, demanded):
    """Return (n,)."""
    return all_demand_rank(s)[:demanded]


@merged
def mass(s, demanded):
    """Return (n,)."""
    return all_demand_mass(s)[:demanded]


@merged
def unfetched(s, demanded):
    """Return (n,)."""
    return all_unfetched(s)[:demanded]


@merged
def weight(s):
    """Return (T, k), or (0, k) if the trace has no weights and routing is unchanged."""
    return all_weights(s)[: s["compute"]["tokens"] if s["weighted"] == 1 or s["demand"]["changed"] == 1 else 0]
