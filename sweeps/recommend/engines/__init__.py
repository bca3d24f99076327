"""Engines that offload experts: what each can do with them, as data with sources.

Each is a TOML file in this folder; adding one is a file here and its name in NAMES. An installed package adds one by an
entry point `NAME = package` of the group `moereplay.engines`: its file is NAME.toml in that package.
"""

from __future__ import annotations

import logging
import tomllib
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator

from moereplay.simulator.calibration import Tried
from moereplay.simulator.errors import ConfigError
from moereplay.traces.geometry import experts_per_layer, last_layers, mean_experts
from moereplay.traces.plugins import plugins, using
from moereplay.traces.schema import Frozen, Geometry
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
GROUP = "moereplay.engines"
LOG = logging.getLogger(__name__)
Us = float


class Placed(NamedTuple):
    """Experts in fast memory, in the quantities that flags may name."""

    cpu_layers: int  #: whole layers that are not there; the last ones are
    gpu_layers: int
    gpu_experts: int  #: of each layer, if every layer gets the same number
    cpu_experts: int
    slots: int  #: experts of mean size
    cache_mib: int
    vram_share: float  #: of all fast memory, with the dense weights


def placed(geometry: Geometry, size: int, vram_share: float) -> Placed:
    """Return what `size` bytes of experts are in the words of engines."""
    layers, each = last_layers(geometry, size), experts_per_layer(geometry, size)
    return Placed(
        cpu_layers=geometry.layers - layers,
        gpu_layers=layers,
        gpu_experts=each,
        cpu_experts=geometry.experts - each,
        slots=mean_experts(geometry, size),
        cache_mib=size >> 20,
        vram_share=min(1.0, vram_share),
    )


class Mode(Frozen):
    """One way in which an engine places experts and handles those outside fast memory."""

    name: str
    flags: str  #: a template over the quantities of Placed
    machines: tuple[Literal["gpu", "cpu", "unified"], ...] = ("gpu",)
    #: Where an expert lies: whole layers, the most used of each layer, or the last used.
    holds: Literal["layers", "uniform", "static", "lru", "lru in one pool"]
    miss: Literal["cpu", "fetch", "split"]  #: computed by the CPU, awaited over the link, or whichever ends first
    overlap: bool = False  #: within a layer, the CPU or the link works in parallel with the fast processor
    layer_us: Us = Field(default=0, ge=0, le=1e6)  #: more for each layer with a miss: submissions and waiting
    step_us: Us = Field(default=0, ge=0, le=1e6)  #: more for every layer, of a cache: which experts it holds, victims
    copies: bool = False  #: main memory also holds the experts that are in fast memory
    #: How what main memory does not hold is read: not at all, by page faults, or whole experts at a time.
    below: Literal["none", "mmap", "direct"] = "none"
    rows_apart: bool = False  #: the CPU computes an expert again for each row of a pass that chose it
    least_rows: int = Field(default=1, ge=1)  #: of a pass that is computed in this way
    most_rows: int = Field(default=1 << 30, ge=1)
    tried: Tried | None = None  #: runs that place experts in this way
    from_disk: str = ""  #: flags besides, where something is read that way: a copy in another layout would fill memory
    source: str

    @property
    def knobs(self) -> frozenset[str]:
        """Quantities of Placed that the flags name; without one the engine itself takes what memory there is."""
        return frozenset(name for _, name, _, _ in Formatter().parse(self.flags) if name)

    def render(self, of: Placed, disk: int = 0) -> str:
        """Return the flags of a placement that leaves `disk` bytes of experts to the disk."""
        return " ".join(filter(None, (self.flags.format(**of._asdict()), self.from_disk if disk else "")))


class Engine(Frozen):
    """An engine, its modes, and measured over predicted time per token in the runs that it was compared with."""

    name: str
    summary: str
    home: str  #: its address
    aliases: tuple[str, ...] = ()  #: other first words by which tables of runs name it, in lower case
    knob: str = ""  #: the mode whose setting is a ladder
    prefill: str = ""  #: in words
    drafts: str = ""  #: how it was seen to decode with draft tokens; "" if that is not known
    models: tuple[str, ...] = ()  #: beginnings of the names of the only models that it runs; none: any
    fills: bool = False  #: slots take the fast memory that is left, unless a flag states their number
    uniform: bool = False  #: experts are placed evenly, unless a flag names a list of their use
    prompt_batch: int = Field(default=0, ge=0)  #: tokens of a prompt at a time; 0: not known
    prompt_bytes: int = Field(default=0, ge=0)  #: of each card, kept for prompts
    defaults: str = ""  #: source of these four
    modes: tuple[Mode, ...] = Field(min_length=1)
    tried: Tried | None = None

    def runs(self, model: str) -> bool:
        """Return whether the engine runs a model of this name; it is taken to, where the name is not known."""
        return not (self.models and model) or model.lower().startswith(self.models)

    def tried_with(self, mode: Mode) -> Tried | None:
        """Return the runs that are known of a mode: its own, or the engine's where no mode states its own."""
        return self.tried if all(each.tried is None for each in self.modes) else mode.tried

    @field_validator("modes")
    @classmethod
    def _flags_render(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        for mode in modes:
            unknown = mode.knobs - set(Placed._fields)
            if unknown:
                raise ValueError(f"flags of {mode.name}: unknown {min(unknown)}: expected {', '.join(Placed._fields)}")
        return modes


@cache
def engines() -> tuple[Engine, ...]:
    """Return every engine that ships, and those of installed packages that can be used."""
    usable = list(map(_engine, NAMES))
    for name in plugins(GROUP):
        try:
            usable += [] if name in NAMES else [_engine(name)]
        except ConfigError as error:
            LOG.warning("%s", error)
    return tuple(usable)


def engine(name: str) -> Engine:
    """Return an engine by name, ignoring case. Raises ConfigError naming a similar one."""
    spelled = {each.lower(): each for each in NAMES}
    if name.lower() not in spelled:
        spelled = {each.lower(): each for each in plugins(GROUP)} | spelled
    if name.lower() not in spelled:
        raise ConfigError(f"unknown engine {name[:40]!r}: {hint(name.lower(), tuple(spelled.values()))}")
    return _engine(spelled[name.lower()])


@cache
def _engine(name: str) -> Engine:
    if name in NAMES:
        return _read(__name__, name)
    point = plugins(GROUP)[name]
    with using(point, ConfigError):
        return _read(point.value, name)


def _read(package: str, name: str) -> Engine:
    text = files(package).joinpath(f"{name}.toml").read_text("utf-8")
    try:
        engine = Engine.model_validate(tomllib.loads(text))
    except ValidationError as wrong:
        raise ConfigError(f"engine {name}: {wrong}") from None
    if engine.name != name:
        raise ConfigError(f"engine {name}: invalid name {engine.name!r}: expected that of the file")
    return engine
