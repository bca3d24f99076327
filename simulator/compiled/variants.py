"""Variants of the kernels: which numbers of a state each takes for constants (`simulator/jit/freezing.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereplay.policies.hooks import EVENTS

#: The engine says when something ends.
OWN_CLOCK = {"external": 0}
#: Two tiers, and no price that is more than a number in a table.
TWO_TIERS = dict.fromkeys(
    ("n_tiers", "has_loading", "waits_for_all", "has_start", "slows_compute", "reads_kv", "has_pieces"), 0
)
PLAIN = TWO_TIERS | OWN_CLOCK
#: The caller says when something ends, of compute and of one link.
STEPPED = {**TWO_TIERS, "external": 1, "n_links": 1, "logs": 1, "has_cpu": 0}
#: Two tiers and one link, passes of one request each, one precision, contract `atomic`, every miss fetched, no
#: listeners, no log, no price that is more than a number in a table: a cached copy is all that there is.
FROZEN = {
    **PLAIN,
    "precisions": 1,
    "n_links": 1,
    "by_key": 1,
    **dict.fromkeys(("sequential", "side_slots", "logs", "keeps", "n_warm", "batched"), 0),
    **dict.fromkeys(("has_want", "has_resolve", "has_substitute", "has_admit", "asks_of_each"), 0),
    **dict.fromkeys((f"listeners_{event}" for event in EVENTS), 0),
}


def is_plain(numbers: Mapping[str, Any]) -> bool:
    """Whether a run of these numbers can do without the kernel of lower tiers and prices."""
    return all(numbers[name] == value for name, value in PLAIN.items())


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Whether a run of these numbers can be of the fast variant."""
    return all(numbers[name] == value for name, value in FROZEN.items())
