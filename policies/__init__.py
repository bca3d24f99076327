"""One file per policy, four kinds. Adding one is a file in its kind's folder and its name here."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from policies.contract import Policy, PolicyError

#: Every policy by kind, in the order in which tables and legends show them.
NAMES: dict[str, tuple[str, ...]] = {
    "routing": ("standard", "cache_prior"),
    "prefetch": ("none", "top_k", "score", "side_buffer"),
    "eviction": ("lru", "lfu", "fifo", "random", "least_stale", "farthest_layer", "score", "arc", "sieve", "belady"),
    "miss": ("fetch", "drop", "cascade", "substitute", "split"),
}


def load(kind: str, name: str) -> Policy:
    """The policy of that kind and name. Raises PolicyError, suggesting the nearest name."""
    if name not in NAMES[kind]:
        near = get_close_matches(name, NAMES[kind], n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(NAMES[kind])}"
        raise PolicyError(f"no {kind} policy called {name!r}: {hint}")
    return import_module(f"policies.{kind}.{name}").POLICY


def catalogue() -> list[Policy]:
    """Every policy, kind by kind."""
    return [load(kind, name) for kind, names in NAMES.items() for name in names]


def named(name: str) -> list[Policy]:
    """The policies of that name, of any kind. Raises PolicyError, suggesting the nearest name."""
    found = [load(kind, name) for kind, names in NAMES.items() if name in names]
    if not found:
        every = [known for names in NAMES.values() for known in names]
        near = get_close_matches(name, every, n=1)
        hint = f"did you mean {near[0]}?" if near else "`moereplay policies` lists them"
        raise PolicyError(f"no policy called {name!r}: {hint}")
    return found
