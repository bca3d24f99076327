"""Engines that offload experts: what each can do with them, as data with sources.

Each is a TOML file in this folder; adding one is a file here, its name in NAMES, and `help/NAME.txt` with the options
that its documents name: a test holds every printed flag to them. Engines without a profile are in `not_listed.toml`. An
installed package adds one by an entry point `NAME = package` of the group `moereplay.engines`: its file is NAME.toml in
that package.
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
    "llama.cpp-pr-27861",
    "neurall",
    "ktransformers",
    "freetoken",
    "vllm-expert-cache",
    "vllm-pr-37190",
    "moe-infinity",
    "mixtral-offloading",
    "crow",
    "colibri",
    "bigmoeonedge",
    "mlx",
)
GROUP = "moereplay.engines"
LOG = logging.getLogger(__name__)
Us = float
#: `holds` of a mode: whole layers, the same number of arbitrary or of the most used experts of each layer, and caches.
LAYERS, UNIFORM, STATIC, LRU, GLOBAL_LRU = "layers", "uniform", "static", "lru", "lru in one pool"
PER_LAYER, PLACED = (UNIFORM, STATIC, LRU), (LAYERS, UNIFORM, STATIC)
STAYS = "static:profile=given"  #: the eviction policy of experts that are placed for good


class Card(NamedTuple):
    """One of several cards, each of which holds some consecutive layers."""

    layers: int  #: of the model, those without experts included
    gpu_layers: int  #: whose experts lie there too; the last ones are


class Placed(NamedTuple):
    """Experts in fast memory and what else is stated, in the quantities that flags may name; 0 or empty: not stated."""

    cpu_layers: int  #: whole layers that are not there; the last ones are
    gpu_layers: int
    gpu_experts: int  #: of each layer, if every layer gets the same number
    cpu_experts: int
    slots: int  #: experts of mean size
    cache_mib: int
    vram_share: float  #: of all fast memory, with the dense weights
    experts_gib: int = 0  #: all experts, rounded up
    cpu_blocks: int = 0  #: as cpu_layers, with the layers without experts that come first
    first: int = 0  #: layers without experts, which come first
    context: int = 0  #: positions of the KV cache
    kv_type: str = ""  #: format of a number in it, in llama.cpp's spelling
    batch: int = 0  #: tokens of a prompt that are computed at a time
    cards: tuple[Card, ...] = ()

    @property
    def away(self) -> list[int]:
        """Layers of the model, from 0, whose experts are in main memory though the rest of them lies on a card."""
        begin, found = 0, []
        for card in self.cards or (Card(self.first + self.cpu_layers + self.gpu_layers, self.gpu_layers),):
            end = begin + card.layers
            found += range(max(begin, self.first), end - card.gpu_layers)
            begin = end
        return found

    def quantities(self) -> dict[str, object]:
        """Return what templates of flags may name, with the forms that llama.cpp takes."""
        away = "|".join(map(str, self.away))
        return self._asdict() | {
            "devices": len(self.cards),
            "split": ",".join(str(card.layers) for card in self.cards),
            "override": rf"blk\.({away})\.ffn_.*_exps\.=CPU" if away else "",
        }


NAMED = frozenset(Placed(0, 0, 0, 0, 0, 0, 0).quantities()) - {"cards"}  #: names that templates may hold


def placed(geometry: Geometry, size: int, vram_share: float, first: int = 0) -> Placed:
    """Return what `size` bytes of experts are in the words of engines; `first` layers without experts come first."""
    layers, each = last_layers(geometry, size), experts_per_layer(geometry, size)
    return Placed(
        cpu_layers=geometry.layers - layers,
        gpu_layers=layers,
        gpu_experts=each,
        cpu_experts=geometry.experts - each,
        slots=mean_experts(geometry, size),
        cache_mib=size >> 20,
        vram_share=min(1.0, vram_share),
        experts_gib=-(-geometry.total_bytes // 2**30),
        cpu_blocks=first + geometry.layers - layers if layers < geometry.layers else 0,
        first=first,
    )


class Options(Frozen):
    """Templates of flags that an engine takes besides those of a placement, each where its quantity is stated."""

    context: str = ""
    kv: str = ""
    batch: str = ""
    cards: str = ""  #: for more than one


class Mode(Frozen):
    """One way in which an engine places experts and handles those outside fast memory."""

    name: str
    flags: str  #: a template over the quantities of Placed; empty: the engine places experts by itself
    whole: str = ""  #: the template where no layer is outside fast memory, if another
    several: str = ""  #: that for several cards, where some layers' experts are in main memory
    options: Options = Options()  #: the engine's
    machines: tuple[Literal["gpu", "cpu", "unified"], ...] = ("gpu",)
    #: Where an expert lies: whole layers, arbitrary or the most used ones of each layer, or the last used.
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
    in_memory: str = ""  #: flags besides, where nothing is
    source: str

    @property
    def policies(self) -> dict[str, str]:
        """The policy set of this way; a cache whose misses the CPU computes uploads them for later."""
        stays = self.holds in PLACED
        return {
            "eviction": STAYS if stays else "lru",
            "prefetch": "missed" if self.miss == "cpu" and not stays else "none",
            "miss": self.miss,
            "scope": "per_layer" if self.holds in PER_LAYER else "global",
        }

    @property
    def knobs(self) -> frozenset[str]:
        """Quantities of Placed that the flags name; without one the engine itself takes what memory there is."""
        return _named(self.flags)

    @property
    def templates(self) -> tuple[str, ...]:
        """Every template of flags."""
        options = (self.options.context, self.options.kv, self.options.batch, self.options.cards)
        return (self.flags, self.whole, self.several, *options, self.from_disk, self.in_memory)

    def render(self, of: Placed, disk: int = 0) -> str:
        """Return the flags of a placement that leaves `disk` bytes of experts to the disk."""
        many, options = len(of.cards) > 1, self.options
        divided = self.several if many and of.away else ""
        parts = [
            divided or (self.whole if self.whole and not of.away else self.flags),
            options.cards if many and not divided else "",
            options.context if of.context else "",
            options.kv if of.kv_type else "",
            options.batch if of.batch else "",
            self.from_disk if disk else self.in_memory,
        ]
        return " ".join(part.format_map(of.quantities()) for part in parts if part)


def _named(template: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in Formatter().parse(template) if name)


class Prompt(Frozen):
    """How an engine computes batches of a prompt from some size on: the last rule that a batch reaches holds."""

    least: int = Field(default=1, ge=1)  #: tokens of the batch
    within_slots: bool = False  #: holds first, where tokens times k do not exceed the slots
    #: Experts outside fast memory: computed by the CPU; those that the batch touches, or those of whole layers, cross
    #: the link once for all its tokens; as many as slots hold at a time do; or each goes through the cache.
    how: Literal["cpu", "touched", "layers", "waves", "cache"]
    batch: int = Field(default=0, ge=0)  #: tokens that are computed at a time by default; 0: not known
    knob: str = ""  #: what sets the batch or the least
    uploads: float = Field(default=1, ge=1)  #: times the price of the link, from memory that is not pinned
    source: str


class Engine(Frozen):
    """An engine, its modes, and measured over predicted time per token in the runs that it was compared with."""

    name: str
    summary: str
    home: str  #: its address
    command: str = ""  #: what the flags are typed after
    version: str = ""  #: release, commit or pull request, with its date, that the flags are of
    documented: str = ""  #: where they are documented
    help: tuple[str, ...] = ()  #: files of `help/` with its options, if others than that of its name
    state: str = ""  #: what keeps it from being a release: an open pull request, a fork, a plug-in
    needs: str = ""  #: in words, what it does not run without
    cards: Literal["one", "layers", "tensors", "experts"] = "one"  #: what it divides among several cards
    aliases: tuple[str, ...] = ()  #: other first words by which tables of runs name it, in lower case
    knob: str = ""  #: the mode whose setting is a ladder
    prefill: str = ""  #: in words
    drafts: str = ""  #: how it was seen to decode with draft tokens; "" if that is not known
    models: tuple[str, ...] = ()  #: beginnings of the names of the only models that it runs; none: any
    fills: bool = False  #: slots take the fast memory that is left, unless a flag states their number
    uniform: bool = False  #: experts are placed evenly, unless a flag names a list of their use
    prompt_batch: int = Field(default=0, ge=0)  #: tokens of a prompt at a time; 0: not known
    prompt_bytes: int = Field(default=0, ge=0)  #: of each card, kept for prompts
    table_below: bool = False  #: the embedding table stays in main memory
    defaults: str = ""  #: source of these five
    prompts: tuple[Prompt, ...] = ()
    modes: tuple[Mode, ...] = Field(min_length=1)
    tried: Tried | None = None
    kinds: dict[Literal["resident", "hybrid", "disk", "unified", "cpu"], Tried] = Field(default_factory=dict)

    def runs(self, model: str) -> bool:
        """Return whether the engine runs a model of this name; it is taken to, where the name is not known."""
        return not (self.models and model) or model.lower().startswith(self.models)

    def tried_with(self, mode: Mode, kind: str = "") -> Tried | None:
        """Return the runs that are known of a kind of answer or of a mode, or the engine's where it states no other."""
        if self.kinds:
            return next((tried for name, tried in self.kinds.items() if name == kind), None)
        return self.tried if all(each.tried is None for each in self.modes) else mode.tried

    @field_validator("modes")
    @classmethod
    def _flags_render(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        for mode in modes:
            unknown = frozenset().union(*map(_named, mode.templates)) - NAMED
            if unknown:
                raise ValueError(f"flags of {mode.name}: unknown {min(unknown)}: expected {', '.join(sorted(NAMED))}")
        return modes


class NotListed(Frozen):
    """An engine that offloads experts and has no profile."""

    name: str
    scheme: str  #: what it does with experts
    why: str
    source: str


@cache
def not_listed() -> tuple[NotListed, ...]:
    """Return the engines without a profile, with the reason."""
    rows = tomllib.loads(files(__name__).joinpath("not_listed.toml").read_text("utf-8"))["engines"]
    return tuple(map(NotListed.model_validate, rows))


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
    said = tomllib.loads(files(package).joinpath(f"{name}.toml").read_text("utf-8"))
    options = said.pop("options", {})
    for mode in said.get("modes", ()):
        mode.setdefault("options", options)
    try:
        engine = Engine.model_validate(said)
    except ValidationError as wrong:
        raise ConfigError(f"engine {name}: {wrong}") from None
    if engine.name != name:
        raise ConfigError(f"engine {name}: invalid name {engine.name!r}: expected that of the file")
    return engine
