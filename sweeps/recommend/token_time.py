"""A load, and the time of one of its decode passes in closed form: on fast memory, main memory and a disk.

A replay plays every transfer; this adds up expected times, in microseconds of computing instead of seconds, so that
every setting of every engine can be tried. Costs are those of a replay on the same platform (`simulator/times.py`).

Per layer: dense weights, then the experts that are in fast memory, then those that are not, by the mode's `miss`:

    cpu     the CPU computes them; beside the fast processor's experts if the mode overlaps them, else after them. A
            cache of the last used fetches them for later meanwhile: the link takes its share of main memory's rate
    fetch   they cross the link, and are computed; transfers overlap with compute of the experts that are there
    split   the link and the CPU divide them so that both end together

An expert that main memory does not hold is read from the disk before that; when it is fetched, link and disk work at
the same time.

A pass of one row is a token. One of several rows (streams together, drafts) demands the union of its rows' experts
once, each with as many rows as chose it; an engine may compute it again for each of them (`rows_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from moereplay.simulator.calibration import WORK, Part
from moereplay.simulator.machine import Machine
from moereplay.simulator.platform import Measured, Platform, Roofline
from moereplay.simulator.rates import NS
from moereplay.simulator.times import Times, times_of
from moereplay.sweeps.recommend.engines import Mode
from moereplay.sweeps.recommend.hits import PLAIN, Decoding, Hits, Work
from moereplay.traces.dense import dense_of
from moereplay.traces.schema import Geometry

#: Rates that are left to CPU and link when both read main memory: 54 of 63.8 and 23.9 of 24.9 GB/s, as measured on a
#: 4090 host by FreeToken (arXiv 2608.16157).
CPU_LEFT, LINK_LEFT = 54 / 63.8, 23.9 / 24.9
#: Of a disk's rate when pages of a mapped file fault one by one: .56 where whole experts reach 3.9 tokens/s, 8 to 10
#: where they reach 22 to 24 with half of the model in memory (measured by engines' authors, 2026).
MAPPED = 1 / 5


#: A GPU runs about 30 kernels per layer of one decoded token (norms, projections, positions, cache, attention, router,
#: experts, shared expert, sums; a count of ours), and a launch takes about 3.5 us (engines' authors, 2026). Published
#: runs of resident models, by llama.cpp, SGLang and vLLM, need 100 to 170 us per layer beyond their bytes.
KERNELS, KERNEL_NS = 30, 3_500
UNKNOWN_DENSE = (
    "the bytes of dense weights are unknown: they take no memory here, and no time unless the platform states it; "
    "pass --dense"
)


class Parts(NamedTuple):
    """Nanoseconds of a pass that each part is waited for; hidden work does not count."""

    compute: float  #: of the fast processor
    cpu: float
    link: float
    disk: float
    sync: float

    @property
    def total(self) -> float:
        """The pass's time."""
        return sum(self)


def waited(platform: Platform, spent: Iterable[Parts]) -> tuple[Part, ...]:
    """Return the parts of a platform that passes wait for. Without a lower tier, the disk is behind the link."""
    names = {name for each in spent for name in ("cpu", "link", "disk") if getattr(each, name)}
    if "disk" in names:
        names.add("tiers" if platform.tiers else "link")
    return tuple(part for part in WORK if part in names)


@dataclass(frozen=True)
class Prices:
    """Nanoseconds of one pass's parts on one machine; experts are of mean size, with as many rows as choose one."""

    layers: int
    k: float  #: distinct experts of a layer
    dense: float  #: all layers, head, KV cache and drafts
    expert: float
    cpu: float | None  #: an expert on the CPU, None without one
    link: float | None  #: an expert over the link from main memory, None if there is no such link
    latency: float  #: of the link
    disk: float | None  #: an expert from the disk, whole, None without a disk
    disk_latency: float
    launches: float = 0  #: of a GPU's kernels, in all layers
    expert_apart: float | None = None  #: an expert that a CPU computes anew for each row, as the fast processor
    cpu_apart: float | None = None  #: and beside a GPU

    @property
    def demanded(self) -> float:
        """Experts of a pass."""
        return self.layers * self.k

    def of(self, mode: Mode) -> Prices:
        """Return the prices of a mode, which may compute an expert of the CPU anew for each row."""
        if not mode.rows_apart:
            return self
        return replace(self, expert=self.expert_apart or self.expert, cpu=self.cpu_apart or self.cpu)


def prices(
    machine: Machine, geometry: Geometry, context: int, decoding: Decoding = PLAIN, work: Work | None = None
) -> Prices:
    """Return the prices of a model with `context` positions in the KV cache of each stream.

    `work` is what a pass of several rows demands of a layer.
    """
    of = work or Work(geometry.k)
    platform = machine.platform.model_copy(update={"tiers": ()})
    times = times_of(platform, geometry, (geometry.expert_bytes,))
    layers = range(geometry.layers)
    wire = fmean(times.wire_ns[0][layer][0] + times.load_ns[layer][0] for layer in layers)
    size = sum(geometry.expert_bytes) / geometry.layers
    rate = machine.disk_bytes_per_s
    split = machine.has_main_memory

    def each(ns: Callable[[int, int, int], int]) -> float:
        return fmean(sum(share * ns(layer, 0, rows) for rows, share in of.rows) for layer in layers)

    def apart(ns: Callable[[int, int, int], int]) -> float:
        return fmean(ns(layer, 0, 1) for layer in layers) * sum(share * rows for rows, share in of.rows)

    alone = machine.kind == "cpu"
    anew = alone and platform.compute.rows_apart
    return Prices(
        layers=geometry.layers,
        k=of.union,
        dense=_dense(times, geometry, context, decoding) + _drafts(times, platform, geometry, context, decoding),
        expert=apart(times.expert_ns) if anew else each(times.expert_ns),
        cpu=each(times.cpu_ns) if platform.cpu else None,
        link=wire if split else None,
        latency=times.latency_ns[0] if split else 0,
        disk=size / rate * NS if rate else None,
        disk_latency=machine.disk_latency_ns,
        launches=_launches(machine, geometry, decoding),
        expert_apart=apart(times.expert_ns) if alone else None,
        cpu_apart=apart(times.cpu_ns) if platform.cpu else None,
    )


def _launches(machine: Machine, geometry: Geometry, decoding: Decoding) -> float:
    """Return the nanoseconds of launches where the platform's own times do not include them."""
    roofline = isinstance(machine.platform.compute, Roofline)
    estimated = roofline and machine.platform.calibrated is None
    layers = geometry.layers + (decoding.drafts.many if _has_head(machine.platform, decoding) else 0)
    return layers * KERNELS * KERNEL_NS if estimated and machine.kind != "cpu" else 0.0


def _dense(times: Times, geometry: Geometry, context: int, decoding: Decoding) -> float:
    layers, rows = range(geometry.layers), decoding.rows
    cached = decoding.streams * times.kv_ns(context)
    return times.pass_ns(rows) + sum(times.dense_ns(layer, rows) + cached for layer in layers)


def _has_head(platform: Platform, decoding: Decoding) -> bool:
    """Return whether drafts take the time of a further layer: where they have one, and no platform states theirs."""
    return decoding.head and decoding.drafts.many > 0 and not platform.draft.ns_per_token


def _drafts(times: Times, platform: Platform, geometry: Geometry, context: int, decoding: Decoding) -> float:
    """Return the nanoseconds of a pass's drafts: as the platform states, or one layer and the output head for each.

    The streams draft together. The layer's experts are resident, and no two streams are taken to share one.
    """
    many, streams = decoding.drafts.many, decoding.streams
    if not _has_head(platform, decoding):
        return times.draft_ns(many * streams)
    last = geometry.layers - 1
    experts = min(streams * geometry.k, geometry.experts) * times.expert_ns(last, 0, 1)
    layer = times.dense_ns(last, streams) + streams * times.kv_ns(context) + experts
    return many * (times.pass_ns(streams) + layer)


def token(price: Prices, mode: Mode, hit: float, missing: float, in_memory: float) -> Parts:
    """Return the time of a pass; launches count as synchronisation.

    `hit` is the share of its experts in fast memory, `missing` the share of layers with an expert that is not, and
    `in_memory` the share of those experts that main memory holds.
    """
    parts = _experts(price.of(mode), mode, hit, missing, in_memory)
    return parts._replace(sync=parts.sync + price.launches)


def _experts(price: Prices, mode: Mode, hit: float, missing: float, in_memory: float) -> Parts:
    hits = price.demanded * hit * price.expert
    misses = price.demanded * (1 - hit)
    steps = price.layers * missing
    sync = (steps * mode.layer_us + price.layers * mode.step_us) * 1000
    disk = _disk(price, mode, misses * (1 - in_memory), steps * (in_memory < 1))
    if not misses:
        return Parts(price.dense + hits, 0, 0, 0, 0)
    if price.link is None:  # one memory over a disk
        return _from_disk(price, mode, hits + misses * price.expert, disk, sync)
    if mode.miss == "cpu":
        assert price.cpu is not None
        work = misses * price.cpu
        if mode.holds.startswith("lru"):  # and the cache fetches them for later
            work = _while_uploading(work, misses * price.link + steps * price.latency)
        return _beside(price, mode, hits, Parts(0, work, 0, disk, sync))
    wire = misses * price.link + steps * price.latency
    if mode.miss == "split" and price.cpu is not None:
        both = misses / (CPU_LEFT / price.cpu + LINK_LEFT / price.link)
        return _beside(price, mode, hits, Parts(0, both / 2, both / 2, disk, sync))
    moved = max(0.0, wire - hits) if disk < wire else 0.0
    read = max(0.0, disk - hits) if disk >= wire else 0.0
    return Parts(price.dense + hits + misses * price.expert, 0, moved, read, sync)


def _while_uploading(work: float, wire: float) -> float:
    """Return the CPU's nanoseconds if `wire` of the link's are spent meanwhile, which reads the same main memory."""
    return work / CPU_LEFT if wire >= work / CPU_LEFT else work + (1 - CPU_LEFT) * wire


def _beside(price: Prices, mode: Mode, hits: float, others: Parts) -> Parts:
    """Return the parts; with overlap the longer of `hits`, of the fast processor, and the others hides the shorter."""
    work = others.cpu + others.link
    if not mode.overlap:
        return others._replace(compute=price.dense + hits)
    if work >= hits:
        return others._replace(compute=price.dense)
    return others._replace(compute=price.dense + hits, cpu=0.0, link=0.0)


def _from_disk(price: Prices, mode: Mode, computed: float, disk: float, sync: float) -> Parts:
    hidden = min(computed, disk) if mode.overlap else 0.0
    return Parts(price.dense + computed, 0, 0, disk - hidden, sync)


def _disk(price: Prices, mode: Mode, read: float, steps: float) -> float:
    """Return the nanoseconds of reading a number of experts in a number of layers."""
    if read <= 0 or price.disk is None:
        return 0.0
    each = price.disk / (MAPPED if mode.below == "mmap" else 1)
    return read * each + min(steps, read) * price.disk_latency


def bound_by(machine: Machine, geometry: Geometry, parts: Parts) -> str:
    """Return the resource of the largest part: memory or link rates, processors, the disk, or launches."""
    largest = max(parts._fields, key=lambda name: getattr(parts, name))
    if largest == "cpu":
        return "CPU cores" if _computes(machine.platform.cpu, geometry) else "RAM bandwidth"
    if largest == "compute":
        processor = "compute of the GPU" if machine.has_main_memory else "compute"
        rate = "VRAM bandwidth" if machine.has_main_memory else "memory bandwidth"
        return processor if _computes(machine.platform.compute, geometry) else rate
    return {"link": "link between RAM and VRAM", "disk": "disk reads", "sync": "kernel launches and synchronisation"}[
        largest
    ]


def _computes(processor: Roofline | Measured | None, geometry: Geometry) -> bool:
    """Return whether a token's expert takes longer to compute than to read."""
    if not isinstance(processor, Roofline):
        return False
    size = sum(geometry.expert_bytes) / geometry.layers
    params = geometry.expert_params or size * 8 / geometry.expert_bits
    return 2 * params / processor.flops > size / processor.expert_rate(geometry.weight_format)


# -- What a machine has to run: a model as stored, its context, and how it decodes, under one routing or several


@dataclass(frozen=True)
class Load:
    """A model as stored, its context, and the expected hits of one routing or several."""

    geometry: Geometry
    context: int
    runtime_bytes: int
    hits: tuple[Hits, ...]
    model: str = ""  #: its name, "" if engines are not asked whether they run it
    decoding: Decoding = PLAIN  #: which the hits are of

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.geometry.experts * sum(self.geometry.expert_bytes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense weights in memory; 0 if they are unknown."""
        return dense_of(self.geometry).resident

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV caches of all streams."""
        return self.decoding.streams * self.geometry.kv_held(self.context)

    @property
    def head_bytes(self) -> int:
        """Bytes of a layer that drafts, with its experts; 0 without one."""
        if not (self.decoding.head and self.decoding.drafts.many):
            return 0
        return self.geometry.experts * self.geometry.expert_bytes[-1] + dense_of(self.geometry).layers[-1]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of fast memory that are not for experts."""
        return self.dense_bytes + self.kv_bytes + self.runtime_bytes + self.head_bytes

    def prices(self, machine: Machine) -> tuple[Prices, ...]:
        """Return the prices of a pass on a machine, for each routing."""
        known: dict[Work | None, Prices] = {}
        for each in self.hits:
            if each.work not in known:
                known[each.work] = prices(machine, self.geometry, self.context, self.decoding, each.work)
        return tuple(known[each.work] for each in self.hits)
