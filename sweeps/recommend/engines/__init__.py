"""Engines that offload experts: what each can do with them, as data with sources.

Each is a TOML file in this folder; adding one is a file here and its name in NAMES.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Tried
from moereplay.traces.schema import Frozen
from moereplay.traces.texts import hint

NAMES = (
    "llama.cpp",
    "ik_llama.cpp",
    "llama.cpp-moe-cache",
    "ktransformers",
    "freetoken",
    "vllm-expert-cache",
    "moe-infinity",
    "mixtral-offloading",
    "crow",
    "colibri",
    "bigmoeonedge",
)
#: Quantities that flags may name, of a setting (`quick.Setting`).
QUANTITIES = ("cpu_layers", "gpu_layers", "gpu_experts", "cpu_experts", "slots", "cache_mib", "vram_share")

Us = float


class Mode(Frozen):
    """One way in which an engine places experts, and what it does with those that are not in fast memory."""

    name: str
    flags: str  #: a template over QUANTITIES
    machines: tuple[Literal["gpu", "cpu", "unified"], ...] = ("gpu",)
    #: Where an expert lies: whole layers, the most used of each layer, or the last used.
    holds: Literal["layers", "static", "lru", "lru in one pool"]
    miss: Literal["cpu", "fetch", "split"]  #: computed by the CPU, awaited over the link, or whichever ends first
    overlap: bool = False  #: in a layer the CPU, or the link, works beside the fast processor
    layer_us: Us = Field(default=0, ge=0, le=1e6)  #: more for each layer with a miss: submissions and waiting
    copies: bool = False  #: main memory also holds the experts that are in fast memory
    #: How what main memory does not hold is read: not at all, by page faults, or whole experts at a time.
    below: Literal["none", "mmap", "direct"] = "none"
    source: str


class Engine(Frozen):
    """An engine, its modes, and measured over predicted time per token in the runs that it was compared with."""

    name: str
    summary: str
    home: str  #: its address
    knob: str = ""  #: the mode whose setting is a ladder
    prefill: str = ""  #: in words
    modes: tuple[Mode, ...] = Field(min_length=1)
    tried: Tried | None = None

    @field_validator("modes")
    @classmethod
    def _flags_render(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        for mode in modes:
            unknown = {name for _, name, _, _ in Formatter().parse(mode.flags) if name} - set(QUANTITIES)
            if unknown:
                raise ValueError(f"flags of {mode.name}: unknown {min(unknown)}; expected {', '.join(QUANTITIES)}")
        return modes


def engines() -> tuple[Engine, ...]:
    """Return every engine that ships."""
    return tuple(map(_shipped, NAMES))


def engine(name: str) -> Engine:
    """Return an engine by name, ignoring case. Raises ConfigError naming a similar one."""
    spelled = {each.lower(): each for each in NAMES}
    if name.lower() not in spelled:
        raise ConfigError(f"unknown engine {name[:40]!r}: {hint(name.lower(), NAMES)}")
    return _shipped(spelled[name.lower()])


@cache
def _shipped(name: str) -> Engine:
    text = files("moereplay.sweeps.recommend.engines").joinpath(f"{name}.toml").read_text("utf-8")
    try:
        return Engine.model_validate(tomllib.loads(text))
    except ValidationError as wrong:
        raise ConfigError(f"engine {name}: {wrong}") from None
