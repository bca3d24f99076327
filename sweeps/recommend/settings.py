"""Settings of engines as replays: what lies where, and the platform with the prices of the engine on the machine.

An engine's mode (`engines/*.toml`) says how fast memory is filled, how a miss is served and what that costs. Here it
becomes a policy set and a platform: synchronisation of a layer with a miss is `cpu.sync_ns` or the link's `start_ns`,
what every layer costs is `loading.gate_ns`, page faults of a mapped file are a share of the disk's rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice, product
from statistics import fmean
from typing import NamedTuple

import numpy as np

from moereplay.simulator.capacity import pairs_of, parse_capacity
from moereplay.simulator.cards import kept_bytes
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.machine import NO_LIMIT, Machine, with_memory, without_gpu
from moereplay.simulator.platform import Contention, Measured, Platform, Roofline
from moereplay.simulator.platforms import kept
from moereplay.simulator.times import Times, times_of
from moereplay.simulator.wires import LowerTier
from moereplay.sweeps.recommend.engines import LAYERS, PER_LAYER, STAYS, UNIFORM, Card, Engine, Mode, placed
from moereplay.sweeps.recommend.load import KV_FORMATS, Load
from moereplay.sweeps.recommend.space import Experts, filled
from moereplay.traces.geometry import last_layers
from moereplay.traces.schema import Geometry

SYSTEM = int(kept_bytes("system", 0))  #: main memory for the operating system and other programs, assumed
MARGIN = 1 << 30  #: of a card, that engines leave free: llama.cpp's own margin (`--fit-target` 1024 MiB)
#: Rates that are left to CPU and link when both read main memory: 54 of 63.8 and 23.9 of 24.9 GB/s, as measured on a
#: 4090 host by FreeToken (arXiv 2608.16157).
TOGETHER = Contention(cpu=54 / 63.8, link=23.9 / 24.9)
#: Of a disk's rate when pages of a mapped file fault one by one: .56 where whole experts reach 3.9 tokens/s, 8 to 10
#: where they reach 22 to 24 with half of the model in memory (measured by engines' authors, 2026).
MAPPED = 1 / 5
RAM = "RAM"  #: the tier between the fast memory of a GPU and the disk


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting of one mode of an engine on a machine, and what lies where. Sizes in bytes."""

    engine: str
    mode: Mode
    flags: str
    machine: Machine  #: without its GPU, where the mode leaves it out
    fast_bytes: int  #: of experts
    gpu_layers: int  #: whole layers in fast memory, of a placement by layers
    ram_bytes: int  #: of experts, in main memory
    disk_bytes: int  #: of experts that neither holds
    slower: float = 1  #: times the price of a miss on the machine
    uploads: float = 1  #: times the price of the link
    fetched: float | None = None  #: share of the misses that cross the link beside the CPU, where it was measured

    @property
    def what(self) -> tuple[object, ...]:
        """All that its time depends on besides the machine's rates: equal settings of two engines are replayed once."""
        mode, where = self.mode, (self.fast_bytes, self.gpu_layers, self.ram_bytes, self.disk_bytes)
        costs = mode.layer_us, mode.step_us, mode.below, mode.overlap, mode.rows_apart
        return (mode.holds, mode.miss, self.machine.kind, *costs, *where, self.slower, self.uploads, self.fetched)

    @property
    def by_routing(self) -> bool:
        """Whether its speed depends on the routing: whole layers in memory take the same time with every one."""
        return self.mode.holds != LAYERS or self.disk_bytes > 0

    def config(self, load: Load, at: int) -> ReplayConfig:
        """Return the replay of routing `at` of the load."""
        geometry, order, policies = load.geometry, load.orders[at], self.mode.policies
        least = max(geometry.expert_bytes) * (geometry.layers if self.mode.holds in PER_LAYER else 1)
        capacity = f"{max(self.fast_bytes, least)}B"  # a pool has room for an expert, also where none stays there
        if self.mode.holds == LAYERS:
            layers = range(geometry.layers - self.gpu_layers, geometry.layers)
            warm: Experts = tuple(product(layers, range(geometry.experts)))
        else:
            pools = parse_capacity(capacity, geometry, policies["scope"], (geometry.expert_bytes,)).pools
            every = product(range(geometry.layers), range(geometry.experts))
            warm = filled(tuple(every) if self.mode.holds == UNIFORM else order, pools, geometry.expert_bytes, 0)
        if self.fetched is not None:
            policies["miss"] = f"split:q={self.fetched}"
        config = configure(
            **policies,
            capacity=capacity,
            passes=load.decoding.passes,
            draft=load.decoding.drafts.text,
            platform=kept(self.platform(load)),
        )
        profile = (warm or order[:1]) if policies["eviction"] == STAYS else ()
        return config.model_copy(update={"warm": (*warm, *self._below(load, warm, order)), "profile": profile})

    def _below(self, load: Load, warm: Experts, order: Experts) -> Experts:
        """Return the experts that main memory holds at the start, where it cannot hold all: the most used others."""
        if not self.disk_bytes or not self.machine.has_main_memory:
            return ()
        others = np.ones((load.geometry.layers, load.geometry.experts), bool)
        others[tuple(pairs_of(warm).T)] = False
        left = compress(order, others[tuple(pairs_of(order).T)].tolist())
        return filled(tuple(left), (self.ram_bytes,), load.geometry.expert_bytes, 1)

    def platform(self, load: Load) -> Platform:
        """Return the machine with the prices of this setting."""
        base, mode = self.machine.platform, self.mode
        times = times_of(base.without_tiers(), load.geometry, (load.geometry.expert_bytes,))
        loading = base.loading.model_copy(update={"gate_ns": base.loading.gate_ns + self._layer_ns(load, times)})
        compute = base.compute.model_copy(update={"kv_bytes_per_s": None})
        change: dict[str, object] = {"compute": compute, "loading": loading, "calibration": None, "tried": None}
        change |= {"memory_bytes": None, "reserve_bytes": None}  # the sums of memory are those of the answer
        if load.decoding.drafts_by_layer and not base.draft.ns_per_token:
            change["draft"] = base.draft.model_copy(
                update={"ns_per_token": draft_ns(load.geometry, times, load.decoding.streams, load.context)}
            )
        sync = round(1_000 * mode.layer_us)
        if not self.machine.has_main_memory:
            link = base.links[0].model_copy(update={"bytes_per_s": self.read_bytes_per_s})
            overlap = "arrival" if mode.overlap else "none"
            return base.model_copy(update=change | {"links": (link,), "overlap": overlap})
        starts, dearer = sync if mode.miss != "cpu" else 0, self.slower * self.uploads
        links = tuple(
            link.model_copy(update={"start_ns": link.start_ns or starts, "bytes_per_s": link.bytes_per_s / dearer})
            for link in base.links
        )
        tiers = self._tiers(base, max(load.geometry.expert_bytes)) if self.disk_bytes else ()
        cpu = base.cpu and slowed(base.cpu, self.slower).model_copy(
            update={
                "tier": tiers[0].name if tiers else "",
                "sync_ns": base.cpu.sync_ns or sync,
                "rows_apart": base.cpu.rows_apart or mode.rows_apart,
            }
        )
        contention = base.contention or TOGETHER
        return base.model_copy(
            update=change | {"links": links, "tiers": tiers, "cpu": cpu, "contention": contention, "slow_tier": RAM}
        )

    @property
    def read_bytes_per_s(self) -> float:
        """Rate at which the setting reads the disk: that of pages which fault, if it maps the file."""
        rate = self.machine.disk_bytes_per_s or self.machine.platform.links[0].bytes_per_s
        return rate * (MAPPED if self.mode.below == "mmap" else 1.0) / self.slower

    def _tiers(self, base: Platform, least: int) -> tuple[LowerTier, ...]:
        """Return main memory over the disk, with room for an expert on its way."""
        reads = self.read_bytes_per_s
        size = f"{max(least, self.ram_bytes)}B"
        if base.tiers:
            return (base.tiers[0].model_copy(update={"capacity": size, "bytes_per_s": reads}),)
        return (LowerTier(name=RAM, capacity=size, bytes_per_s=reads, latency_ns=self.machine.disk_latency_ns),)

    def _layer_ns(self, load: Load, times: Times) -> int:
        """Return what every layer takes besides its weights and launches: the engine's own work, and the KV cache."""
        cached = load.decoding.streams * times.kv_ns(load.context) * load.kv_share
        return round(cached + 1_000 * self.mode.step_us)


def slowed(cpu: Roofline | Measured, factor: float) -> Roofline | Measured:
    """Return the CPU whose experts take `factor` times as long."""
    if isinstance(cpu, Measured) or factor == 1:
        return cpu
    formats = {name: rate / factor for name, rate in cpu.formats.items()}
    each = cpu.expert_bytes_per_s and cpu.expert_bytes_per_s / factor
    rates = {"flops": cpu.flops / factor, "memory_bytes_per_s": cpu.memory_bytes_per_s / factor}
    more = {"launch_ns": round(cpu.launch_ns * factor), "formats": formats, "expert_bytes_per_s": each}
    return cpu.model_copy(update=rates | more)


def draft_ns(geometry: Geometry, times: Times, streams: int, context: int) -> int:
    """Return the nanoseconds of a draft of one stream: one layer with its experts in fast memory, and the output head.

    The streams draft together. No two of them are taken to share an expert.
    """
    last = geometry.layers - 1
    experts = min(streams * geometry.k, geometry.experts) * times.expert_ns(last, 0, 1)
    layer = times.dense_ns(last, streams) + streams * times.kv_ns(context) + experts
    return round((times.pass_ns(streams) + layer) / streams)


# -- which settings there are

STEPS = 12  #: of a ladder, at most


def settings(load: Load, machine: Machine, engine: Engine, ladder: bool = False) -> Iterator[Setting]:
    """Yield the settings of an engine that fit, with the most experts in fast memory, and with `ladder` fewer."""
    machine = one_card(machine) if engine.cards == "one" else machine
    for mode in engine.modes:
        if mode.least_rows <= load.decoding.rows <= mode.most_rows:
            for where in machines_of(machine, mode):
                yield from islice(settings_of(load, where, engine, mode), STEPS if ladder else 1)


def one_card(machine: Machine) -> Machine:
    """Return the machine with the first of its cards alone."""
    return (
        with_memory(machine, machine.memory_bytes / machine.count)._replace(count=1) if machine.count > 1 else machine
    )


def machines_of(machine: Machine, mode: Mode) -> Iterator[Machine]:
    """Yield the machine if the mode is for its kind; a machine with a GPU is one without it as well."""
    if machine.kind in mode.machines:
        yield machine
    elif machine.kind == "gpu" and "cpu" in mode.machines and machine.platform.cpu is not None:
        yield without_gpu(machine)


def settings_of(load: Load, machine: Machine, engine: Engine, mode: Mode) -> Iterator[Setting]:
    """Yield the settings of a mode that fit, at most STEPS, those with the most experts in fast memory first."""
    room, geometry = room_of(load, machine, engine), load.geometry
    if room < 0 or (mode.miss != "fetch" and machine.platform.cpu is None):
        return
    if mode.holds == LAYERS:
        fits = last_layers(geometry, room)
        for layers in _thinned(range(fits, -1, -1)):
            yield from setting_at(load, machine, engine, mode, of_layers(load, layers), layers)
        return
    least = max(geometry.expert_bytes) * (geometry.layers if mode.holds in PER_LAYER else geometry.k)
    sizes = [room * part // STEPS for part in range(STEPS, 0, -1)] if mode.knobs else [room]
    for size in sizes:
        fast = min(load.expert_bytes, size)
        if fast >= least and (fast < load.expert_bytes or size == room):
            yield from setting_at(load, machine, engine, mode, fast, 0)


def _thinned(steps: Sequence[int]) -> list[int]:
    """Return at most STEPS of them, the first and the last included."""
    if len(steps) <= STEPS:
        return list(steps)
    return [steps[at] for at in sorted({round(place * (len(steps) - 1) / (STEPS - 1)) for place in range(STEPS)})]


def of_layers(load: Load, layers: int) -> int:
    """Return the bytes of all experts of the last layers."""
    sizes = load.geometry.expert_bytes
    return load.geometry.experts * sum(sizes[len(sizes) - layers :])


def setting_at(load: Load, machine: Machine, engine: Engine, mode: Mode, fast: int, layers: int) -> Iterator[Setting]:
    """Yield the setting with the given bytes of experts in fast memory, if the rest fits elsewhere."""
    everything = load.expert_bytes
    below = everything if mode.copies and fast < everything else everything - fast
    room = max(0, machine.ram_bytes - sum(_beside(load, engine).values())) if machine.has_main_memory else 0
    ram = min(below, room)
    disk = below - ram
    if disk and (mode.below == "none" or machine.disk_bytes_per_s is None):
        return
    first = load.known.dense_layers if load.known else 0
    where = placed(load.geometry, fast, (load.dense_bytes + fast) / machine.memory_bytes, first)
    where = where._replace(
        cards=_cards(machine, load.geometry.layers + first, where.gpu_layers),
        context=load.context,
        kv_type="" if load.kv_bits == 16 else KV_FORMATS[load.kv_bits][0],
    )
    yield Setting(engine.name, mode, mode.render(where, disk), machine, fast, layers, ram, disk)


def _cards(machine: Machine, layers: int, gpu_layers: int) -> tuple[Card, ...]:
    """Return how several cards divide the layers, and those whose experts lie on a card, evenly."""
    if machine.count < 2:
        return ()
    ends = [[many * at // machine.count for at in range(machine.count + 1)] for many in (layers, gpu_layers)]
    return tuple(
        Card(*(last - first for first, last in (end[at : at + 2] for end in ends))) for at in range(machine.count)
    )


# -- memory


class Sum(NamedTuple):
    """Bytes of a memory by what takes them, and its size."""

    parts: dict[str, int]
    size: int

    @property
    def total(self) -> int:
        """Bytes that are taken."""
        return sum(self.parts.values())

    @property
    def is_known(self) -> bool:
        """Whether its size was given."""
        return self.size < NO_LIMIT


def room_of(load: Load, machine: Machine, engine: Engine) -> int:
    """Return the bytes of fast memory that are left for experts; negative if the rest does not fit.

    On every card an engine keeps its margin free, but for a model that fits whole.
    """
    room = machine.memory_bytes - sum(_fixed(load, machine, engine).values()) - kept_back(machine)
    return room if room >= load.expert_bytes else room - _margin(machine)


def kept_back(machine: Machine) -> int:
    """Return the bytes of fast memory that others keep."""
    stated = machine.platform.reserve_bytes
    return int(stated) if stated is not None else 0 if machine.kind == "gpu" else SYSTEM


def _margin(machine: Machine) -> int:
    return MARGIN * machine.count if machine.kind == "gpu" else 0


def _fixed(load: Load, machine: Machine, engine: Engine) -> dict[str, int]:
    """Return the bytes of fast memory that are not for experts."""
    return load.fixed(machine.count, engine.prompt_bytes, engine.table_below and machine.has_main_memory)


def _beside(load: Load, engine: Engine) -> dict[str, int]:
    """Return the bytes of main memory that are not for experts."""
    return {"embedding table": load.table_bytes * engine.table_below, "the system": SYSTEM}


def memory_of(load: Load, setting: Setting, engine: Engine) -> list[Sum]:
    """Return what lies in fast memory, and in main memory below it."""
    machine = setting.machine
    parts = _fixed(load, machine, engine)
    free = kept_back(machine) + _margin(machine) * (setting.fast_bytes < load.expert_bytes)
    parts |= {"experts": setting.fast_bytes, "kept free": free}
    fast = Sum({name: size for name, size in parts.items() if size}, machine.memory_bytes)
    if not machine.has_main_memory:
        return [fast]
    below = {"experts": setting.ram_bytes} | _beside(load, engine)
    return [fast, Sum({name: size for name, size in below.items() if size}, machine.ram_bytes)]


def expert_us(load: Load, setting: Setting) -> dict[str, float]:
    """Return the microseconds of an expert of mean size on the CPU, over the link and from the disk, as there are."""
    machine = setting.machine
    times = times_of(setting.platform(load).without_tiers(), load.geometry, (load.geometry.expert_bytes,))
    costs = {"cpu": float(times.costs.cpu), "link": float(times.costs.load) if machine.has_main_memory else 0.0}
    costs["disk"] = fmean(load.geometry.expert_bytes) / setting.read_bytes_per_s * 1e9 if setting.disk_bytes else 0.0
    return {name: ns / 1000 for name, ns in costs.items() if ns}
