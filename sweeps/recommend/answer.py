"""The answer for a model on a machine: every setting of every engine is replayed, and the best and its memory follow.

All speeds are those of replays by the compiled engine in this process. Settings are compared at the routing in the
middle; what is printed has its range over all routings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.results.result import Row
from moereplay.results.settings import expert_lists, repeat_command
from moereplay.simulator.calibration import Tried
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import CARD_SIZES, KIT_SIZES, NO_LIMIT, Machine, better, with_memory, without_gpu
from moereplay.simulator.platform import Roofline
from moereplay.simulator.platforms import as_toml, kept
from moereplay.simulator.replay import ENGINES, counters_of
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.recommend.decoding import PLAIN
from moereplay.sweeps.recommend.engines import GLOBAL_LRU, LAYERS, STATIC, Engine, Mode, engine, engines
from moereplay.sweeps.recommend.load import Load, middle
from moereplay.sweeps.recommend.prompts import First, first_token, streaming_wins
from moereplay.sweeps.recommend.settings import (
    SYSTEM,
    Setting,
    Sum,
    expert_us,
    machines_of,
    memory_of,
    of_layers,
    room_of,
    setting_at,
    settings,
    settings_of,
)
from moereplay.traces.documents import json_text
from moereplay.traces.files import leaving_no_folders
from moereplay.traces.geometry import last_layers, mean_experts
from moereplay.traces.store import open_trace
from moereplay.traces.texts import sold
from moereplay.traces.units import GB
from moereplay.traces.writer import write_trace

WORTH = 0.01  #: smaller gains do not count
BORNE_OUT = 1.5  #: measured over predicted time, median, of engines that may lead
UNKNOWN_DENSE = (
    "the bytes of dense weights are unknown: they take no memory here, and no time unless the platform states it; "
    "pass --dense"
)


class Range(NamedTuple):
    """Least and most over the routings, and the value of the middle one."""

    least: float
    middle: float
    most: float


class Parts(NamedTuple):
    """Nanoseconds of a token by what it waits for; hidden work does not count."""

    compute: float  #: of the fast processor
    cpu: float
    link: float
    disk: float
    sync: float  #: launches, submissions and other work of every layer

    @property
    def total(self) -> float:
        """The token's time."""
        return sum(self)


class Replayed(NamedTuple):
    """A setting replayed with one routing."""

    config: ReplayConfig
    totals: Row
    requests: Sequence[Row]
    tokens_per_s: float  #: of all streams together
    hit: float  #: of a token's experts in fast memory


@dataclass(frozen=True)
class Estimate:
    """A setting, and its replays, which are made when they are asked for."""

    setting: Setting
    replays: Replays
    whole: bool  #: whether it is replayed with all routings, or with the middle one alone

    @cached_property
    def middle(self) -> Replayed:
        """The replay of the middle routing."""
        return self.replays.run(self.setting, middle(len(self.replays.load.routings)))

    @cached_property
    def runs(self) -> tuple[Replayed, ...]:
        """The replays by routing; one, where the routing does not matter."""
        if not (self.whole and self.setting.by_routing):
            return (self.middle,)
        return tuple(self.replays.run(self.setting, at) for at in range(len(self.replays.load.routings)))

    @cached_property
    def parts(self) -> Parts:
        """The parts of a token's time, at the middle routing."""
        return parts_of(self.replays.load, self.setting, self.middle)

    @cached_property
    def memory(self) -> list[Sum]:
        """The contents of fast memory, and of main memory below it."""
        made = engine(self.setting.engine) if self.setting.engine else NOBODY
        return memory_of(self.replays.load, self.setting, made)

    @property
    def kind(self) -> str:
        """Where experts lie: `resident` or `unified`, `hybrid` with others in main memory, `disk`, or `cpu`."""
        setting = self.setting
        if setting.disk_bytes:
            return "disk"
        if setting.machine.kind != "gpu":
            return setting.machine.kind
        return "hybrid" if setting.ram_bytes and (self.middle.hit < 1 or self.hit.least < 1) else "resident"

    @property
    def tokens_per_s(self) -> Range:
        """Tokens/s of all streams together."""
        return self._range([run.tokens_per_s for run in self.runs])

    @property
    def hit(self) -> Range:
        """Share of a token's experts in fast memory."""
        return self._range([run.hit for run in self.runs])

    def _range(self, values: Sequence[float]) -> Range:
        return Range(min(values), values[middle(len(values))], max(values))

    def gain(self, other: Estimate) -> Range:
        """Return the gain over another setting, routing by routing."""
        many = max(len(self.runs), len(other.runs))
        mine, others = (list(estimate.runs) * (many // len(estimate.runs)) for estimate in (self, other))
        gains = [run.tokens_per_s / run_of.tokens_per_s - 1 for run, run_of in zip(mine, others, strict=True)]
        return Range(min(gains), self.middle.tokens_per_s / other.middle.tokens_per_s - 1, max(gains))


class Way(NamedTuple):
    """A way to use the fast memory and to serve a miss at one cost for all, and the engines that have it."""

    estimate: Estimate
    engines: tuple[str, ...]


class Turn(NamedTuple):
    """From this size of fast memory on, the way that is faster: whole layers of bytes."""

    layers: int
    size: int  #: bytes of experts
    slots: int
    faster: str  #: `cache`, `placed`, or `tie` within WORTH


class More(NamedTuple):
    """Speed with a larger or faster part, or a smaller quantisation, on the engine of the answer."""

    what: str
    tokens_per_s: float
    gain: float
    flags: str


class Drafted(NamedTuple):
    """A number of drafts of the answer's engine."""

    drafts: int
    load: Load
    estimate: Estimate


@dataclass(frozen=True)
class Answer:
    """The answer. What only tables show is replayed when it is asked for."""

    load: Load
    machine: Machine
    best: Estimate
    engines: tuple[Estimate, ...]  #: the best setting of each, the fastest first
    ways: tuple[Way, ...]  #: the fastest first; none where every expert fits, or there is no CPU beside
    made: Replays
    costs: dict[str, float]  #: microseconds of a missing expert, by where it comes from
    binds: str
    more: tuple[More, ...]
    smaller: tuple[More, ...]  #: quantisations
    left_out: dict[str, str]  #: engines without a setting, and why
    warnings: tuple[str, ...]
    steps: tuple[Drafted, ...] = ()  #: by drafts, where they are asked about
    alone: Estimate | None = None  #: one stream without drafts, where several decode
    ends: tuple[float, ...] = ()  #: tokens/s of the best setting at both ends of what is not said of the CPU
    prompt: FirstTokens | None = None  #: where a prompt is asked about

    @cached_property
    def ladder(self) -> tuple[Estimate, ...]:
        """Settings of the best mode's knob."""
        best = self.best.setting
        steps = settings_of(self.load, best.machine, engine(best.engine), best.mode)
        return tuple(self.made.estimate(step, whole=False) for step in steps)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The sizes of fast memory from which on another way is faster."""
        found = [*_compared(self)]
        return tuple(turn for at, turn in enumerate(found) if at == 0 or turn.faster != found[at - 1].faster)

    @property
    def placed_from(self) -> Turn | None:
        """The last of `turns` if placement is faster from there on and is not below; it needs few replays."""
        last = None
        for turn in _compared(self, falling=True):
            if turn.faster != "placed":
                return last
            last = turn
        return None

    @property
    def replays(self) -> int:
        """Number of different replays up to now, without those of upgrades and of other loads."""
        return len(self.made.asked)


class FirstTokens(NamedTuple):
    """Seconds to the first token of a prompt by engine, the soonest first, and from which length streaming wins."""

    tokens: int
    engines: tuple[First, ...]
    streaming_from: int  #: tokens, on the engine of the answer; 0: never, or nothing is computed by a CPU


@dataclass
class Replays:
    """Replays settings, each once with each routing, also where several of these share what is known."""

    load: Load
    known: dict[tuple[object, ...], Replayed] = field(default_factory=dict)
    asked: set[tuple[object, ...]] = field(default_factory=set)  #: the different replays that were asked for

    @property
    def apart(self) -> Replays:
        """Others that share what is known, and count for themselves."""
        return Replays(self.load, self.known)

    def estimate(self, setting: Setting, whole: bool = True) -> Estimate:
        """Return the speed of a setting with all routings, or with the middle one alone."""
        return Estimate(setting, self, whole)

    def best(self, found: Sequence[Setting]) -> Setting | None:
        """Return the fastest at the middle routing; of nearly equal ones the first."""
        speeds = [self.estimate(setting).middle.tokens_per_s for setting in found]
        return next(
            (setting for setting, speed in zip(found, speeds, strict=True) if speed >= max(speeds) * 0.999), None
        )

    def fastest(self, machine: Machine, made: Engine) -> Estimate | None:
        """Return the best setting of an engine on a machine; None if nothing fits."""
        setting = self.best([*settings(self.load, machine, made)])
        return setting and self.estimate(setting)

    def run(self, setting: Setting, at: int) -> Replayed:
        """Return the replay of a setting with routing `at` of the load."""
        key = (*setting.what, at, kept(setting.platform(self.load)))
        self.asked.add(key)
        if key not in self.known:
            self.known[key] = replayed(self.load, setting, at)
        return self.known[key]


def replayed(load: Load, setting: Setting, at: int) -> Replayed:
    """Replay a setting with routing `at` of the load."""
    config = setting.config(load, at)
    totals, requests = counters_of(load.traces[at], config)
    tokens = sum(row["decode_tokens"] for row in requests)
    return Replayed(config, totals, requests, tokens / totals["time_ns"] * 1e9, totals["hits"] / totals["accesses"])


def parts_of(load: Load, setting: Setting, run: Replayed) -> Parts:
    """Return the parts of a token. What steps wait for is divided as CPU, link and disk were busy."""
    totals, platform = run.totals, setting.machine.platform
    tokens = sum(row["decode_tokens"] for row in run.requests)
    passes = sum(row["decode_passes"] for row in run.requests) / load.decoding.streams
    steps = passes * load.geometry.layers
    sync = steps * (platform.loading.gate_ns + 1_000 * setting.mode.step_us)
    computed = totals["dense_ns"] + totals["expert_ns"] + totals["loading_ns"] - sync
    stall = max(0, totals["time_ns"] - totals["dense_ns"] - totals["expert_ns"] - totals["loading_ns"])
    one = not setting.machine.has_main_memory
    fetched = totals["bytes_demand"] / setting.platform(load).links[0].bytes_per_s * 1e9
    busy = {
        "cpu": float(totals["cpu_ns"]),
        "link": 0.0 if one else fetched,
        "disk": fetched if one else totals["bytes_lower"] / setting.read_bytes_per_s * 1e9,
    }
    whole = sum(busy.values()) or 1.0
    waited = {name: stall * ns / whole / tokens for name, ns in busy.items()}
    return Parts(computed / tokens, waited["cpu"], waited["link"], waited["disk"], sync / tokens)


# -- the answer


Smaller = Callable[[], Iterable[tuple[str, Load]]]


def none_smaller() -> Iterable[tuple[str, Load]]:
    """Return no smaller quantisations."""
    return ()


def answer(load: Load, machine: Machine, only: str = "", smaller: Smaller = none_smaller) -> Answer:
    """Return the best settings of all engines, or of one. Raises ConfigError if none can run the model.

    `smaller` returns the same model in smaller quantisations, by name; it is asked where not all experts are in memory.
    """
    drafts = load.asked
    if drafts is None:
        return _answer(Replays(load), machine, only, smaller)
    at = {many: Replays(load.at(drafts.at(many))) for many in drafts.lengths}
    number = _choice(at, machine, only) if drafts.is_open else drafts.most
    of = _answer(at[number].apart, machine, only, smaller)
    made = engine(of.best.setting.engine)
    fastest = {many: replays.fastest(machine, made) for many, replays in at.items()}
    steps = tuple(Drafted(many, at[many].load, each) for many, each in fastest.items() if each)
    alone = Replays(load.at(PLAIN)).fastest(machine, made) if drafts.streams > 1 else None
    return replace(of, steps=steps, alone=alone)


def _choice(at: dict[int, Replays], machine: Machine, only: str) -> int:
    """Return the number of drafts of the fastest step; the fewest among nearly equal ones, the most if nothing fits."""
    found = dict[int, float]()
    for many, replays in at.items():
        leading = _leading(replays.apart, machine, candidates(replays.load, only))
        found[many] = max((_likely(replace(estimate, whole=False)) for estimate in leading.values()), default=0.0)
    return next((many for many, speed in found.items() if speed * (1 + WORTH) >= max(found.values()) > 0), max(at))


def _answer(replays: Replays, machine: Machine, only: str, smaller: Smaller) -> Answer:
    load, chosen = replays.load, candidates(replays.load, only)
    if not chosen[0].runs(load.model):
        raise ConfigError(
            f"invalid --engine {only}: it runs only {' and '.join(chosen[0].models)}, not {load.model}; omit --engine"
        )
    leading = _leading(replays, machine, chosen)
    if not leading:
        raise ConfigError(_refusal(load, machine, only))
    by_engine = sorted(leading.values(), key=lambda estimate: -estimate.middle.tokens_per_s)
    best = leader(by_engine)
    others = smaller() if best.setting.disk_bytes else ()
    return Answer(
        load=load,
        machine=machine,
        best=best,
        engines=tuple(by_engine),
        ways=_ways(replays, load, machine),
        made=replays,
        costs=expert_us(load, best.setting),
        binds=binds(load, best),
        more=tuple(_upgrades(replays, machine, best)),
        smaller=tuple(more for name, other in others for more in _more(Replays(other), name, machine, best)),
        left_out={} if only else dict(_left_out(load, machine, leading)),
        warnings=tuple(_warnings(load, machine, best)),
        ends=tuple(_at(replays, best.setting, end) for end in machine.range()),
    )


def _at(replays: Replays, setting: Setting, machine: Machine) -> float:
    """Return the tokens/s of a setting on a machine of the same sizes, at the middle routing."""
    where = without_gpu(machine) if setting.machine.kind == "cpu" and machine.kind == "gpu" else machine
    return replays.apart.estimate(replace(setting, machine=where)).middle.tokens_per_s


def candidates(load: Load, only: str = "") -> tuple[Engine, ...]:
    """Return the engine of that name, else those that run the model and are known to draft where a pass has drafts."""
    if only:
        return (engine(only),)
    many = load.decoding.drafts.many
    return tuple(each for each in engines() if each.runs(load.model) and (each.drafts or not many))


def _leading(replays: Replays, machine: Machine, chosen: Sequence[Engine]) -> dict[str, Estimate]:
    """Return the fastest setting of each engine that has one."""
    found = {made.name: replays.fastest(machine, made) for made in chosen}
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def leader(found: Sequence[Estimate]) -> Estimate:
    """Return the fastest of the engines whose predictions were compared with runs, else the fastest of all.

    A prediction that was too fast is scaled by the measured error, and one that was far off is ignored.
    """
    tried = [estimate for estimate in found if _may_lead(estimate)] or list(found)
    speeds = [_likely(estimate) for estimate in tried]
    return next(estimate for estimate, speed in zip(tried, speeds, strict=True) if speed >= max(speeds) * 0.999)


def tried_of(of: Estimate) -> Tried | None:
    """Return the measured runs of the engine in the mode of a setting, if there are any."""
    return engine(of.setting.engine).tried_with(of.setting.mode, of.kind)


def _may_lead(of: Estimate) -> bool:
    band = tried_of(of)
    return band is not None and band.median <= BORNE_OUT


def _likely(of: Estimate) -> float:
    band = tried_of(of)
    return of.middle.tokens_per_s / max(1.0, band.median if band else 1.0)


def _upgrades(replays: Replays, machine: Machine, best: Estimate) -> Iterator[More]:
    """Yield what each better part gives on the same engine, the most first.

    A part that gives nothing is left out, and so is a larger one that gives no more than a smaller one of its kind.
    """
    found, fastest = list[More](), dict[str, float]()  # tokens/s by kind of part
    for what, other in better(machine, replays.load.expert_bytes):
        kind = what.partition(" of ")[0]
        for more in _more(replays.apart, what, other, best):
            if more.gain > WORTH and more.tokens_per_s > fastest.get(kind, 0) * (1 + WORTH):
                fastest[kind] = more.tokens_per_s
                found.append(more)
    yield from sorted(found, key=lambda more: -more.gain)


def _more(replays: Replays, what: str, machine: Machine, best: Estimate) -> Iterator[More]:
    """Yield what the engine of the answer gives with another load or machine, if anything fits."""
    if found := replays.fastest(machine, engine(best.setting.engine)):
        speed = found.middle.tokens_per_s
        yield More(what, speed, speed / best.middle.tokens_per_s - 1, found.setting.flags)


def binds(load: Load, estimate: Estimate) -> str:
    """Return the resource of a token's largest part: memory or link rates, processors, the disk, or launches."""
    machine, parts = estimate.setting.machine, estimate.parts
    largest = max(parts._fields, key=lambda name: getattr(parts, name))
    if largest == "cpu":
        return "CPU cores" if _computes(machine.platform.cpu, load) else "RAM bandwidth"
    if largest == "compute":
        of_gpu = machine.has_main_memory
        processor = "compute of the GPU" if of_gpu else "compute"
        rate = "VRAM bandwidth" if of_gpu else "memory bandwidth"
        return processor if _computes(machine.platform.compute, load) else rate
    return {"link": "link between RAM and VRAM", "disk": "disk reads", "sync": "kernel launches and synchronisation"}[
        largest
    ]


def _computes(processor: object, load: Load) -> bool:
    """Return whether a token's expert takes longer to compute than to read."""
    if not isinstance(processor, Roofline):
        return False
    geometry = load.geometry
    size = sum(geometry.expert_bytes) / geometry.layers
    params = geometry.expert_params or size * 8 / geometry.expert_bits
    return 2 * params / processor.flops > size / processor.expert_rate(geometry.weight_format)


def _left_out(load: Load, machine: Machine, found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield every engine that cannot run this case, with the reason."""
    for made in engines():
        if made.name in found:
            continue
        able = [mode for mode in made.modes if next(machines_of(machine, mode), None)]
        if not made.runs(load.model):
            yield made.name, f"runs only {' and '.join(made.models)}"
        elif load.decoding.drafts.many and not made.drafts:
            yield made.name, "not known to draft"
        elif not able:
            kinds = dict.fromkeys(kind for mode in made.modes for kind in mode.machines)
            yield made.name, f"runs on {' or '.join(kinds)} only"
        elif room_of(load, machine, made) < 0:
            yield made.name, f"what is not experts does not fit in {machine.platform.fast_tier}"
        elif all(mode.below == "none" for mode in able) and machine.has_main_memory:
            yield made.name, "all experts must fit in RAM" if able[0].copies else "all experts must fit in VRAM and RAM"
        else:
            yield made.name, "no setting fits"


def _warnings(load: Load, machine: Machine, best: Estimate) -> Iterator[str]:
    if not load.dense_bytes:
        yield UNKNOWN_DENSE
    if best.setting.disk_bytes:
        share = best.setting.disk_bytes / load.expert_bytes
        yield f"{share:.0%} of the experts fit in no memory and are read from the disk again and again"
    lacking = -room_of(load, machine, engine(best.setting.engine))
    if machine.kind == "gpu" and lacking > 0:
        yield (
            f"what is not experts needs {lacking / GB:.2g} GB more than the {machine.platform.fast_tier} has: the GPU "
            "is left out here; a shorter --context or a smaller --kv-bits may fit"
        )


def _refusal(load: Load, machine: Machine, only: str) -> str:
    """Return why nothing fits."""
    needed = load.expert_bytes + load.fixed_bytes
    has = machine.memory_bytes + machine.ram_bytes
    who = f"engine {only}" if only else "any engine"
    fast, ram = machine.memory_bytes, machine.ram_bytes
    memories = f"{fast / GB:.4g} GB of {machine.platform.fast_tier} (sold as {sold(fast)})"
    memories += f" and {ram / GB:.4g} GB of RAM (sold as {sold(ram)})" if machine.has_main_memory else ""
    if machine.disk_bytes_per_s is None and needed > has:
        return (
            f"the model needs {needed / GB:.4g} GB, and the machine has {memories}; pass more --vram or --ram, fewer "
            "bits per weight, or a --disk to read from"
        )
    return (
        f"no setting of {who} fits: {load.fixed_bytes / GB:.4g} GB of dense weights, KV cache, buffers and runtime, "
        f"and {load.expert_bytes / GB:.4g} GB of experts, on {memories}; pass more memory, a smaller --runtime, a "
        f"shorter --context{', or another --engine' if only else ' or fewer bits per weight'}"
    )


# -- Ways to use the same bytes of fast memory, all at the same costs, which are no engine's
#
# Engines differ in more than placement, so their settings do not say which way to place suits a machine. Here experts
# are placed for good (whole layers, or the most used ones by a list) or cached (the last used ones), and what fast
# memory lacks is computed by the CPU, fetched, or divided between both.

LAYER_US = 30  #: submissions and waiting of a layer with a miss: the middle of what engines take
CACHE_US = 14  #: of a cache, in every layer: victims 9 to 11 us, gathering the slots 3.4 us (vLLM's, in a GPU's graph)
WAYS = (
    (LAYERS, "cpu"),
    (STATIC, "cpu"),
    (STATIC, "fetch"),
    (GLOBAL_LRU, "cpu"),
    (GLOBAL_LRU, "fetch"),
    (GLOBAL_LRU, "split"),
)


def _mode(holds: str, miss: str) -> Mode:
    cache = holds == GLOBAL_LRU
    costs = {"layer_us": LAYER_US, "step_us": CACHE_US * cache, "overlap": holds != LAYERS, "copies": cache}
    about = {"name": "way", "flags": "", "source": "no engine's: one cost for all", "below": "direct"}
    return Mode.model_validate(about | {"holds": holds, "miss": miss} | costs)


MODES = tuple(_mode(*way) for way in WAYS)
NOBODY = Engine(name="", summary="", home="", modes=MODES)


def _ways(replays: Replays, load: Load, machine: Machine) -> tuple[Way, ...]:
    """Compare the ways; none where fast memory lies over the disk, every expert fits, or none does."""
    size = room_of(load, machine, NOBODY)
    if not machine.has_main_memory or machine.platform.cpu is None or not 0 < size < load.expert_bytes:
        return ()
    found = [(mode, setting) for mode in MODES for setting in _way(load, machine, mode, size)]
    made = [Way(replays.estimate(setting), _engines(load, mode)) for mode, setting in found]
    return tuple(sorted(made, key=lambda way: -way.estimate.middle.tokens_per_s))


def _way(load: Load, machine: Machine, mode: Mode, size: int) -> Iterator[Setting]:
    least = max(load.geometry.expert_bytes) * (load.geometry.layers if mode.holds == STATIC else load.geometry.k)
    if mode.holds == LAYERS:
        layers = last_layers(load.geometry, size)
        yield from setting_at(load, machine, NOBODY, mode, of_layers(load, layers), layers)
    elif size >= least:
        yield from setting_at(load, machine, NOBODY, mode, size, 0)


def _engines(load: Load, mode: Mode) -> tuple[str, ...]:
    """Return the engines that have a way; those that cache per layer cache as well."""
    kinds = ("lru", GLOBAL_LRU) if mode.holds == GLOBAL_LRU else (mode.holds,)
    return tuple(
        made.name
        for made in engines()
        if made.runs(load.model)
        and any(of.holds in kinds and of.miss == mode.miss and "gpu" in of.machines for of in made.modes)
    )


TURNS = 8  #: sizes of fast memory at which the ways are compared


def _compared(of: Answer, falling: bool = False) -> Iterator[Turn]:
    """Yield which way is faster at each size, at the middle routing: the best of each kind on the machine as it is."""
    load, best = of.load, dict[bool, Mode]()
    for way in of.ways:
        best.setdefault(way.estimate.setting.mode.holds == GLOBAL_LRU, way.estimate.setting.mode)
    if len(best) < 2:
        return
    layers = load.geometry.layers
    for many in sorted({max(1, round(layers * part / TURNS)) for part in range(1, TURNS)}, reverse=falling):
        size = of_layers(load, many)
        where = with_memory(of.machine, load.fixed_bytes + size)
        speeds = {}
        for cache, mode in best.items():
            setting = next(_way(load, where, mode, size), None)
            speeds[cache] = of.made.estimate(setting).middle.tokens_per_s if setting else 0.0
        if not all(speeds.values()):
            continue
        gain = speeds[True] / speeds[False] - 1
        faster = "tie" if abs(gain) <= WORTH else "cache" if gain > 0 else "placed"
        yield Turn(many, size, mean_experts(load.geometry, size), faster)


def prompt_of(of: Answer, tokens: int) -> FirstTokens:
    """Return the seconds to the first token of a prompt on the best setting of each engine."""
    found = (first_token(of.load, estimate.setting, tokens) for estimate in of.engines)
    ranked = sorted((first for first in found if first is not None), key=lambda first: first.seconds)
    return FirstTokens(tokens, tuple(ranked), streaming_wins(of.load, of.best.setting))


# -- results in a folder


def keep_answer(of: Answer, out: Path) -> Iterator[str]:
    """Write the replays of every engine's best setting as a folder of results, and what commands read to repeat them.

    Yield what was written, and the command of the answer. Raises ConfigError or TraceError if it cannot be written.
    """
    from moereplay.sweeps.parts import keep  # and Polars, which takes a sixth of a second to import

    load = of.load
    with leaving_no_folders(out):
        out.mkdir(parents=True, exist_ok=False)
        traces = [_written(out, load, at) for at in range(len(load.traces))]
        for estimate in of.engines:
            platform = as_toml(estimate.setting.platform(load))
            (file := out / f"{estimate.setting.engine}.toml").write_text(platform)
            for run, path in zip(estimate.runs, _of_runs(estimate, traces), strict=True):
                trace = open_trace(path)
                config = run.config.model_copy(update={"platform": str(file)})
                list(keep(out, trace, [config], run_grid(trace, [config], bounded=False, by_layer=None), ENGINES[0]))
                if estimate is of.best and run is estimate.middle:
                    for name, pairs in expert_lists(config.model_dump(mode="json")).items():
                        (out / name).write_text(json_text(pairs))
                    again = repeat_command(config.model_dump(mode="json"), str(path), lists_at=f"{out}{os.sep}")
    yield f"wrote {out}: results, traces, platforms and lists of experts"
    yield f"the answer again: {again}"


def _of_runs(estimate: Estimate, traces: Sequence[Path]) -> Sequence[Path]:
    return traces if len(estimate.runs) == len(traces) else [traces[middle(len(traces))]]


def _written(out: Path, load: Load, at: int) -> Path:
    """Write what is replayed of a routing as a trace."""
    path = out / f"{load.routings[at].name.replace(os.sep, '-')}.zarr"
    write_trace(path, *load.content(at), resumable=False)
    return path


# -- Tokens/s over sizes of fast memory and of main memory, with the rates of one machine

LEAST_RAM = 16  #: GiB of main memory
NEAR = 0.1  #: sizes that differ by less are one


def surface(of: Answer) -> list[dict[str, Any]]:
    """Return tokens/s of the answer's engine at each pair of sizes, the machine's own among them; 0 if nothing fits.

    The list is empty for a machine without main memory below its fast memory.
    """
    load, machine, made = of.load, of.machine, engine(of.best.setting.engine)
    if not machine.has_main_memory:
        return []
    own = [machine.ram_bytes] if machine.ram_bytes < NO_LIMIT else []
    whole, points = load.fixed_bytes + load.expert_bytes, []
    cards = _with([machine.memory_bytes], _up_to(whole, [gib << 30 for gib in CARD_SIZES]))
    for ram in _with(own, _up_to(whole + SYSTEM, [gib << 30 for gib in KIT_SIZES if gib >= LEAST_RAM])):
        for vram in cards:
            where = with_memory(machine, vram)._replace(ram_bytes=int(ram))
            found = of.made.apart.fastest(where, made)
            speed = found.middle.tokens_per_s if found else 0.0
            here = vram == machine.memory_bytes and ram in own
            points.append({"vram_bytes": vram, "ram_bytes": ram, "tokens_per_s": speed, "here": here})
    return points


def _with(own: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the machine's own size among the others; one that is nearly the same, as 8 GiB and 8 GB, is left out."""
    return sorted({*own, *(size for size in sizes if not any(abs(size / each - 1) < NEAR for each in own))})


def _up_to(whole: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes up to the first that holds the whole model."""
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < whole]
