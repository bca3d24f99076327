"""Read named policy sets for validations and quality runs: from a TOML file, from options, or the built-in ones.

[base]                      # settings of every set
capacity = "25%"

[sets.lru]                  # one set: its own settings
eviction = "lru"

[sets.prior]                # a list makes one set per entry, `prior routing=cache_prior:lam=0`, ...
routing = ["cache_prior:lam=0", "cache_prior:lam=.1", "cache_prior:lam=.25"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from moereplay.policies.contract import PolicyError
from moereplay.results.settings import LISTED, NAMES
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import check_count, expand
from moereplay.traces.documents import DocumentError, content, from_toml
from moereplay.traces.schema import Frozen, Geometry
from moereplay.traces.texts import hint

Settings = Mapping[str, Any]
#: A demand cache, a prefetcher with the eviction designed for it, and a cache-aware routing.
SHIPPED_BASE = {"capacity": "25%"}
SHIPPED: dict[str, Settings] = {
    "lru": {"eviction": "lru"},
    "least_stale": {"eviction": "least_stale", "prefetch": "top_k"},
    "cache_prior": {"eviction": "lru", "routing": "cache_prior"},
}


def named_sets(sets: Mapping[str, Settings], base: Settings) -> dict[str, ReplayConfig]:
    """Return the configuration of every set, in order; a set's own settings override those of `base`.

    Raises ConfigError or PolicyError naming the set.
    """
    named: dict[str, ReplayConfig] = {}
    for name, own in sets.items():
        _check_names(name, own)
        for full_name, config in _each(name, {**base, **own}):
            if full_name in named:
                raise ConfigError(f"duplicate policy set {full_name!r}; rename one")
            named[full_name] = config
        check_count(len(named), "these policy sets make", "shorten their lists")
    return named


def read_sets(path: Path) -> tuple[dict[str, Settings], Settings]:
    """Read the sets and the base of a TOML file. Raises ConfigError."""
    try:
        document = from_toml(content(path))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"policy sets {path}: {reason}: expected TOML with [base] and [sets.NAME] tables") from None
    sets, base = document.get("sets"), document.get("base", {})
    if unknown := document.keys() - {"base", "sets"}:
        raise ConfigError(f"policy sets {path}: unknown table {min(unknown)!r}; use [base] and [sets.NAME]")
    tables = isinstance(sets, dict) and isinstance(base, dict) and all(isinstance(own, dict) for own in sets.values())
    if not (sets and tables):
        raise ConfigError(f"no policy sets in {path}; write a table [sets.NAME] with at least one setting")
    _check_names("base", base)
    return sets, base


def _check_names(where: str, settings: Settings) -> None:
    for name in settings:
        if name not in NAMES:
            raise ConfigError(f"policy set {where}: unknown setting {name!r}: {hint(name, NAMES)}")


def _each(name: str, settings: Settings) -> Iterable[tuple[str, ReplayConfig]]:
    if empty := [key for key, value in settings.items() if value == []]:
        raise ConfigError(f"policy set {name}: the list of {empty[0]} is empty: add entries, or remove the line")
    lists = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in settings.items()
        if key in LISTED
    }
    fixed = {key: value for key, value in settings.items() if key not in LISTED}
    try:
        configs = expand(lists, fixed)
    except (ConfigError, PolicyError) as error:
        raise type(error)(f"policy set {name}: {error}") from None
    varying = [key for key, text in lists.items() if "," in text]
    for config in configs:
        yield " ".join([name, *(f"{key}={getattr(config, key)}" for key in varying)]), config


# -- Studies of a model's sensitivity (`studies.toml`), and values that depend on the model

#: Names of studies on the command line.
STUDIES = ("ranks", "lambda", "precision")
#: Every text starts with an empty cache, so that texts can be read together.
BASE = {"reset": "request", "eviction": "lru"}
#: A list of values, or: ranks (1 to k), fewer (k - 1 to 1), windows (from k, each half as many again, to all experts),
#: {beyond_k = shares of the experts beyond k} as ranks, {experts = shares of a layer's experts} as counts.
Along = list[float | int | str] | str | dict[str, list[float]]


class Varied(Frozen):
    """A setting whose text has one value of `over` in place of `{}`."""

    text: str
    over: Along


class Study(Frozen):
    """Policy sets whose lists vary one parameter each."""

    summary: str
    source: str
    capacity: str
    sets: dict[str, dict[str, Varied]]

    def configs(self, geometry: Geometry, capacity: str | None = None) -> dict[str, ReplayConfig]:
        """Return every set by its name, with the study's capacity by default. Raises ConfigError or PolicyError."""
        sets = {
            name: {
                setting: [each.text.format(value) for value in along(each.over, geometry)]
                for setting, each in own.items()
            }
            for name, own in self.sets.items()
        }
        return named_sets(sets, {**BASE, "capacity": capacity or self.capacity})


def study(name: str) -> Study:
    """Read a study. Raises ConfigError for an unknown name."""
    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}: {hint(name, STUDIES)}")
    text = files("moereplay.sweeps").joinpath("studies.toml").read_text("utf-8")
    return Study.model_validate(tomllib.loads(text)[name])


def along(axis: Along, geometry: Geometry) -> Sequence[Any]:
    """Return the values of an axis for a model, in order."""
    k, experts = geometry.k, geometry.experts
    if isinstance(axis, list):
        return axis
    if isinstance(axis, str):
        return {"ranks": range(1, k + 1), "fewer": range(k - 1, 0, -1), "windows": _windows(k, experts)}[axis]
    (kind, shares), more = next(iter(axis.items())), experts - k
    if kind == "experts":
        return sorted({max(1, round(share * experts)) for share in shares})
    return sorted({k + max(1, round(share * more)) for share in shares}) if more else [k]


def combined(over: Mapping[str, Along], geometry: Geometry) -> Iterator[dict[str, Any]]:
    """Yield every combination of the axes' values by name; of counts of experts also NAME_percent."""
    for values in product(*(along(axis, geometry) for axis in over.values())):
        found: dict[str, Any] = dict(zip(over, values, strict=True))
        counts = [name for name, axis in over.items() if isinstance(axis, dict)]
        yield found | {f"{name}_percent": 100 * found[name] / geometry.experts for name in counts}


def _windows(k: int, experts: int) -> list[int]:
    found = [k]
    while found[-1] < experts:
        found.append(min(experts, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found
