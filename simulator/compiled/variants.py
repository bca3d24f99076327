"""Kernel variants: the numbers of the state that are constants in each (`simulator/jit/parts.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereplay.policies.hooks import EVENTS

#: The engine computes when activities end.
OWN_CLOCK = {"external": 0}
#: Two tiers, no expert for good, no prefetch for the next pass, passes known before the run, and no cost term beyond a
#: table.
TWO_TIERS = dict.fromkeys(
    (
        "n_tiers",
        "has_loading",
        "loads_prefetches",
        "waits_for_all",
        "has_start",
        "slows_compute",
        "reads_kv",
        "draft_ns",
        "has_pieces",
        "victim_ns",
        "by_matrix",
        "has_stages",
        "cpu_tier",
        "sync_ns",
        "next_pass",
        "n_resident",
        "arrives",
    ),
    0,
)
PLAIN = TWO_TIERS | OWN_CLOCK
#: The caller reports when activities of compute and of one link end.
STEPPED = {**TWO_TIERS, "external": 1, "n_links": 1, "logs": 1, "has_cpu": 0}
#: Two tiers and one link, one precision, contract `atomic`, every miss fetched, no listeners, no log, no cost term
#: beyond a table.
FROZEN = {
    **PLAIN,
    "precisions": 1,
    "n_links": 1,
    "by_key": 1,
    **dict.fromkeys(("sequential", "side_slots", "logs", "keeps", "n_warm"), 0),
    **dict.fromkeys(("has_want", "has_resolve", "has_substitute", "has_admit", "asks_of_each"), 0),
    **dict.fromkeys((f"listeners_{event}" for event in EVENTS), 0),
}


#: The same for passes of one request each, without drafts, and for all others.
ALONE, BATCHED = FROZEN | {"batched": 0}, FROZEN | {"batched": 1}


def is_plain(numbers: Mapping[str, Any]) -> bool:
    """Return whether a run needs neither lower tiers nor costs beyond tables."""
    return all(numbers[name] == value for name, value in PLAIN.items())


def notes_decisions(numbers: Mapping[str, Any]) -> bool:
    """Return whether the fast path can note decisions that may hold on other platforms (charging.py)."""
    return is_fast(numbers) and not numbers["has_suggest"] and not numbers["n_drafting"]


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Return whether the fast path can replay a run with these numbers."""
    return all(numbers[name] == value for name, value in FROZEN.items())
