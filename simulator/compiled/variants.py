"""Kernel variants: the numbers of the state that are constants in each (`simulator/jit/translation.py`)."""

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


#: Where queues may replace keys (`ranking.py`): copies that are used without being in a pool would be queued as well.
QUEUED = {**OWN_CLOCK, "precisions": 1, "by_key": 1, "side_slots": 0, "has_admit": 0, "n_warm": 0}
#: Costs and machines that the fast path's own code computes, if it is compiled for them: numbers known in advance,
#: several links, lower tiers, experts for good and requests that arrive.
LOOKED_UP = {
    "n_links",
    "n_tiers",
    "has_start",
    "slows_compute",
    "reads_kv",
    "draft_ns",
    "has_pieces",
    "victim_ns",
    "n_resident",
    "arrives",
}
#: The fast path without them for passes of one request each and no drafts, and for all other passes; and with them.
PRICED = {name: value for name, value in FROZEN.items() if name not in LOOKED_UP}
ALONE = FROZEN | {"batched": 0}
FOLLOWED = {name: value for name, value in FROZEN.items() if name != "draft_ns"}
BATCHED = FOLLOWED | {"batched": 1}


def is_plain(numbers: Mapping[str, Any]) -> bool:
    """Return whether a run needs neither lower tiers nor costs beyond tables."""
    return all(numbers[name] == value for name, value in PLAIN.items())


def notes_decisions(numbers: Mapping[str, Any]) -> bool:
    """Return whether the fast path can note decisions that may hold on other platforms (charging.py)."""
    return is_fast(numbers) and not is_priced(numbers)


def depends_on_time(numbers: Mapping[str, Any]) -> bool:
    """Return whether decisions depend on time, so that their order in time has to be noted (course.py)."""
    return bool(numbers["has_suggest"] or numbers["n_drafting"])


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Return whether a fast path can replay a run with these numbers."""
    return all(numbers[name] == value for name, value in PRICED.items())


def is_priced(numbers: Any) -> bool:
    """Return whether a fast path that can replay a run is the one with prices."""
    return any(numbers[name] != value for name, value in (BATCHED if numbers["batched"] else ALONE).items())
