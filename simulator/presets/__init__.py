"""Presets: policies, capacity and machine of a paper or an engine under one name, every value with its source.

Each is a TOML file in this folder; adding one is a file here and its name below. `specmd-1+ls` and its like are made
from the file of `specmd-1`. A file with `like` names another preset, whose settings hold where it has none of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.resources import files

from pydantic import ValidationError

from moereplay.simulator import config
from moereplay.simulator.config import KINDS, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Frozen
from moereplay.traces.texts import hint

#: SpecMD's own, which its Table 2 repeats with Least-Stale in place of their eviction, as NAME+ls.
SPECMD = ("specmd-baseline", "specmd-1", "specmd-2", "specmd-3", "specmd-4", "specmd-5")
PAPERS = ("cache-prior-paper", "eliseev", "hobbit", "smoe", "moe-infinity", "fiddler")
#: Engines, of which studies/pages/calibrations.md has measured runs.
ENGINES = ("llama.cpp", "llama.cpp-moe-cache", "bigmoeonedge", "imp", "warp", "colibri")
#: Engines of machines whose CPU computes, or that read an SSD through RAM.
HYBRID = (
    "llama.cpp-cpu-moe",
    "llama.cpp-mmap",
    "ik_llama.cpp",
    "ktransformers",
    "freetoken",
    "freetoken-cpu",
    "freetoken-hybrid",
    "crow",
)
FILES = (*SPECMD, *PAPERS, *ENGINES, *HYBRID)
LEAST_STALE = "+ls"
NAMES = tuple(name for file in FILES for name in ((file, file + LEAST_STALE) if file in SPECMD else (file,)))
ALWAYS = (*KINDS, "capacity", "platform")  #: settings that every preset names; the others have their defaults


class Setting(Frozen):
    """Value of one option of `moereplay replay`, with its source."""

    value: str
    source: str
    assumed: str = ""  #: values that the source leaves open, with those used instead


class Preset(Frozen):
    """Settings of a replay under one name."""

    name: str
    summary: str
    source: str
    like: str = ""  #: the preset whose settings it shares, except for its own
    settings: dict[str, Setting]

    def values(self) -> dict[str, str]:
        """Return the settings as the command line spells them."""
        return {name: setting.value for name, setting in self.settings.items()}

    def row(self) -> dict[str, str]:
        """Return one line of `moereplay presets`."""
        return {"preset": self.name, **{name: self.settings[name].value for name in ALWAYS}, "what": self.summary}


def preset(name: str) -> Preset:
    """Return the preset of that name. Raises ConfigError, suggesting the nearest name."""
    if name not in NAMES:
        raise ConfigError(f"unknown preset {name!r}: {hint(name, NAMES)}")
    if name.endswith(LEAST_STALE):
        return _with_least_stale(preset(name.removesuffix(LEAST_STALE)))
    text = files("moereplay.simulator.presets").joinpath(f"{name}.toml").read_text("utf-8")
    try:
        own = Preset.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"preset {name}: {error}") from None
    return own.model_copy(update={"settings": preset(own.like).settings | own.settings}) if own.like else own


def configure(*, preset: str = "", **settings: object) -> ReplayConfig:
    """Return a validated configuration: these settings over those of the preset of this name.

    Raises ConfigError or PolicyError naming the setting and its allowed values, or the presets.
    """
    return config.configure(**(_named(preset).values() if preset else {}) | settings)


_named = preset  # in `configure` that name is its argument


def settings(names: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and settings of each preset of a comma list. Raises ConfigError."""
    for name in names.split(","):
        yield name.strip(), preset(name.strip()).values()


def explain(chosen: Preset) -> list[tuple[str, str]]:
    """Return (heading, text) pairs on one preset: each value with its source and its assumption."""
    pairs = [("preset", chosen.name), ("what", chosen.summary), ("source", chosen.source), ("", "")]
    for name, setting in chosen.settings.items():
        pairs += [(name, str(setting.value)), ("", f"  source: {setting.source}")]
        pairs += [("", f"  assumed: {setting.assumed}")] if setting.assumed else []
    return pairs


def _with_least_stale(base: Preset) -> Preset:
    """Replace the eviction, as SpecMD's Table 2 does."""
    eviction = preset("specmd-5").settings["eviction"]
    changed = eviction.model_copy(update={"source": "SpecMD Table 2: eviction replaced by Least-Stale (§4.2)"})
    return base.model_copy(
        update={
            "name": base.name + LEAST_STALE,
            "summary": f"{base.name} with Least-Stale in place of its eviction",
            "settings": base.settings | {"eviction": changed},
        }
    )
