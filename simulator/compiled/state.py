"""Access to the state of a run: its arrays, policies' memories, properties of copies, and event listeners.

Kernels write `s.name` for an array and `s["name"]` for a number or a record; `READERS` says what an array's name stands
for. Functions that hooks reach go through Numba, to which these
names mean nothing: they call a reader.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from moereplay.policies.contract import COPY_COLUMNS, EXPERT_COLUMNS, NOW, Own
from moereplay.policies.hooks import HOOKS, KINDS
from moereplay.simulator.compiled.layout import (
    ARRAYS,
    COPY,
    EXPERT,
    INPUT_ARRAYS,
    MEMORIES,
    OWNED,
    PLAN_ARRAYS,
    RULE,
    STOP,
)
from moereplay.simulator.jit.marks import Column, Reader, Table, array_reader, called, fast, merged, record_reader

#: Larger than every key.
NO_KEY = (1 << 63) - 1
NEVER_LEFT = -1
#: What kernels name as attributes of the state: records of one row, and arrays, of which inputs are read-only.
READERS = {name: Reader(name, dtype) for name, dtype in (("now", NOW), ("rule", RULE), ("stop", STOP))}
READERS |= {name: Reader(name, np.dtype(dtype), axes) for name, (dtype, axes) in ARRAYS.items()}
READERS |= {name: Reader(name, np.dtype(dtype), axes, readonly=True) for name, (dtype, axes) in INPUT_ARRAYS.items()}
#: Where requests arrive, the run writes its passes itself.
READERS |= {name: READERS[of]._replace(readonly=False) for name, of in PLAN_ARRAYS.items()}

#: Arrays that are read-only for hooks: a hook that writes to one does not compile.
INPUTS_OF_HOOKS = {
    "ids", "logits", "choice", "weights", "missing", "unfetched", "demand_expert", "demand_rank", "demand_mass",
    "demand_tokens", "batch_scores", "batch_order", "batch_score", *INPUT_ARRAYS,
    *(name for name in MEMORIES if name.startswith(("own_par", "own_capacity"))),
}  # fmt: skip


def whole(name: str) -> Any:
    """Return the function from the state to an array that hooks may slice and measure."""
    dtype, axes = (ARRAYS | INPUT_ARRAYS | MEMORIES)[name]
    return array_reader(name, dtype, *axes, readonly=name in INPUTS_OF_HOOKS, whole=True)


now = record_reader("now", NOW)


def _tables() -> tuple[Table, Table]:
    """Return where the columns of `experts` and `copies` lie, which policies see."""
    hot, own = COPY.names or (), EXPERT.names or ()
    experts = [Column(name, "experts", EXPERT, name) for name in EXPERT_COLUMNS if name in own]
    experts += [Column(name, "copies", COPY, name, "precisions") for name in EXPERT_COLUMNS if name not in own]
    copies = [
        Column(name, "copies", COPY, name) if name in hot else Column(name, "owned", OWNED, name)
        for name in COPY_COLUMNS
    ]
    return Table("experts", "n_experts", tuple(experts)), Table("copies", "n_copies", tuple(copies))


EXPERTS, COPIES = _tables()
all_eval_copies = whole("eval_copies")
all_eval_keys = whole("eval_keys")
all_suggested = whole("suggested")
all_eligible = whole("eligible")
all_weights = whole("weights")
all_chosen = whole("chosen")
all_missing = whole("missing")
all_verdict = whole("verdict")
all_wants = whole("wants")
all_demand_expert = whole("demand_expert")
all_demand_tokens = whole("demand_tokens")
all_token_scores = whole("token_scores")
all_look_order = whole("look_order")
all_look_score = whole("look_score")
all_batch_scores = whole("batch_scores")
all_batch_order = whole("batch_order")
all_batch_score = whole("batch_score")


def _own(kind: int) -> Callable:
    """Return the function from the state to the memory of one of the four policies."""
    rows, regs, reals, par, capacity = (whole(f"own_{column}_{kind}") for column in Own._fields)

    @merged
    def own(s):
        return Own(rows(s), regs(s), reals(s), par(s), capacity(s))

    return own


own_routing, own_prefetch, own_eviction, own_miss = map(_own, range(4))


@fast
def expert_of(s, y):
    if s["precisions"] == 1:
        return np.int64(y)
    return np.int64(s.owned[y]["x"])


@fast
def layer_of(s, y):
    return np.int64(s.copy_layer[y])


ONE_POOL, BY_LAYER, BY_LINK = range(3)


@fast
def pool_of(s, y):
    """Return the pool of a copy."""
    if s["pooled"] == ONE_POOL:
        return 0
    if s["pooled"] == BY_LAYER:
        return layer_of(s, y)
    return np.int64(s.owned[y]["pool"])


@fast
def kind_of(s, y):
    """Return the kind of a copy, which determines its bytes and times."""
    if s["precisions"] == 1 and s["uneven"] == 0:
        return layer_of(s, y)
    return np.int64(s.owned[y]["kind"])


@fast
def size_of(s, y):
    """Return the bytes of a copy; in its pool it may take more."""
    return s.kind_bytes[kind_of(s, y)]


@fast
def taken_by(s, y):
    """Return what a copy takes of its pool, bytes."""
    if s["uneven"] == 1:
        return s.owned[y]["bytes"]
    return size_of(s, y)


@fast
def first_copy(s, x):
    """Return the first copy of an expert, whose row has what is the expert's."""
    return x * s["precisions"]


@fast
def home_of(s, y):
    """Return the link into the fast tier that carries a copy."""
    if s["n_links"] == 1:
        return 0
    return np.int64(s.owned[y]["link"])


# rows of a pass


@fast
def row_at(s, t):
    """Return the run-wide number of the t-th row of the current pass."""
    return s["compute"]["start"] + t


@fast
def token_at(s, t):
    """Return the token whose routing the t-th row has, as an index of the token axis."""
    return row_at(s, t) if s["batched"] == 0 else s.row_reads[row_at(s, t)]


# outcomes of an access

#: REPLACED: by substitutes for every token. HAS_RUN, IN_ROUND: in an earlier round of the step, or the present one.
HIT, DELAYED, FETCH, DROPPED, ON_CPU, REPLACED, HAS_RUN, IN_ROUND = range(8)


@fast
def runs_here(served):
    """Return whether an access runs from the fast tier, at once or after a wait."""
    return served <= FETCH


@fast
def runs(served):
    """Return whether an access runs, from the fast tier or on the CPU."""
    return served <= FETCH or served == ON_CPU


@fast
def waits(served):
    """Return whether compute waits for the access's transfer."""
    return served == DELAYED or served == FETCH


# errors that end a run

NO_ERROR, STUCK, NO_CPU, NO_LOGITS, NO_HOOK = range(5)
BAD_VICTIM, BAD_CHOICE, BAD_NAME, BAD_WANT, BAD_VERDICT, BAD_STAND_IN = range(5, 11)
STOPPED, TOO_LATE = 11, 12


@fast
def fail(s, error, culprit):
    """End the run with an error. `culprit`: the invalid value that a hook returned, or 0."""
    s["errors"]["error"], s["errors"]["culprit"] = error, culprit


# events: the policies that listen are called in the order of `KINDS`

ROUTING, PREFETCH, EVICTION, MISS = (1 << at for at in range(len(KINDS)))


@cache
def notifier(event: str) -> Callable:
    """Return a function of the state, the bound hooks and the event's arguments that calls every listener's hook."""
    listeners, pointers = f"listeners_{event}", list(HOOKS).index(event)

    @called
    def notify(s, hooks, *numbers):
        listening = s[listeners]
        if listening & ROUTING:
            hooks[pointers][0](s, *numbers)
        if listening & PREFETCH:
            hooks[pointers][1](s, *numbers)
        if listening & EVICTION:
            hooks[pointers][2](s, *numbers)
        if listening & MISS:
            hooks[pointers][3](s, *numbers)

    return notify
