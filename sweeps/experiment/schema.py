"""Types of an experiment file, its JSON Schema for editors, and how its settings become a configuration.

traces = ["runs/*.zarr"]            # paths or globs, relative to this file
policy_files = ["newest.py"]        # user policies, relative to this file

[base]                              # settings of every configuration: those of `moereplay replay`
capacity = "5%"

[grid]                              # every combination of the lists
eviction = ["lru", "least_stale"]
"platform.link.bytes_per_s" = [5e9, 25e9]   # a value of the platform, or a parameter of a policy

[[zip]]                             # lists that move in step; each table is one more axis of the grid
prefetch = ["none", "top_k"]
prefetch_at = ["gate", "after_demand"]

[[include]]                         # further configurations
eviction = "belady"

[[exclude]]                         # combinations to leave out
eviction = "lru"
capacity = ["1%", "2%"]

[random]                            # instead of all combinations, n of them; axes may then be ranges
n = 100
seed = 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import ceil, floor, isinf
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from moereplay.results.settings import KINDS, LISTED, POLICIES
from moereplay.results.settings import NAMES as SETTINGS
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.presets import NAMES as PRESETS
from moereplay.simulator.presets import preset
from moereplay.sweeps.grid import MOST_CONFIGURATIONS
from moereplay.traces.schema import Frozen
from moereplay.traces.texts import nearest

Scalar = bool | int | float | str
#: Lists of experts are themselves lists.
Value = Scalar | list[list[int]]
Settings = dict[str, Value]
Axis = Annotated[list[Value], Field(min_length=1)]
#: Settings with a dot: a parameter of the chosen policy, or a value of the platform.
DOTTED = rf"^(({'|'.join(POLICIES)})\.\w+|platform\.(link|links\.\d+|compute|cpu)\.\w+)$"
TITLE = "moereplay experiment"


class Range(Frozen):
    """Axis of numbers to draw between two ends, written with a suffix (`%`, `MB`) if one is set."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = False
    integer: bool = False
    suffix: str = ""

    @model_validator(mode="after")
    def _rises(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("invalid range: expected low < high, and low > 0 if log")
        if isinf(self.high / self.low if self.log else self.high - self.low):
            raise ValueError("invalid range: expected ends whose difference is a finite number")
        if self.integer and ceil(self.low) > floor(self.high):
            raise ValueError("no integer lies between the ends of the range")
        return self

    def at(self, share: float) -> Value:
        """Return the value at a share of the way, 0 to 1; integers have equal shares, unless `log`."""
        number = self._whole(share) if self.integer else float(f"{_between(self.low, self.high, share, self.log):.6g}")
        return f"{Decimal(str(number)).normalize():f}{self.suffix}" if self.suffix else number

    def _whole(self, share: float) -> int:
        low, high = ceil(self.low), floor(self.high)
        return min(high, floor(_between(low, high + 1, share, self.log)))


def _between(low: float, high: float, share: float, log: bool) -> float:
    return low * (high / low) ** share if log else low + (high - low) * share


class Random(Frozen):
    """Number of combinations to draw, and the seed."""

    n: int = Field(ge=1, le=MOST_CONFIGURATIONS)
    seed: int = Field(default=0, ge=0)


class Experiment(Frozen):
    """Configurations to replay on every trace: combinations of [grid] and [[zip]] over [base], and [[include]]."""

    model_config = ConfigDict(title=TITLE)

    traces: list[str] = Field(min_length=1, description="Paths or globs, relative to this file, or URLs.")
    policy_files: list[str] = Field(default=[], description="User policy files, relative to this file.")
    base: Settings = Field(default={}, description="Settings of every configuration.")
    grid: dict[str, Axis | Range] = Field(default={}, description="Every combination of these lists.")
    zip: list[dict[str, Axis]] = Field(default=[], description="Lists that move in step; each table is one axis.")
    include: list[Settings] = Field(default=[], description="Further configurations.")
    exclude: list[dict[str, Scalar | list[Scalar]]] = Field(default=[], description="Combinations to exclude.")
    random: Random | None = Field(default=None, description="Draw some of the combinations.")
    bounds: bool = Field(default=True, description="Count the bound of each hit rate.")
    requests: bool | None = Field(
        default=None,
        description="Keep a row per request, for intervals and comparisons. Default: kept of what is replayed now; "
        "true also replays what was stored without them; false keeps none.",
    )
    request_layers: bool = Field(
        default=False,
        description="Keep rows per request and layer however many they are, and replay what was stored without them.",
    )

    @property
    def keeps_requests(self) -> bool:
        """True if new results store a row per request."""
        return self.requests is not False

    @property
    def wanted(self) -> list[str]:
        """Tables that a stored configuration must have rows of, lest it is replayed again."""
        return ["requests"] * (self.requests is True) + ["request_layers"] * self.request_layers

    @model_validator(mode="after")
    def _keeps(self) -> Experiment:
        if self.request_layers and self.requests is False:
            raise ValueError("request_layers = true requires rows of requests; remove requests = false")
        return self


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an experiment file, with every setting by name."""
    schema = Experiment.model_json_schema()
    settings = {name: _loose(field) for name, field in ReplayConfig.model_json_schema()["properties"].items()}
    settings["preset"] = {"enum": list(PRESETS)}
    axes = {name: _axis(field) for name, field in settings.items()}
    ranged = {name: {"anyOf": [axis, {"$ref": "#/$defs/Range"}]} for name, axis in axes.items()}
    one_or_more = {name: {"anyOf": [field, _axis(field)]} for name, field in settings.items()}
    found = schema["properties"]
    found["base"] |= _table(settings)
    found["grid"] |= _table(ranged)
    found["zip"]["items"] = _table(axes)
    found["include"]["items"] = _table(settings)
    found["exclude"]["items"] = _table(one_or_more)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _loose(field: dict[str, Any]) -> dict[str, Any]:
    """Return a setting's schema without title and default: the effective default may come from a preset or [base]."""
    return {key: value for key, value in field.items() if key not in ("title", "default")}


def _axis(field: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": field}


def _table(settings: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": settings, "patternProperties": {DOTTED: {}}, "additionalProperties": False}


# -- Settings: names, presets and dots

PRESET = "preset"  #: settings of a paper under one name, below all others
NAMES = (*SETTINGS, PRESET)


def check_name(where: str, name: str) -> None:
    """Raise ConfigError, with the nearest name, for an unknown setting."""
    if name in NAMES or re.fullmatch(DOTTED, name):
        return
    owner, dot, rest = name.partition(".")
    near = nearest(owner, NAMES)
    if near not in (None, owner):
        hint = f"did you mean {near}{dot}{rest}?"
    elif dot:
        hint = f"parameters are those of {', '.join(KINDS)} and of platform.link, .links.0, .compute, .cpu"
    else:
        hint = f"choose from {', '.join(NAMES)}"
    raise ConfigError(f"{where}: unknown setting {name!r}: {hint}")


def configuration(settings: Mapping[str, Any]) -> ReplayConfig:
    """Return the validated configuration of settings, dotted ones included. Raises ConfigError or PolicyError."""
    config = configure(**whole(settings))
    platform(config.platform)
    return config


def whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings with those of their preset and fold dotted keys."""
    own = {name: value for name, value in settings.items() if name != PRESET}
    return folded(preset(str(settings[PRESET])).values() | own if PRESET in settings else own)


def folded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fold dotted settings: `prefetch = top_k` and `prefetch.depth = 2` become `prefetch = top_k:depth=2`."""
    whole = {name: value for name, value in settings.items() if "." not in name}
    for name in sorted(settings.keys() - whole.keys()):
        owner, _, parameter = name.partition(".")
        text = whole.get(owner, ReplayConfig.model_fields[owner].default)
        whole[owner] = f"{text}:{parameter}={spelled(settings[name])}"
    return {name: value if name not in LISTED else spelled(value) for name, value in whole.items()}


def spelled(value: Any) -> str:
    """Spell a value as the command line does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
