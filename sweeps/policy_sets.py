"""Named policy sets: what a validation runs, from a TOML file, from options, or the three that ship.

[base]                      # settings of every set
capacity = "25%"

[sets.lru]                  # a set: settings of its own
eviction = "lru"

[sets.prior]                # a list makes one set per entry, `prior routing=cache_prior:lam=0`, ...
routing = ["cache_prior:lam=0", "cache_prior:lam=.1", "cache_prior:lam=.25"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moereplay.policies.contract import PolicyError
from moereplay.results.settings import LISTED, NAMES
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import check_count, expand
from moereplay.traces.documents import DocumentError, content, from_toml
from moereplay.traces.texts import hint

Settings = Mapping[str, Any]
#: A demand cache, a prefetcher beside the eviction made for it, and a routing that follows the cache.
SHIPPED_BASE = {"capacity": "25%"}
SHIPPED: dict[str, Settings] = {
    "lru": {"eviction": "lru"},
    "least_stale": {"eviction": "least_stale", "prefetch": "top_k"},
    "cache_prior": {"eviction": "lru", "routing": "cache_prior"},
}


def named_sets(sets: Mapping[str, Settings], base: Settings) -> dict[str, ReplayConfig]:
    """Every set with its configuration, in their order; a set's own settings win over those of `base`.

    Raises ConfigError or PolicyError naming the set.
    """
    named: dict[str, ReplayConfig] = {}
    for name, own in sets.items():
        _check_names(name, own)
        for full_name, config in _each(name, {**base, **own}):
            if full_name in named:
                raise ConfigError(f"two policy sets are called {full_name!r}; rename one")
            named[full_name] = config
        check_count(len(named), "these policy sets make", "shorten their lists")
    return named


def read_sets(path: Path) -> tuple[dict[str, Settings], Settings]:
    """The sets and the base of a TOML file. Raises ConfigError."""
    try:
        document = from_toml(content(path))
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"policy sets {path}: {said}; expected TOML with [base] and [sets.NAME] tables") from None
    sets, base = document.get("sets"), document.get("base", {})
    if unknown := document.keys() - {"base", "sets"}:
        raise ConfigError(f"policy sets {path}: {min(unknown)!r} is no table of ours; use [base] and [sets.NAME]")
    tables = isinstance(sets, dict) and isinstance(base, dict) and all(isinstance(own, dict) for own in sets.values())
    if not (sets and tables):
        raise ConfigError(f"policy sets {path} name no set; write a table [sets.NAME] with at least one setting")
    _check_names("base", base)
    return sets, base


def _check_names(where: str, settings: Settings) -> None:
    for name in settings:
        if name not in NAMES:
            raise ConfigError(f"policy set {where}: no setting called {name!r}: {hint(name, NAMES)}")


def _each(name: str, settings: Settings) -> Iterable[tuple[str, ReplayConfig]]:
    if empty := [key for key, value in settings.items() if value == []]:
        raise ConfigError(f"policy set {name}: the list of {empty[0]} is empty; give it entries, or leave the line out")
    lists = {key: _comma_list(value) for key, value in settings.items() if key in LISTED}
    fixed = {key: value for key, value in settings.items() if key not in LISTED}
    try:
        configs = expand(lists, fixed)
    except (ConfigError, PolicyError) as error:
        raise type(error)(f"policy set {name}: {error}") from None
    varying = [key for key, text in lists.items() if "," in text]
    for config in configs:
        yield " ".join([name, *(f"{key}={getattr(config, key)}" for key in varying)]), config


def _comma_list(value: Any) -> str:
    """A setting as the command line spells it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
