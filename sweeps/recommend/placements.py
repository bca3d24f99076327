"""Compare ways to use the same bytes of fast memory and to serve a miss, all at the same costs, which are no engine's.

Engines differ in more than placement, so their settings do not say which way to place suits a machine. Here experts are
placed for good (whole layers, or the most used ones by a list) or cached (the last used ones), and what fast memory
lacks is computed by the CPU, fetched, or divided between both. Main memory and a disk lie below, as the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moereplay.simulator.machine import CARD_SIZES, KIT_SIZES, NO_LIMIT, Machine, with_memory
from moereplay.sweeps.recommend.engines import Engine, Mode, engines
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, LAYERS, STATIC
from moereplay.sweeps.recommend.quick import (
    SYSTEM,
    WORTH,
    Estimate,
    Setting,
    candidates,
    estimate_of,
    estimates,
    leader,
    room_of,
    settings_at,
)
from moereplay.sweeps.recommend.token_time import Load, Prices, prices
from moereplay.traces.geometry import last_layers, mean_experts

LAYER_US = 30  #: submissions and waiting of a layer with a miss, in every scheme: the middle of what engines take
CACHE_US = 14  #: of a cache, in every layer: victims 9 to 11 us, gathering the slots 3.4 us (vLLM's, in a GPU's graph)
SOURCE = "no engine's: one cost for all"


class Scheme(NamedTuple):
    """How fast memory is filled, and how the other experts are handled."""

    holds: str
    miss: str

    @property
    def is_cache(self) -> bool:
        """Return whether what it holds changes while the model runs."""
        return self.holds == GLOBAL_LRU

    @property
    def mode(self) -> Mode:
        """Return the scheme as a mode at the common cost; whole layers leave nothing to overlap inside a layer."""
        whole = self.holds == LAYERS
        return Mode.model_validate(
            {"name": "scheme", "flags": "", "holds": self.holds, "miss": self.miss, "source": SOURCE}
            | {
                "overlap": not whole,
                "layer_us": LAYER_US,
                "step_us": CACHE_US * self.is_cache,
                "copies": self.is_cache,
                "below": "direct",
            }
        )


SCHEMES = (
    Scheme(LAYERS, "cpu"),
    Scheme(STATIC, "cpu"),
    Scheme(STATIC, "fetch"),
    Scheme(STATIC, "split"),
    Scheme(GLOBAL_LRU, "cpu"),
    Scheme(GLOBAL_LRU, "fetch"),
    Scheme(GLOBAL_LRU, "split"),
)


class Choice(NamedTuple):
    """A scheme at some bytes of fast memory, and the engines that have it."""

    scheme: Scheme
    estimate: Estimate
    engines: tuple[str, ...]


class Turn(NamedTuple):
    """From this size of fast memory on, the way that is faster: whole layers of bytes."""

    layers: int
    size: int  #: bytes of experts
    slots: int
    faster: str  #: `cache`, `placed`, or `tie` within WORTH


@dataclass(frozen=True)
class Placements:
    """The answer for one machine and model."""

    size: int  #: bytes of fast memory for experts
    choices: tuple[Choice, ...]  #: the fastest first
    expert_us: dict[str, float]  #: of an expert: computed by the CPU, over the link, from the disk
    turns: tuple[Turn, ...]  #: from one layer on; where all fit, there is nothing to compare


def placements(load: Load, machine: Machine) -> Placements | None:
    """Compare the schemes; None where fast memory lies directly over the disk, or nothing is left of it for experts."""
    if not machine.has_main_memory or machine.platform.cpu is None:
        return None
    size = min(room_of(load, machine), load.expert_bytes)
    found = _at(load, machine, size) if size > 0 else []
    if not found:
        return None
    price = prices(machine, load.geometry, load.context)
    each = {"cpu": price.cpu, "link": price.link, "disk": price.disk}
    return Placements(
        size=size,
        choices=tuple(sorted(found, key=lambda choice: -choice.estimate.tokens_per_s.middle)),
        expert_us={name: of / 1000 for name, of in each.items() if of},
        turns=tuple(_turns(load, machine)),
    )


def _at(load: Load, machine: Machine, size: int) -> list[Choice]:
    """Return every scheme with `size` bytes of experts in fast memory, of which whole layers use what they can."""
    price = load.prices(machine)
    found = (_choice(load, machine, price, scheme, size) for scheme in SCHEMES)
    return [each for each in found if each is not None]


def _choice(load: Load, machine: Machine, price: Sequence[Prices], scheme: Scheme, size: int) -> Choice | None:
    if size < max(load.geometry.expert_bytes) * load.geometry.k and scheme.holds != LAYERS:
        return None
    setting = next(_settings(load, machine, scheme, size), None)
    if setting is None:
        return None
    return Choice(scheme, estimate_of(load, machine, price, setting), _engines(load, scheme))


def _settings(load: Load, machine: Machine, scheme: Scheme, size: int) -> Iterator[Setting]:
    mode = scheme.mode
    none = Engine(name="none", summary="", home="", modes=(mode,))
    layers = last_layers(load.geometry, size) if scheme.holds == LAYERS else 0
    fast = _of_layers(load, layers) if scheme.holds == LAYERS else size
    yield from settings_at(load, machine, none, mode, fast, layers)


def _engines(load: Load, scheme: Scheme) -> tuple[str, ...]:
    """Return the engines that have a scheme; those that cache per layer cache as well."""
    kinds = ("lru", GLOBAL_LRU) if scheme.is_cache else (scheme.holds,)
    return tuple(
        each.name
        for each in engines()
        if each.runs(load.model)
        and any(m.holds in kinds and m.miss == scheme.miss and "gpu" in m.machines for m in each.modes)
    )


def _of_layers(load: Load, layers: int) -> int:
    sizes = load.geometry.expert_bytes
    return load.geometry.experts * sum(sizes[len(sizes) - layers :])


# -- where a cache begins to lose


def _turns(load: Load, machine: Machine) -> Iterator[Turn]:
    """Yield the sizes, by whole layers, at which another way becomes the faster one at the middle routing."""
    before = ""
    for layers in range(1, load.geometry.layers):
        size = _of_layers(load, layers)
        found = _at(load, with_memory(machine, load.fixed_bytes + size), size)
        speeds = {
            cache: [each.estimate.tokens_per_s.middle for each in found if each.scheme.is_cache == cache]
            for cache in (False, True)
        }
        if not all(speeds.values()):
            continue
        gain = max(speeds[True]) / max(speeds[False]) - 1
        faster = "tie" if abs(gain) <= WORTH else "cache" if gain > 0 else "placed"
        if faster != before:
            yield Turn(layers, size, mean_experts(load.geometry, size), faster)
        before = faster


# -- Tokens/s over sizes of fast memory and of main memory, with the rates of one machine


LEAST_RAM = 16  #: GiB of main memory
NEAR = 0.1  #: sizes that differ by less are one


def surface(load: Load, machine: Machine, only: str = "") -> list[dict[str, Any]]:
    """Return tokens/s of the leading engine at each pair of sizes, the machine's own among them; 0 if nothing fits.

    The list is empty for a machine without main memory below its fast memory.
    """
    return list(_points(load, machine, only)) if machine.has_main_memory else []


def _points(load: Load, machine: Machine, only: str) -> Iterator[dict[str, Any]]:
    chosen = candidates(load, only)
    own = [machine.ram_bytes] if machine.ram_bytes < NO_LIMIT else []
    whole = load.fixed_bytes + load.expert_bytes
    cards = _with([machine.memory_bytes], _up_to(whole, [gib << 30 for gib in CARD_SIZES]))
    for ram in _with(own, _up_to(whole + SYSTEM, [gib << 30 for gib in KIT_SIZES if gib >= LEAST_RAM])):
        for vram in cards:
            found = estimates(load, with_memory(machine, vram)._replace(ram_bytes=ram), chosen)
            best = leader(found) if found else None
            yield {
                "vram_bytes": vram,
                "ram_bytes": ram,
                "tokens_per_s": best.tokens_per_s.middle if best else 0.0,
                "engine": best.setting.engine if best else "",
                "here": vram == machine.memory_bytes and ram in own,
            }


def _with(own: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the machine's own size among the others; one that is nearly the same, as 8 GiB and 8 GB, is left out."""
    return sorted({*own, *(size for size in sizes if not any(abs(size / each - 1) < NEAR for each in own))})


def _up_to(whole: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes up to the first that holds the whole model."""
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < whole]
