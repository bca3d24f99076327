"""A whole machine: fast memory, main memory and disk, from a card's name, sizes and rates, or from a platform."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator
from math import sqrt
from typing import NamedTuple

from moereplay.simulator.capacity import memory_of, parse_size, with_unit
from moereplay.simulator.cards import GIB, LANE, Card, card, cards, kept_bytes, kernel_rate, link_rate, several
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Measured, Platform, Roofline
from moereplay.simulator.rates import MOST_RATE, Loading
from moereplay.simulator.wires import REST, Link, LowerTier
from moereplay.traces.schema import shown
from moereplay.traces.texts import sold
from moereplay.traces.units import GB
from moereplay.traces.weight_formats import BITS_PER_WEIGHT

UNIFIED = "unified memory"
DISK_BYTES_PER_S = 3.5e9  #: assumed: an NVMe drive on PCIe 3
CHANNELS = 2  #: of modules that are named without a number
#: Of a nominal rate of RAM that CPU kernels reach: 58.1 and about 72 GB/s of two channels of DDR5 (FreeToken, issue
#: 151, 7800X3D; lukaLLM, 9950X); of eight of DDR5-4800 in one socket .43 (ik_llama.cpp, Threadripper 7965WX) and .51
#: (ktransformers, Xeon 6454S), which is taken from six channels on.
NOMINAL, SERVER, OF_SERVERS = 0.7, 0.5, 6
FLOPS_PER_CORE = 125e9  #: of a CPU's core with many rows: two 256-bit multiply-adds of 16 bits a cycle at 4 GHz
DENSE_BITS = BITS_PER_WEIGHT["Q6_K"]  #: of dense weights beside quantised experts, where a CPU computes both
READ_NS = 80_000  #: before a disk's first byte, NVMe class
LAUNCH_NS, CPU_LAUNCH_NS, COPY_NS = 1_000, 1_000, 10_000  #: per expert of one grouped kernel, and of a copy
NO_LIMIT = 1 << 50
DESKTOP = re.compile(r"(RTX [2-9]0[5-9]0|RX [6-9]\d00)( (Ti|Super|XT|XTX|GRE|Ti Super|\d+GB|Ti \d+GB))?")


class Cores(NamedTuple):
    """Cores of a CPU, of one kind of `cards.toml`, or what all of them were measured to decode."""

    many: int
    kind: str
    weights_per_s: float = 0  #: of all cores together; 0: by their kind

    def decoded(self, weight_format: str = "") -> float:
        """Weights/s of a format that they decode for one row."""
        by_kind = self.many * kernel_rate(self.kind, weight_format)
        return self.weights_per_s * by_kind / (self.many * kernel_rate(self.kind)) if self.weights_per_s else by_kind


class Typical(NamedTuple):
    """RAM and cores that are assumed for a CPU without a description."""

    ram: tuple[str, str]  #: the slowest and the fastest
    cores: tuple[Cores, Cores, Cores]  #: the slowest, those taken, the fastest


DESKTOPS = Typical(("2xDDR4-3200", "2xDDR5-6000"), (Cores(6, "avx2"), Cores(8, "vnni"), Cores(16, "vnni")))
#: Of the six published machines with so much RAM, five have eight channels of these kinds and 24 to 48 cores; the
#: sixth has two sockets of four channels of DDR4.
SERVERS = Typical(("8xDDR4-3200", "8xDDR5-4800"), (Cores(24, "avx2"), Cores(32, "vnni"), Cores(48, "vnni")))
SERVERS_FROM = 256 * GIB
KINDS = {"avx2": "avx2", **dict.fromkeys(("vnni", "avxvnni", "avx512", "amx"), "vnni"), "neon": "neon"}


class Machine(NamedTuple):
    """A platform, and what lies below its fast memory."""

    platform: Platform
    ram_bytes: int  #: main memory below fast memory, 0 if there is none
    disk_bytes_per_s: float | None
    disk_latency_ns: int = READ_NS
    assumed: tuple[str, ...] = ()  #: figures that were assumed, and the options that give them
    #: Cards that share the layers: memory is that of all, rates and link those of one, as a token passes them in turn.
    count: int = 1
    cores: Cores | None = None  #: of the CPU, if its prices follow from them
    ends: tuple[tuple[float, Cores], ...] = ()  #: slowest and fastest RAM (bytes/s) and cores that what is said allows

    @property
    def free_bytes(self) -> int:
        """Bytes of fast memory that others than the engine do not keep."""
        return self.memory_bytes - int(self.platform.reserve_bytes or 0)

    def range(self) -> tuple[Machine, ...]:
        """Return the machine at both ends of what is not said of its CPU; none if everything is."""
        return tuple(self.with_cpu(rate, cores) for rate, cores in self.ends)

    def with_cpu(self, rate: float, cores: Cores) -> Machine:
        """Return the machine whose CPU has these cores and reads RAM at `rate` bytes/s, without a range."""
        platform, cpu = self.platform, priced(rate, cores)
        beside = platform.cpu and {"tier": platform.cpu.tier, "sync_ns": platform.cpu.sync_ns}
        change = {"cpu": cpu.model_copy(update=beside)} if beside else {"compute": _alone(cpu, cores)}
        return self._replace(platform=platform.model_copy(update=change), cores=cores, ends=())

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

    @property
    def in_words(self) -> str:
        """The machine in one line, with the rates that its parts reach."""
        platform = self.platform
        reads = [getattr(of, "memory_bytes_per_s", 0) / GB for of in (platform.compute, platform.cpu)]
        name = "this machine" if platform.name == "here" else platform.name
        fast = f"{name}, {sold(self.memory_bytes)} {platform.fast_tier}"
        parts = [f"{fast} reached at {reads[0]:.4g} GB/s" if reads[0] else fast]
        if self.has_main_memory:
            parts.append(f"link {platform.links[0].bytes_per_s / GB:.3g} GB/s")
            rate = f" at {reads[1]:.3g} GB/s" if reads[1] else ""
            parts += [f"RAM {sold(self.ram_bytes)}{rate}"] if self.ram_bytes < NO_LIMIT else []
        if self.disk_bytes_per_s:
            parts.append(f"disk {self.disk_bytes_per_s / GB:.3g} GB/s")
        return ", ".join(parts)

    def lines(self) -> list[tuple[str, str]]:
        """Return headings with the figures, for people."""
        of, platform = self.platform.compute, self.platform
        kept = f", {platform.reserve_bytes / GB:.3g} GB of it kept by others" if platform.reserve_bytes else ""
        lines = [(platform.fast_tier, f"{sold(platform.memory_bytes or 0)}{_rates(of)}{kept}")]
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
        cpu = _alone(cpu, machine.cores)
    alone = platform.model_copy(
        update={"compute": cpu, "cpu": None, "tiers": (), "fast_tier": "RAM", "memory_bytes": float(machine.ram_bytes)}
        | {"loading": Loading(), "reserve_bytes": None if platform.reserve_bytes is None else kept_bytes("system", 0)}
    )
    return machine._replace(platform=alone, ram_bytes=0, count=1)


def priced(rate: float, cores: Cores) -> Roofline:
    """Return a CPU that computes experts: bytes/s of RAM, or of a format what its kernels decode if that is less."""
    decoded = {name: float(round(cores.decoded(name) * bits / 8)) for name, bits in BITS_PER_WEIGHT.items()}
    formats = {name: slower for name, slower in decoded.items() if slower < rate}
    flops = cores.many * FLOPS_PER_CORE
    return Roofline(flops=flops, memory_bytes_per_s=rate, launch_ns=CPU_LAUNCH_NS, formats=formats)


def _alone(cpu: Roofline, cores: Cores | None) -> Roofline:
    """Return a CPU that computes dense weights too; of an unknown format as of Q6_K."""
    rate = cpu.memory_bytes_per_s
    dense = min(rate, float(round(cores.decoded() * DENSE_BITS / 8))) if cores else rate
    named = {name: cpu.formats.get(name, rate) for name in BITS_PER_WEIGHT} if dense < rate else {}
    change = {"memory_bytes_per_s": dense, "dense_formats": named, "kv_bytes_per_s": rate}
    return cpu.model_copy(update=change | ({"expert_bytes_per_s": rate} if dense < rate else {}))


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
    channels = int(modules[1] or CHANNELS)
    return channels * 8e6 * int(modules[2]) * (SERVER if channels >= OF_SERVERS else NOMINAL)


def _ram_rates(text: str, typical: Typical, assumed: list[str]) -> tuple[float, float, float]:
    """Return the slowest, the assumed (their geometric mean) and the fastest rate of RAM that the text allows."""
    first, _, last = text.partition("..") if text else (typical.ram[0], "", typical.ram[1])
    slow, fast = sorted((ram_rate_of(first), ram_rate_of(last or first)))
    middle = slow if slow == fast else float(round(sqrt(slow * fast)))
    if not text.strip().endswith("/s"):
        of = (
            f"{NOMINAL:.0%} of {text}, in {CHANNELS} channels unless it names others, {SERVER:.0%} from {OF_SERVERS} on"
        )
        of = of if text else f"{slow / GB:.3g} to {fast / GB:.3g}: {' to '.join(typical.ram)}"
        assumed.append(f"the CPU reads RAM at {middle / GB:.3g} GB/s, {of} (--ram-rate)")
    return slow, middle, fast


def _cores(text: str, typical: Typical, assumed: list[str]) -> tuple[Cores, Cores, Cores]:
    """Return the slowest, the assumed and the fastest cores that the text allows. Raises ConfigError."""
    if not text:
        slow, middle, fast = (of.many for of in typical.cores)
        between = f"{slow} with AVX2 to {fast} with AVX-512"
        assumed.append(f"{middle} CPU cores with AVX-VNNI or AVX-512, {between} (--cores 16xAVX512)")
        return typical.cores
    said = re.fullmatch(r"(\d{1,4})(?:\s*x?\s*([a-z][a-z0-9-]*))?", text.strip().lower())
    kind = KINDS.get((said[2] or "vnni").replace("-", "")) if said else None
    if said is None or kind is None or not 1 <= int(said[1]) <= 4096:
        raise ConfigError(
            f"invalid --cores {shown(text)!r}: expected a number from 1 to 4096, with AVX2, VNNI, AVX512, AMX or NEON "
            "as in 16xAVX512"
        )
    middle = Cores(int(said[1]), kind)
    if said[2]:
        return middle, middle, middle
    assumed.append(f"{middle.many} CPU cores with AVX-VNNI or AVX-512, or with AVX2 (--cores {middle.many}xAVX2)")
    return middle._replace(kind="avx2"), middle, middle


def of_platform(platform: Platform, memory: str = "", ram: str = "", disk: str = "") -> Machine:
    """Return the machine of a platform; `memory` and `ram` are sizes, `disk` a rate. Raises ConfigError."""
    if memory:
        platform = platform.model_copy(update={"memory_bytes": float(memory_of(memory, "memory"))})
    if platform.tiers:
        if REST in (tier.capacity for tier in platform.tiers):
            raise ConfigError(
                f"platform {platform.name} has a tier of what its memory leaves, which `recommend` does not size: "
                "replay the capacities that matter"
            )
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
    *,
    gpu: str = "",
    vram: str = "",
    ram: str = "",
    ram_rate: str = "",
    disk: str = "",
    cores: str = "",
    link: str = "",
    headless: bool = False,
) -> Machine:
    """Return a machine from the parts that are named, `vram` of each card; others are assumed. Raises ConfigError.

    `headless`: no desktop keeps memory of the card.
    """
    assumed: list[str] = []
    count, gpu = several(gpu)
    found = _card(gpu, vram, assumed)
    if count > 1 and (found is None or found.is_unified):
        raise ConfigError(f"invalid --gpu {shown(gpu)!r}: expected a card with its own memory where there are {count}")
    for option, given in {"headless": headless, "link": link}.items():
        if given and (found is None or found.is_unified):
            raise ConfigError(f"--{option} requires a GPU with its own memory: pass --gpu or --vram")
    memory = _size(ram, found, assumed)
    reads = rate_of(disk, "disk") if disk else DISK_BYTES_PER_S
    if not disk:
        assumed.append(f"disk reads {reads / GB:g} GB/s (--disk)")
    if found is not None and found.is_unified:
        return Machine(_one_memory(found, _processor(found), memory, reads), 0, reads, READ_NS, tuple(assumed))
    typical = SERVERS if memory >= SERVERS_FROM else DESKTOPS
    rates, kinds = _ram_rates(ram_rate, typical, assumed), _cores(cores, typical, assumed)
    cpu, ends = priced(rates[1], kinds[1]), tuple(zip(rates[::2], kinds[::2], strict=True))
    about = {"cores": kinds[1], "ends": ends if ends[0] != ends[1] else ()}
    if found is None:
        platform = _one_memory(None, _alone(cpu, kinds[1]), memory, reads)
        return Machine(platform, 0, reads, READ_NS, tuple(assumed), **about)
    size = memory_of(vram, "vram") if vram else found.vram_bytes
    kept = count * kept_bytes(NO_DISPLAY if headless else found.keeps, size)
    platform = _with_gpu(found, count, (size, kept), _link(link, found), cpu, (memory, reads))
    if not gpu:
        platform = platform.model_copy(update={"name": f"a card of {sold(size)}"})
    return Machine(platform, memory, reads, READ_NS, tuple(assumed), count, **about)


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


def _link(link: str, found: Card) -> float:
    if not link:
        return found.link_bytes_per_s
    return rate_of(link, "link") if link.strip().endswith("/s") else link_rate(link)


def _processor(found: Card) -> Roofline:
    rate = found.bytes_per_s
    return Roofline(flops=found.flops, memory_bytes_per_s=rate, launch_ns=LAUNCH_NS, kv_bytes_per_s=rate)


def _with_gpu(
    found: Card, count: int, fast: tuple[int, float], wire: float, cpu: Roofline, below: tuple[int, float]
) -> Platform:
    (vram, kept), (memory, reads) = fast, below
    name = f"{count} x {found.name}" if count > 1 else found.name
    tier = LowerTier(name="RAM", capacity=f"{memory}B", bytes_per_s=reads, latency_ns=READ_NS)
    return Platform(
        name=name,
        summary=f"{name} with {sold(memory)} of RAM",
        source=f"{found.source}; rates of RAM, link and disk as given or assumed",
        memory_bytes=float(count * vram),
        reserve_bytes=kept,
        slow_tier="disk",
        links=(Link(bytes_per_s=wire, latency_ns=COPY_NS),),
        tiers=(tier,),
        compute=_processor(found),
        loading=Loading(gate_ns=found.layer_ns),
        cpu=cpu.model_copy(update={"tier": tier.name}),
    )


def _one_memory(found: Card | None, compute: Roofline, memory: int, reads: float) -> Platform:
    size = sold(memory)
    return Platform(
        name=found.name if found else "CPU",
        summary=f"{found.name} with {size} of unified memory" if found else f"a CPU with {size} of RAM",
        source=f"{found.source}; the disk as given or assumed" if found else "rates as given or assumed",
        fast_tier=UNIFIED if found else "RAM",
        slow_tier="disk",
        memory_bytes=float(memory),
        reserve_bytes=kept_bytes(found.keeps if found else "system", memory),
        links=(Link(bytes_per_s=reads, latency_ns=READ_NS),),
        compute=compute,
        loading=Loading(gate_ns=found.layer_ns if found else 0),
    )


# -- Machines with one larger or twice as fast part, to show the gain of each upgrade

CARD_SIZES = (8, 10, 12, 16, 24, 32, 48, 80, 96, 141, 192)  #: GiB
KIT_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  #: GiB of main memory
MODULES = ("2xDDR5-5600", "4xDDR5-5600", "8xDDR5-4800", "12xDDR5-6400")
DISKS = (0.55e9, 3.5e9, 7e9, 14e9)  #: bytes/s of SATA, and of NVMe on four lanes of PCIe 3, 4 and 5
NO_DISPLAY = "compute"  #: what others keep of a card without a desktop, in cards.toml
LARGER = 1.2  #: times as large, or as fast, as the part at hand is one to think of


def with_memory(machine: Machine, size: float) -> Machine:
    """Return the machine with `size` bytes of fast memory, of which others keep the same share."""
    platform, kept = machine.platform, machine.platform.reserve_bytes
    reserve = None if kept is None else float(round(kept * size / machine.memory_bytes))
    change = {"memory_bytes": float(size), "reserve_bytes": reserve}
    return machine._replace(platform=platform.model_copy(update=change))


def better(machine: Machine, expert_bytes: int) -> Iterator[tuple[str, Machine]]:
    """Yield machines with one part that is larger or faster, in sizes and rates that are sold."""
    platform, name = machine.platform, machine.platform.fast_tier
    size = machine.memory_bytes
    if machine.kind == "gpu":
        free = kept_bytes(NO_DISPLAY, int(size))
        if (platform.reserve_bytes or 0) > free:
            alone = machine._replace(platform=platform.model_copy(update={"reserve_bytes": free}))
            yield "no desktop on the card (--headless)", alone
        larger = [gib * GIB for gib in CARD_SIZES if gib * GIB > size * LARGER]
        for more in larger[:2]:
            yield f"{name} of {sold(more)} in place of {sold(size)}", with_memory(machine, more)
        if machine.ram_bytes < 2 * expert_bytes and (kit := _kit(machine.ram_bytes)):
            more = machine._replace(ram_bytes=kit)
            yield f"RAM of {sold(kit)} in place of {sold(machine.ram_bytes)}", more
    elif kit := _kit(size):
        yield f"{name} of {sold(kit)} in place of {sold(size)}", with_memory(machine, kit)
    if isinstance(platform.cpu, Roofline):
        yield from _faster_cpu(machine, platform.cpu)
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


def _faster_cpu(machine: Machine, cpu: Roofline) -> Iterator[tuple[str, Machine]]:
    """Yield the machine with RAM that is sold, or with cores that compute twice as much."""
    rate, modules = cpu.memory_bytes_per_s, {ram_rate_of(each): each for each in MODULES}
    faster = _next(modules, rate)
    of = f"RAM read at {faster / GB:.3g} GB/s ({modules[faster]}) in place of {rate / GB:.4g}" if faster else ""
    for what, reads, times in ((of, faster, 1), ("twice the CPU's cores", rate, 2)):
        other = cpu.model_copy(update={"memory_bytes_per_s": reads, "flops": times * cpu.flops})
        if (cores := machine.cores) and what:
            yield what, machine.with_cpu(reads, Cores(times * cores.many, cores.kind, times * cores.weights_per_s))
        elif what:
            yield what, machine._replace(platform=machine.platform.model_copy(update={"cpu": other}))


def _faster(platform: Platform) -> Iterator[tuple[str, Platform]]:
    """Yield the platform with a link that is sold, or with fast memory of twice the rate."""
    if platform.cpu is not None:
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
