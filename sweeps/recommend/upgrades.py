"""Evaluate machines with one larger or twice as fast part, to show the gain of each upgrade."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.simulator.machine import Machine
from moereplay.simulator.platform import Platform, Roofline
from moereplay.traces.units import GB

CARD_SIZES = (8, 12, 16, 24, 32, 48, 80, 96, 141, 192)  #: GiB


def with_memory(machine: Machine, size: float) -> Machine:
    """Return the machine with `size` bytes of fast memory."""
    return machine._replace(platform=machine.platform.model_copy(update={"memory_bytes": float(size)}))


def better(machine: Machine, expert_bytes: int) -> Iterator[tuple[str, Machine]]:
    """Yield machines with one part that is larger or twice as fast."""
    platform, name = machine.platform, machine.platform.fast_tier
    size = machine.memory_bytes
    if machine.kind == "gpu":
        larger = [gib for gib in CARD_SIZES if gib * 2**30 > size * 1.05]
        for gib in larger[:2]:
            yield f"{name} of {gib} GiB in place of {size / 2**30:.3g}", with_memory(machine, gib * 2**30)
        if machine.ram_bytes < 2 * expert_bytes:
            doubled = machine._replace(ram_bytes=2 * machine.ram_bytes)
            yield f"RAM of {2 * machine.ram_bytes / GB:.3g} GB in place of {machine.ram_bytes / GB:.3g}", doubled
    else:
        yield f"{name} of {2 * size / GB:.3g} GB in place of {size / GB:.3g}", with_memory(machine, 2 * size)
    for what, changed in _faster(platform):
        yield what, machine._replace(platform=changed)
    if machine.disk_bytes_per_s:
        twice = machine._replace(disk_bytes_per_s=2 * machine.disk_bytes_per_s)
        yield (
            f"a disk of {2 * machine.disk_bytes_per_s / GB:.3g} GB/s in place of {machine.disk_bytes_per_s / GB:.3g}",
            twice,
        )


def _faster(platform: Platform) -> Iterator[tuple[str, Platform]]:
    """Yield the platform with one rate doubled."""
    if isinstance(platform.cpu, Roofline):
        rate = platform.cpu.memory_bytes_per_s
        twice = platform.cpu.model_copy(update={"memory_bytes_per_s": 2 * rate})
        yield _rates("RAM read at {} GB/s", rate), platform.model_copy(update={"cpu": twice})
        cores = platform.cpu.model_copy(update={"flops": 2 * platform.cpu.flops})
        yield "twice the CPU's cores", platform.model_copy(update={"cpu": cores})
        link = platform.links[0]
        wider = link.model_copy(update={"bytes_per_s": 2 * link.bytes_per_s})
        yield (
            _rates("a link of {} GB/s", link.bytes_per_s),
            platform.model_copy(update={"links": (wider, *platform.links[1:])}),
        )
    if isinstance(platform.compute, Roofline):
        rate = platform.compute.memory_bytes_per_s
        faster = platform.compute.model_copy(update={"memory_bytes_per_s": 2 * rate, "kv_bytes_per_s": 2 * rate})
        yield _rates(f"{platform.fast_tier} read at {{}} GB/s", rate), platform.model_copy(update={"compute": faster})


def _rates(what: str, rate: float) -> str:
    """Return the words for twice a rate."""
    return f"{what.format(f'{2 * rate / GB:.4g}')} in place of {rate / GB:.4g}"
