"""A whole machine: fast memory, main memory and disk, from a card's name, sizes and rates, or from a platform."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moereplay.simulator.capacity import memory_of, parse_size, with_unit
from moereplay.simulator.cards import GIB, LANE, Card, card, cards, link_rate
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Measured, Platform, Roofline
from moereplay.simulator.rates import MOST_RATE, Loading
from moereplay.simulator.wires import Link, LowerTier
from moereplay.traces.schema import shown
from moereplay.traces.texts import sold
from moereplay.traces.units import GB

UNIFIED = "unified memory"
#: Rates that are assumed if none is given: a desktop's two channels of DDR5, of which a CPU's kernels reached
#: 63.8 GB/s (FreeToken, arXiv 2608.16157), and an NVMe drive on PCIe 3.
RAM_BYTES_PER_S, DISK_BYTES_PER_S = 60e9, 3.5e9
CHANNELS = 2  #: of a desktop's RAM
NOMINAL = 0.7  #: of a nominal rate of RAM that CPU kernels reach
CORES = 8
FLOPS_PER_CORE = 125e9  #: of a CPU's core: 16-bit weights, two 256-bit multiply-adds a cycle at 4 GHz
READ_NS = 80_000  #: before a disk's first byte, NVMe class
LAUNCH_NS, CPU_LAUNCH_NS, COPY_NS = 1_000, 1_000, 10_000  #: per expert of one grouped kernel, and of a copy
NO_LIMIT = 1 << 50
DESKTOP = re.compile(r"(RTX [2-9]0[5-9]0|RX [6-9]\d00)( (Ti|Super|XT|XTX|GRE|Ti Super|\d+GB|Ti \d+GB))?")


class Machine(NamedTuple):
    """A platform, and what lies below its fast memory."""

    platform: Platform
    ram_bytes: int  #: main memory below fast memory, 0 if there is none
    disk_bytes_per_s: float | None
    disk_latency_ns: int = READ_NS
    assumed: tuple[str, ...] = ()  #: figures that were assumed, and the options that give them

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fast memory. Raises ConfigError if the platform does not state them."""
        if self.platform.memory_bytes is None:
            raise ConfigError(f"missing size of the {self.platform.fast_tier}: pass --vram 24GB, or --memory 4GB")
        return int(self.platform.memory_bytes)

    @property
    def has_main_memory(self) -> bool:
        """True if main memory is the tier below fast memory; else it is the disk."""
        return self.ram_bytes > 0

    @property
    def kind(self) -> str:
        """`gpu` (with its own memory), `unified`, or `cpu`."""
        if self.has_main_memory:
            return "gpu"
        return "unified" if self.platform.fast_tier == UNIFIED else "cpu"

    @property
    def replayable(self) -> Platform:
        """The platform for replays whose experts all lie in main memory, where the CPU may compute them."""
        return self.platform.without_tiers() if self.has_main_memory else self.platform

    def lines(self) -> list[tuple[str, str]]:
        """Return headings with the figures, for people."""
        of, platform = self.platform.compute, self.platform
        lines = [(platform.fast_tier, f"{sold(platform.memory_bytes or 0)}{_rates(of)}")]
        if self.has_main_memory:
            cpu = _rates(platform.cpu) if platform.cpu else ""
            size = sold(self.ram_bytes) if self.ram_bytes < NO_LIMIT else "any size"
            lines += [("link", f"{platform.links[0].bytes_per_s / GB:.4g} GB/s"), ("RAM", size + cpu)]
        if self.disk_bytes_per_s:
            lines.append(("disk", f"{self.disk_bytes_per_s / GB:.4g} GB/s"))
        return [(platform.name, platform.summary), *lines]


def _rates(of: Roofline | Measured) -> str:
    """Return the ceilings of a processor in words."""
    if isinstance(of, Measured):
        return ", compute as measured"
    return f" at {of.memory_bytes_per_s / GB:.4g} GB/s, {of.flops / 1e12:.3g} TFLOP/s"


def in_memory(made: Machine) -> Machine:
    """Return a machine with a GPU whose RAM holds every expert, without a disk. Raises ConfigError for any other."""
    if not made.has_main_memory:
        raise ConfigError("--disk none requires a GPU with its own memory: here experts are read only from the disk")
    return without_disk(made)


def without_disk(made: Machine) -> Machine:
    """Return the machine whose lowest memory must hold every expert."""
    assumed = tuple(each for each in made.assumed if not each.endswith("(--disk)"))
    platform = made.replayable.model_copy(update={"slow_tier": "RAM"} if made.has_main_memory else {})
    return made._replace(platform=platform, disk_bytes_per_s=None, assumed=assumed)


def without_gpu(machine: Machine) -> Machine:
    """Return the machine with its CPU alone."""
    platform, cpu = machine.platform, machine.platform.cpu
    assert cpu is not None
    cpu = cpu.model_copy(update={"tier": "", "sync_ns": 0})
    if isinstance(cpu, Roofline):
        cpu = cpu.model_copy(update={"kv_bytes_per_s": cpu.memory_bytes_per_s})
    alone = platform.model_copy(
        update={"compute": cpu, "cpu": None, "tiers": (), "fast_tier": "RAM", "memory_bytes": float(machine.ram_bytes)}
        | {"loading": Loading()}
    )
    return machine._replace(platform=alone, ram_bytes=0)


def rate_of(text: str, option: str, forms: str = "") -> float:
    """Return the bytes/s of `3.5GB/s` or `1GiB/s`. Raises ConfigError naming the option."""
    size = parse_size(text.strip().removesuffix("/s"))
    if not size or not text.strip().endswith("/s") or not 1 <= size <= MOST_RATE:
        expected = forms or with_unit("rate", text, "3.5", "GB/s")
        raise ConfigError(f"invalid --{option} {shown(text)!r}: expected {expected}")
    return float(size)


def ram_rate_of(text: str) -> float:
    """Return the bytes/s at which a CPU reads RAM, from a rate or from modules such as `8xDDR5-4800`.

    A channel has eight bytes, of which a CPU reads a share. Raises ConfigError.
    """
    modules = re.fullmatch(r"(?:([1-9]\d?)\s*x\s*)?(?:LP)?DDR[345]X?[- ](\d{3,5})", text.strip(), re.IGNORECASE)
    if modules is None or not 400 <= int(modules[2]) <= 20_000:
        return rate_of(text, "ram-rate", f"{with_unit('rate', text, '60', 'GB/s')}, or modules such as DDR4-3600")
    return int(modules[1] or CHANNELS) * 8e6 * int(modules[2]) * NOMINAL


def of_platform(platform: Platform, memory: str = "", ram: str = "", disk: str = "") -> Machine:
    """Return the machine of a platform; `memory` and `ram` are sizes, `disk` a rate. Raises ConfigError."""
    if memory:
        platform = platform.model_copy(update={"memory_bytes": float(memory_of(memory, "memory"))})
    if platform.tiers:
        lowest = platform.tiers[-1]
        size = memory_of(ram, "ram") if ram else int(parse_size(platform.tiers[0].capacity) or NO_LIMIT)
        said = () if ram or size == NO_LIMIT else (f"{sold(size)} of RAM, as {platform.name} leaves it (--ram)",)
        reads = rate_of(disk, "disk") if disk else lowest.bytes_per_s
        return Machine(platform, size, reads, lowest.latency_ns, said)
    if platform.cpu is None and platform.slow_tier != "DRAM":
        if ram and not memory:
            platform = platform.model_copy(update={"memory_bytes": float(memory_of(ram, "ram"))})
        link = platform.links[0]
        return Machine(platform, 0, rate_of(disk, "disk") if disk else link.bytes_per_s, link.latency_ns)
    return Machine(platform, memory_of(ram, "ram") if ram else NO_LIMIT, rate_of(disk, "disk") if disk else None)


def assembled(
    *, gpu: str = "", vram: str = "", ram: str = "", ram_rate: str = "", disk: str = "", cores: str = "", link: str = ""
) -> Machine:
    """Return a machine from the parts that its owner names; other values are assumed and listed. Raises ConfigError."""
    assumed: list[str] = []
    found = _card(gpu, vram, assumed)
    if link and (found is None or found.is_unified):
        raise ConfigError("--link requires a GPU with its own memory: pass --gpu or --vram")
    memory = _size(ram, found, assumed)
    reads = rate_of(disk, "disk") if disk else DISK_BYTES_PER_S
    if not disk:
        assumed.append(f"disk reads {reads / GB:g} GB/s (--disk)")
    if found is not None and found.is_unified:
        return Machine(_unified(found, memory, reads), 0, reads, READ_NS, tuple(assumed))
    rate = ram_rate_of(ram_rate) if ram_rate else RAM_BYTES_PER_S
    if not ram_rate.strip().endswith("/s"):
        of = f", {NOMINAL:.0%} of {ram_rate} in {CHANNELS} channels unless it names others" if ram_rate else ""
        assumed.append(f"the CPU reads RAM at {rate / GB:.3g} GB/s{of} (--ram-rate)")
    cpu = Roofline(flops=_cores(cores) * FLOPS_PER_CORE, memory_bytes_per_s=rate, launch_ns=CPU_LAUNCH_NS)
    if found is None:
        cpu = cpu.model_copy(update={"kv_bytes_per_s": rate})
        return Machine(_without_gpu(cpu, memory, reads), 0, reads, READ_NS, tuple(assumed))
    wire = _link(link, found)
    size = memory_of(vram, "vram") if vram else found.vram_bytes
    platform = _with_gpu(found, size, wire, cpu, (memory, reads))
    if not gpu:
        platform = platform.model_copy(update={"name": f"a card of {sold(size)}"})
    return Machine(platform, memory, reads, READ_NS, tuple(assumed))


def _card(gpu: str, vram: str, assumed: list[str]) -> Card | None:
    """Return the card of a name; for a size alone, the one of the median rate among desktop cards of about it."""
    if gpu.strip().lower() == "none" or not (gpu or vram):
        if vram:
            raise ConfigError("--gpu none cannot be combined with --vram")
        return None
    if gpu:
        found = card(gpu)
        if found.is_unified and vram:
            raise ConfigError(f"the {found.name} has no memory of its own: pass --ram instead of --vram")
        return found
    size = memory_of(vram, "vram")
    own = [each for each in cards().values() if not each.is_unified]
    desktop = [each for each in own if DESKTOP.fullmatch(each.name) and abs(each.vram_bytes - size) < 0.1 * size]
    own = desktop or own
    nearest = min(abs(each.vram_bytes - size) for each in own)
    like = [each for each in own if abs(each.vram_bytes - size) <= nearest + 0.02 * size]
    middle = statistics.median_low(each.gb_per_s for each in like)
    found = next(each for each in like if each.gb_per_s == middle)
    assumed.append(f"a card like the {found.name}: {found.gb_per_s:g} GB/s, PCIe {found.pcie} (--gpu)")
    return found


def _size(ram: str, found: Card | None, assumed: list[str]) -> int:
    if ram:
        return memory_of(ram, "ram")
    if found is None or found.is_unified:
        raise ConfigError("missing size of the memory: pass --ram 64GB")
    assumed.append("64 GB of RAM (--ram)")
    return 64 * GIB


def _cores(text: str) -> int:
    if not text:
        return CORES
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ConfigError(f"invalid --cores {shown(text)!r}: expected a number from 1 to 4096")
    return int(text)


def _link(link: str, found: Card) -> float:
    if not link:
        return found.link_bytes_per_s
    return rate_of(link, "link") if link.strip().endswith("/s") else link_rate(link)


def _processor(found: Card) -> Roofline:
    rate = found.bytes_per_s
    return Roofline(flops=found.flops, memory_bytes_per_s=rate, launch_ns=LAUNCH_NS, kv_bytes_per_s=rate)


def _with_gpu(found: Card, vram: int, wire: float, cpu: Roofline, below: tuple[int, float]) -> Platform:
    memory, reads = below
    tier = LowerTier(name="RAM", capacity=f"{memory}B", bytes_per_s=reads, latency_ns=READ_NS)
    return Platform(
        name=found.name,
        summary=f"{found.name} with {sold(memory)} of RAM",
        source=f"{found.source}; rates of RAM, link and disk as given or assumed",
        memory_bytes=float(vram),
        slow_tier="disk",
        links=(Link(bytes_per_s=wire, latency_ns=COPY_NS),),
        tiers=(tier,),
        compute=_processor(found),
        loading=Loading(gate_ns=found.layer_ns),
        cpu=cpu.model_copy(update={"tier": tier.name}),
    )


def _unified(found: Card, memory: int, reads: float) -> Platform:
    return Platform(
        name=found.name,
        summary=f"{found.name} with {sold(memory)} of unified memory",
        source=f"{found.source}; the disk as given or assumed",
        fast_tier=UNIFIED,
        slow_tier="disk",
        memory_bytes=float(memory),
        links=(Link(bytes_per_s=reads, latency_ns=READ_NS),),
        compute=_processor(found),
        loading=Loading(gate_ns=found.layer_ns),
    )


def _without_gpu(cpu: Roofline, memory: int, reads: float) -> Platform:
    return Platform(
        name="CPU",
        summary=f"a CPU with {sold(memory)} of RAM",
        source="rates as given or assumed",
        fast_tier="RAM",
        slow_tier="disk",
        memory_bytes=float(memory),
        links=(Link(bytes_per_s=reads, latency_ns=READ_NS),),
        compute=cpu,
    )


# -- Machines with one larger or twice as fast part, to show the gain of each upgrade

CARD_SIZES = (8, 10, 12, 16, 24, 32, 48, 80, 96, 141, 192)  #: GiB
KIT_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  #: GiB of main memory
MODULES = ("2xDDR5-5600", "4xDDR5-5600", "8xDDR5-4800", "12xDDR5-6400")
DISKS = (0.55e9, 3.5e9, 7e9, 14e9)  #: bytes/s of SATA, and of NVMe on four lanes of PCIe 3, 4 and 5
LARGER = 1.2  #: times as large, or as fast, as the part at hand is one to think of


def with_memory(machine: Machine, size: float) -> Machine:
    """Return the machine with `size` bytes of fast memory."""
    return machine._replace(platform=machine.platform.model_copy(update={"memory_bytes": float(size)}))


def better(machine: Machine, expert_bytes: int) -> Iterator[tuple[str, Machine]]:
    """Yield machines with one part that is larger or faster, in sizes and rates that are sold."""
    platform, name = machine.platform, machine.platform.fast_tier
    size = machine.memory_bytes
    if machine.kind == "gpu":
        larger = [gib * GIB for gib in CARD_SIZES if gib * GIB > size * LARGER]
        for more in larger[:2]:
            yield f"{name} of {sold(more)} in place of {sold(size)}", with_memory(machine, more)
        if machine.ram_bytes < 2 * expert_bytes and (kit := _kit(machine.ram_bytes)):
            more = machine._replace(ram_bytes=kit)
            yield f"RAM of {sold(kit)} in place of {sold(machine.ram_bytes)}", more
    elif kit := _kit(size):
        yield f"{name} of {sold(kit)} in place of {sold(size)}", with_memory(machine, kit)
    for what, changed in _faster(platform):
        yield what, machine._replace(platform=changed)
    reads = machine.disk_bytes_per_s
    if reads and (faster := _next(DISKS, reads)):
        yield f"a disk of {faster / GB:g} GB/s in place of {reads / GB:.3g}", machine._replace(disk_bytes_per_s=faster)


def _kit(size: float) -> int:
    """Return the bytes of the smallest kit of at least twice a size, 0 if none is sold."""
    return next((gib * GIB for gib in KIT_SIZES if gib * GIB >= 2 * size), 0)


def _next(rates: Iterable[float], rate: float) -> float:
    """Return the first of rising rates that is worth thinking of, 0 if there is none."""
    return next((each for each in rates if each > LARGER * rate), 0.0)


def _faster(platform: Platform) -> Iterator[tuple[str, Platform]]:
    """Yield the platform with RAM and a link that are sold, or with cores or fast memory of twice the rate."""
    if isinstance(platform.cpu, Roofline):
        rate = platform.cpu.memory_bytes_per_s
        modules = {ram_rate_of(each): each for each in MODULES}
        if faster := _next(modules, rate):
            of = f"RAM read at {faster / GB:.3g} GB/s ({modules[faster]}) in place of {rate / GB:.4g}"
            yield (
                of,
                platform.model_copy(update={"cpu": platform.cpu.model_copy(update={"memory_bytes_per_s": faster})}),
            )
        cores = platform.cpu.model_copy(update={"flops": 2 * platform.cpu.flops})
        yield "twice the CPU's cores", platform.model_copy(update={"cpu": cores})
        link, pcie = platform.links[0], {16 * lane: generation for generation, lane in LANE.items()}
        if faster := _next(pcie, link.bytes_per_s):
            wider = link.model_copy(update={"bytes_per_s": faster})
            of = f"a link of {faster / GB:.3g} GB/s (PCIe {pcie[faster]} x16) in place of {link.bytes_per_s / GB:.3g}"
            yield of, platform.model_copy(update={"links": (wider, *platform.links[1:])})
    if isinstance(platform.compute, Roofline):
        rate = platform.compute.memory_bytes_per_s
        faster = platform.compute.model_copy(update={"memory_bytes_per_s": 2 * rate, "kv_bytes_per_s": 2 * rate})
        of = f"{platform.fast_tier} read at {2 * rate / GB:.4g} GB/s in place of {rate / GB:.4g}"
        yield of, platform.model_copy(update={"compute": faster})
