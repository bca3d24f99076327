"""Settings of an experiment: their names, and how those with a dot become part of the setting before the dot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moereplay.results.settings import KINDS, LISTED
from moereplay.results.settings import NAMES as SETTINGS
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform_files import platform
from moereplay.simulator.preset import preset
from moereplay.sweeps.experiment.schema import DOTTED
from moereplay.traces.texts import nearest

PRESET = "preset"  #: settings of a paper under one name, below all others
NAMES = (*SETTINGS, PRESET)


def check_name(where: str, name: str) -> None:
    """Raises ConfigError, with the nearest name, for a setting that does not exist."""
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
    raise ConfigError(f"{where}: no setting called {name!r}: {hint}")


def configuration(settings: Mapping[str, Any]) -> ReplayConfig:
    """The validated configuration of settings, dotted ones included. Raises ConfigError or PolicyError."""
    config = configure(**whole(settings))
    platform(config.platform)
    return config


def whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration is made of: settings over those of their preset, without dots."""
    return folded(_over_preset(settings))


def _over_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in settings.items() if name != PRESET}
    return preset(str(settings[PRESET])).values() | own if PRESET in settings else own


def folded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without dots: `prefetch = top_k` and `prefetch.depth = 2` are `prefetch = top_k:depth=2`."""
    whole = {name: value for name, value in settings.items() if "." not in name}
    for name in sorted(settings.keys() - whole.keys()):
        owner, _, parameter = name.partition(".")
        text = whole.get(owner, ReplayConfig.model_fields[owner].default)
        whole[owner] = f"{text}:{parameter}={spelled(settings[name])}"
    return {name: value if name not in LISTED else spelled(value) for name, value in whole.items()}


def spelled(value: Any) -> str:
    """A value as the command line spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
