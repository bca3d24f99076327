"""The fast variant of a state: numbers that are the same in most runs are constants there.

Machine code for it is made from the same functions, and what these numbers rule out is left out when it is compiled.
The variant is part of the state's type: Numba's cache on disk tells functions by the types of their arguments only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba

from simulator.compiled.runtime.jit import called, fast, freeze, retyped
from simulator.compiled.runtime.layout import FAST_STATE, MARK, STATE
from simulator.compiled.runtime.state import BoundHooks

#: One precision, contract `atomic`, every miss fetched, no listeners, no log: a cached copy is all that there is.
FROZEN = {
    "precisions": 1,
    "by_key": 1,
    **dict.fromkeys(("sequential", "side_slots", "logs", "keeps", "n_warm"), 0),
    **dict.fromkeys(("has_want", "has_resolve", "has_substitute", "has_admit", "asks_of_each"), 0),
    **dict.fromkeys(("gate_listeners", "use_listeners", "insert_listeners", "evict_listeners", "predict_listeners"), 0),
}


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Whether a run of these numbers can be of the fast variant."""
    return all(numbers[name] == value for name, value in FROZEN.items())


freeze(FROZEN, MARK)
#: A state of either variant, for pointers to hooks, which are compiled once.
any_variant = retyped(numba.from_dtype(FAST_STATE), numba.from_dtype(STATE))


@called
def never(s, one=0, two=0, three=0):
    """In place of hooks that the fast variant never calls."""
    return 0


@fast
def only(choose, suggest, keys):
    """The three hooks that the fast variant calls."""
    return BoundHooks(
        choose,
        suggest,
        never,
        never,
        never,
        keys,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
        never,
    )
