"""One file per policy, four kinds. Adding one is a file in its kind's folder and its name here.

An installed package adds one by an entry point `kind.name` of the group `moereplay.policies`.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from moereplay.policies.errors import PolicyError
from moereplay.traces.plugins import plugins
from moereplay.traces.texts import hint

if __name__ != "moereplay.policies":
    raise ImportError("import this package as moereplay.policies: a second copy of its modules would be loaded")

#: Every policy by kind, in the order in which tables and legends show them.
NAMES: dict[str, tuple[str, ...]] = {
    "routing": (
        "standard",
        "cache_prior",
        "max_rank",
        "cumulative",
        "reuse_distance",
        "bounded",
        "piggyback",
        "keep",
        "prune",
        "prune_rank",
        "swap",
    ),
    "prefetch": (
        "none",
        "top_k",
        "score",
        "adaptive_depth",
        "confident",
        "side_buffer",
        "activation_matrix",
        "previous_token",
        "coactivation",
        "frequent",
        "missed",
        "oracle",
    ),
    "eviction": (
        "lru",
        "mru",
        "lfu",
        "fifo",
        "random",
        "least_stale",
        "farthest_layer",
        "least_high_precision",
        "hobbit",
        "score",
        "shielded_score",
        "mrs",
        "activation_ratio",
        "clock",
        "sieve",
        "s3fifo",
        "arc",
        "slru",
        "lirs",
        "tinylfu",
        "lru_k",
        "lfu_decay",
        "payback",
        "lfru",
        "class_lru",
        "static",
        "pinned",
        "belady",
    ),
    "miss": (
        "fetch",
        "lowest_bit",
        "cascade",
        "hobbit",
        "drop",
        "drop_cascade",
        "drop_below",
        "substitute",
        "substitute_band",
        "cpu",
        "split",
        "fiddler",
    ),
}

#: User policies by kind and name: `policies/files.py` registers them in this process.
REGISTERED: dict[str, dict[str, Any]] = {kind: {} for kind in NAMES}
GROUP = "moereplay.policies"
LOG = logging.getLogger(__name__)


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind's policies, user policies last."""
    return (*NAMES[kind], *REGISTERED[kind])


def all_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind's policies, with those of installed packages."""
    installed = (name.partition(".") for name in plugins(GROUP))
    return tuple(dict.fromkeys((*names(kind), *(name for of, _, name in installed if of == kind))))


def load(kind: str, name: str) -> Any:
    """Return the policy of that kind and name. Raises PolicyError, suggesting the nearest name."""
    if name not in names(kind):
        point = plugins(GROUP).get(f"{kind}.{name}")
        if point is None:
            raise PolicyError(f"unknown {kind} policy {name!r}: {hint(name, all_names(kind))}")
        import_module("moereplay.policies.files").register_installed(point)
    return REGISTERED[kind].get(name) or _module(kind, name).POLICY


@cache
def _module(kind: str, name: str) -> Any:
    return import_module(f"moereplay.policies.{kind}.{name}")


def catalogue() -> list[Any]:
    """Return every policy, kind by kind, without those of installed packages that cannot be used."""
    policies = []
    for kind in NAMES:
        for name in all_names(kind):
            try:
                policies.append(load(kind, name))
            except PolicyError as error:
                LOG.warning("%s", error)
    return policies


def named(name: str) -> list[Any]:
    """Return the policies of that name, of any kind. Raises PolicyError, suggesting the nearest name."""
    found = [load(kind, name) for kind in NAMES if name in all_names(kind)]
    if not found:
        every = [known for kind in NAMES for known in all_names(kind)]
        raise PolicyError(f"unknown policy {name!r}: {hint(name, every)}")
    return found
