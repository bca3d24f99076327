"""Sets of policies that engines have: what can be run today, beside what only a simulator can."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.preset import NAMES, preset
from moereplay.simulator.presets import SPECMD
from moereplay.sweeps.starts import LAYERS, STATIC, USED

AXES = ("eviction", "prefetch", "miss", "scope")
PAPER = (*SPECMD, "cache-prior-paper")  #: evaluated, in no engine
TRACE_PROFILE, GIVEN_PROFILE = "profile=trace", "profile=given"


class Known(NamedTuple):
    """What an engine runs, by the names of settings."""

    engine: str
    change: dict[str, str]
    start: str

    def runs(self, config: ReplayConfig, start: str) -> bool:
        """Whether that is the set of a configuration; what stays is told apart by what it is."""
        placed = self.change["eviction"] == STATIC
        return all(getattr(config, name) == text for name, text in self.change.items()) and (
            not placed or (start == LAYERS) == (self.start == LAYERS)
        )


#: Experts that are placed once and never move; misses run on the CPU.
PLACED = (
    Known("llama.cpp --n-cpu-moe", {"eviction": STATIC, "prefetch": "none", "miss": "cpu", "scope": "global"}, LAYERS),
    Known(
        "ktransformers --kt-num-gpu-experts",
        {"eviction": STATIC, "prefetch": "none", "miss": "cpu", "scope": "per_layer"},
        USED,
    ),
)


@cache
def known_sets() -> tuple[Known, ...]:
    """Return what engines run: placements, and presets of engines whose routing is the model's own."""
    return (*PLACED, *_of_presets())


def engines_of(config: ReplayConfig, start: str) -> list[str]:
    """Return the names of the engines that run the set of a configuration."""
    return list(dict.fromkeys(each.engine for each in known_sets() if each.runs(config, start)))


def _of_presets() -> Iterator[Known]:
    for name in NAMES:
        values = preset(name).values()
        if name.removesuffix("+ls") in PAPER or values["routing"] != "standard":
            continue
        change = {axis: values.get(axis, "global") for axis in AXES}
        change["eviction"] = _fitted(change["eviction"])
        yield Known(f"preset {name}", change, USED)


def _fitted(eviction: str) -> str:
    """A policy that is fitted to a profile, fitted to one that is given."""
    if eviction == "static":
        return STATIC
    return eviction.replace(TRACE_PROFILE, GIVEN_PROFILE)
