"""Tokens/s over sizes of fast memory and of main memory, with the rates of one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moereplay.simulator.machine import NO_LIMIT, Machine
from moereplay.sweeps.recommend.load import Load
from moereplay.sweeps.recommend.quick import SYSTEM, candidates, estimates, leader
from moereplay.sweeps.recommend.upgrades import CARD_SIZES, with_memory
from moereplay.traces.units import GB

RAM_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)  #: GB
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
    for ram in _with(own, _up_to(whole + SYSTEM, [gb * int(GB) for gb in RAM_SIZES])):
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
