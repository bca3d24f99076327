"""The quick answer: evaluate every setting of every engine in closed form, and find the best and its upgrades."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, better, with_memory, without_gpu
from moereplay.sweeps.recommend.engines import Engine, Mode, engine, engines, placed
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, LAYERS, STATIC, Hits
from moereplay.sweeps.recommend.token_time import UNKNOWN_DENSE, Load, Parts, Prices, bound_by, token
from moereplay.traces.texts import sold
from moereplay.traces.units import GB

SYSTEM = 2 * int(GB)  #: main memory for the operating system and other programs, assumed
STEPS = 12  #: of a ladder, at most
BORNE_OUT = 1.5  #: measured over predicted time, median, of engines that may lead
WORTH = 0.01  #: smaller gains do not count
SHARES = (0.25, 0.5, 0.75, 1.0)  #: of the fast memory for experts, in the ladder of a cache
CROSSINGS = 40  #: sizes of fast memory at which schemes are compared


class Range(NamedTuple):
    """Least, median and most over the routings; of two in the middle the lower, which is one routing's own."""

    least: float
    middle: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of values."""
        return cls(min(values), median_low(values), max(values))


@dataclass(frozen=True)
class Setting:
    """One setting of one mode of an engine, and what lies where."""

    engine: str
    mode: Mode
    flags: str
    share: float  #: of all experts, in fast memory
    gpu_layers: int  #: whole layers in fast memory, of a placement by layers
    fast_bytes: int  #: of experts
    ram_bytes: int  #: of experts, in main memory
    disk_bytes: int  #: of experts that neither holds


@dataclass(frozen=True)
class Estimate:
    """Expected speed of a setting."""

    setting: Setting
    machine: Machine  #: without its GPU, where the setting leaves it out
    speeds: tuple[float, ...]  #: tokens/s of all streams together, for each routing
    tokens_per_s: Range
    hit: Range  #: in the middle that of the median routing
    parts: Parts  #: nanoseconds of a token, at the median routing: a pass's, divided by the tokens that it yields
    peak_fast_bytes: int
    peak_ram_bytes: int

    @property
    def scheme(self) -> tuple[str, str]:
        """Return how experts are cached and how the others are handled."""
        return self.setting.mode.holds, self.setting.mode.miss


class More(NamedTuple):
    """Speed with a larger or faster part."""

    what: str
    tokens_per_s: float
    gain: float  #: of the median
    setting: Setting


class Crossing(NamedTuple):
    """The scheme that leads from a size of fast memory for experts on."""

    share: float
    size: int  #: bytes
    holds: str
    miss: str


@dataclass(frozen=True)
class Quick:
    """The answer."""

    best: Estimate
    ladder: tuple[Estimate, ...]
    by_engine: tuple[Estimate, ...]
    schemes: tuple[Estimate, ...]
    crossings: tuple[Crossing, ...]
    binds: str
    more: tuple[More, ...]
    prefetch_gain: float  #: upper bound: every transfer of the best set hidden as far as compute allows
    not_listed: dict[str, str]  #: engines without a setting, and why
    warnings: tuple[str, ...]


def candidates(load: Load, only: str = "") -> tuple[Engine, ...]:
    """Return the engine of that name, else those that run the model and are known to draft where a pass has drafts."""
    able = (each for each in engines() if each.drafts or not load.decoding.drafts.many)
    return (engine(only),) if only else tuple(each for each in able if each.runs(load.model))


def quick(load: Load, machine: Machine, only: str = "") -> Quick:
    """Return the best settings of all engines, or of one. Raises ConfigError if none can run the model."""
    chosen = candidates(load, only)
    if not chosen[0].runs(load.model):
        raise ConfigError(
            f"invalid --engine {only}: it runs only {' and '.join(chosen[0].models)}, not {load.model}; omit --engine"
        )
    found = estimates(load, machine, chosen)
    if not found:
        raise ConfigError(_refusal(load, machine, only))
    best = leader(found)
    borne_out = [each for each in found if _may_lead(each)] or found
    return Quick(
        best=best,
        ladder=_ladder(found, best),
        by_engine=_best_by(found, lambda each: each.setting.engine),
        schemes=_best_by(borne_out, lambda each: each.scheme),
        crossings=tuple(_crossings(load, machine, chosen)),
        binds=bound_by(best.machine, load.geometry, best.parts),
        more=tuple(_more(load, machine, chosen, best)),
        prefetch_gain=_prefetch_gain(best),
        not_listed={} if only else dict(_not_listed(load, machine, {each.setting.engine for each in found})),
        warnings=tuple(_warnings(load, machine, best)),
    )


def _not_listed(load: Load, machine: Machine, found: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield every engine that cannot run this case, with the reason."""
    for each in engines():
        if each.name in found:
            continue
        able = [mode for mode in each.modes if next(_machines(machine, mode), None)]
        if not each.runs(load.model):
            yield each.name, f"runs only {' and '.join(each.models)}"
        elif load.decoding.drafts.many and not each.drafts:
            yield each.name, "not known to draft"
        elif not able:
            yield (
                each.name,
                f"runs on {' or '.join(dict.fromkeys(of for mode in each.modes for of in mode.machines))} only",
            )
        elif room_of(load, machine) < 0:
            yield each.name, f"other weights and KV cache do not fit in {machine.platform.fast_tier}"
        elif all(mode.below == "none" for mode in able) and machine.has_main_memory:
            yield each.name, "all experts must fit in RAM" if able[0].copies else "all experts must fit in VRAM and RAM"
        else:
            yield each.name, "no setting fits"


def _fastest(found: Sequence[Estimate]) -> Estimate:
    """Return the fastest; of nearly equal ones the first in the order of engines."""
    most = max(each.tokens_per_s.middle for each in found)
    return next(each for each in found if each.tokens_per_s.middle >= most * (1 - 1e-3))


def _may_lead(found: Estimate) -> bool:
    """Return False for an engine that took far longer than predicted in the runs that it was compared with."""
    band = engine(found.setting.engine).tried
    return band is None or band.median <= BORNE_OUT


def leader(found: Sequence[Estimate]) -> Estimate:
    """Return the fastest of the engines whose predictions were compared with runs, else the fastest of all.

    A prediction that was too fast is scaled by the measured error, and one that was far off is ignored.
    """
    tried = [each for each in found if _may_lead(each) and engine(each.setting.engine).tried]
    if not tried:
        return _fastest(found)
    speeds = [likely(each) for each in tried]
    return next(each for each, speed in zip(tried, speeds, strict=True) if speed >= max(speeds) * (1 - 1e-3))


def likely(found: Estimate) -> float:
    """Return the median tokens/s, less the measured error of the engine's predictions where they were too fast."""
    band = engine(found.setting.engine).tried
    return found.tokens_per_s.middle / max(1.0, band.median if band else 1.0)


def _best_by(found: Sequence[Estimate], key: Callable[[Estimate], object]) -> tuple[Estimate, ...]:
    """Return the fastest of each group, the fastest first."""
    groups: dict[object, list[Estimate]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    best = [max(group, key=lambda each: each.tokens_per_s.middle) for group in groups.values()]
    return tuple(sorted(best, key=lambda each: -each.tokens_per_s.middle))


# -- settings


def estimates(load: Load, machine: Machine, chosen: Sequence[Engine]) -> list[Estimate]:
    """Return every setting that fits the machine and the rows of a pass, with its speed."""
    found, price = [], dict[str, tuple[Prices, ...]]()
    for each in chosen:
        for mode in each.modes:
            if not mode.least_rows <= load.decoding.rows <= mode.most_rows:
                continue
            for of in _machines(machine, mode):
                if of.kind not in price:  # the machine, and the machine without its GPU
                    price[of.kind] = load.prices(of)
                found += [estimate_of(load, of, price[of.kind], setting) for setting in _settings(load, of, each, mode)]
    return found


def _machines(machine: Machine, mode: Mode) -> Iterator[Machine]:
    """Yield the machine if the mode is for its kind; a machine with a GPU is one without it as well."""
    if machine.kind in mode.machines:
        yield machine
    elif machine.kind == "gpu" and "cpu" in mode.machines and machine.platform.cpu is not None:
        yield without_gpu(machine)


def room_of(load: Load, machine: Machine) -> int:
    """Return the bytes of fast memory that are left for experts; negative if the rest does not fit."""
    system = 0 if machine.has_main_memory else SYSTEM if machine.platform.fast_tier == "RAM" else 0
    return machine.memory_bytes - load.fixed_bytes - system


def _settings(load: Load, machine: Machine, of: Engine, mode: Mode) -> Iterator[Setting]:
    """Yield the settings of a mode that fit, those with the most experts in fast memory first."""
    room, sizes = room_of(load, machine), load.geometry.expert_bytes
    if room < 0 or (mode.miss != "fetch" and machine.platform.cpu is None):
        return
    if mode.holds == LAYERS:
        held = 0
        fits = 0
        for size in reversed(sizes):
            if held + size * load.geometry.experts > room:
                break
            held += size * load.geometry.experts
            fits += 1
        for layers in range(fits, -1, -1):
            fast = load.geometry.experts * sum(sizes[len(sizes) - layers :])
            yield from settings_at(load, machine, of, mode, fast, layers)
        return
    least = max(sizes) * (len(sizes) if mode.holds == "lru" else load.geometry.k)
    for share in reversed(SHARES) if mode.knobs else (1.0,):
        fast = min(load.expert_bytes, int(room * share))
        if fast >= least:
            yield from settings_at(load, machine, of, mode, fast, 0)
        if fast == load.expert_bytes:
            break


def settings_at(load: Load, machine: Machine, of: Engine, mode: Mode, fast: int, layers: int) -> Iterator[Setting]:
    """Yield the setting with the given bytes of experts in fast memory, if the rest fits elsewhere."""
    everything = load.expert_bytes
    below = everything if mode.copies and fast < everything else everything - fast
    room = max(0, machine.ram_bytes - SYSTEM) if machine.has_main_memory else 0
    ram = min(below, room)
    disk = below - ram
    if disk and (mode.below == "none" or machine.disk_bytes_per_s is None):
        return
    share = fast / everything
    yield Setting(of.name, mode, _flags(load, machine, mode, fast, disk), share, layers, fast, ram, disk)


def _flags(load: Load, machine: Machine, mode: Mode, fast: int, disk: int) -> str:
    return mode.render(placed(load.geometry, fast, (load.dense_bytes + fast) / machine.memory_bytes), disk)


# -- speed


def estimate_of(load: Load, machine: Machine, price: Sequence[Prices], setting: Setting) -> Estimate:
    """Return the expected speed of a setting over all routings, with the prices of each."""
    spent = [_spent(load, of, setting, hits) for of, hits in zip(price, load.hits, strict=True)]
    speeds = tuple(1e9 / parts.total for _, parts in spent)
    across = Range.of(speeds)
    hit, parts = spent[speeds.index(across.middle)]
    hits = sorted(each[0] for each in spent)
    return Estimate(
        setting=setting,
        machine=machine,
        speeds=speeds,
        tokens_per_s=across,
        hit=Range(hits[0], hit, hits[-1]),
        parts=parts,
        peak_fast_bytes=load.fixed_bytes + setting.fast_bytes,
        peak_ram_bytes=setting.ram_bytes + SYSTEM if machine.has_main_memory else 0,
    )


def _spent(load: Load, price: Prices, setting: Setting, hits: Hits) -> tuple[float, Parts]:
    """Return the hit rate of fast memory, and the parts of a token that is kept."""
    mode, share = setting.mode, setting.share
    hit = hits.at(mode.holds, share)
    missing = 1 - share if mode.holds == LAYERS else 1 - max(0.0, hit) ** price.k
    of_pass = token(price, mode, hit, missing, _in_memory(load, setting, hits, hit))
    tokens = load.decoding.tokens
    return hit, of_pass if tokens == 1 else Parts(*(each / tokens for each in of_pass))


def _in_memory(load: Load, setting: Setting, hits: Hits, hit: float) -> float:
    """Return the share of misses that main memory holds, which keeps the experts of the last uses."""
    if not setting.disk_bytes:
        return 1.0
    if hit >= 1 or not setting.ram_bytes:
        return 0.0
    if setting.mode.holds in (LAYERS, STATIC):
        return hits.at(GLOBAL_LRU, setting.ram_bytes / (setting.ram_bytes + setting.disk_bytes))
    held = setting.ram_bytes if setting.mode.copies else setting.ram_bytes + setting.fast_bytes
    return max(0.0, min(1.0, (hits.at(GLOBAL_LRU, held / load.expert_bytes) - hit) / (1 - hit)))


# -- the answer


def _ladder(found: Sequence[Estimate], best: Estimate) -> tuple[Estimate, ...]:
    """Return the steps of the best mode's knob, thinned."""
    mode = best.setting.engine, best.setting.mode
    steps = [each for each in found if (each.setting.engine, each.setting.mode) == mode]
    if len(steps) <= STEPS:
        return tuple(steps)
    places = sorted({round(at * (len(steps) - 1) / (STEPS - 1)) for at in range(STEPS)})
    return tuple(steps[at] for at in places)


def _prefetch_gain(best: Estimate) -> float:
    """Return the largest possible gain from overlapping every transfer with the other parts."""
    parts = best.parts
    moved = parts.link + parts.disk if best.setting.mode.miss == "fetch" else parts.disk
    rest = parts.total - moved
    return parts.total / max(rest, moved) - 1 if moved else 0.0


def _crossings(load: Load, machine: Machine, chosen: Sequence[Engine]) -> Iterator[Crossing]:
    """Yield the schemes that lead as more of the experts fit into fast memory."""
    if not machine.has_main_memory:
        return
    before = None
    for step in range(1, CROSSINGS):
        share = step / CROSSINGS
        size = load.fixed_bytes + int(share * load.expert_bytes)
        found = estimates(load, with_memory(machine, size), chosen)
        if not found:
            continue
        scheme = _fastest([each for each in found if _may_lead(each)] or found).scheme
        if scheme != before:
            yield Crossing(share, int(share * load.expert_bytes), *scheme)
        before = scheme


def _more(load: Load, machine: Machine, chosen: Sequence[Engine], best: Estimate) -> Iterator[More]:
    """Yield what each better part gives, the most first; parts that give nothing are left out."""
    found = []
    for what, upgraded in better(machine, load.expert_bytes):
        better_ones = estimates(load, upgraded, chosen)
        if not better_ones:
            continue
        then = leader(better_ones)
        gain = then.tokens_per_s.middle / best.tokens_per_s.middle - 1
        if gain > WORTH:
            found.append(More(what, then.tokens_per_s.middle, gain, then.setting))
    yield from sorted(found, key=lambda each: -each.gain)


def _warnings(load: Load, machine: Machine, best: Estimate) -> Iterator[str]:
    if not load.dense_bytes:
        yield UNKNOWN_DENSE
    if best.setting.disk_bytes:
        share = best.setting.disk_bytes / load.expert_bytes
        yield f"{share:.0%} of the experts fit in no memory and are read from the disk again and again"
    if machine.kind == "gpu" and room_of(load, machine) < 0:
        lacking = -room_of(load, machine) / GB
        yield (
            f"dense weights, KV cache and runtime need {load.fixed_bytes / GB:.3g} GB, {lacking:.2g} GB more than the "
            f"{machine.platform.fast_tier} has: the GPU is left out here; engines can divide dense layers as well"
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
        f"no setting of {who} fits: {load.fixed_bytes / GB:.4g} GB of dense weights, KV cache and runtime, and "
        f"{load.expert_bytes / GB:.4g} GB of experts, on {memories}; pass more memory, a smaller --runtime, a shorter "
        f"--context{', or another --engine' if only else ' or fewer bits per weight'}"
    )
