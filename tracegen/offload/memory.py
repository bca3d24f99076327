"""Experts with random weights as bytes, the marks by which their pages are known, and this machine's memory for them.

What is computed is checked to be the right expert, whole: each of its pages begins with its own mark.
"""

from __future__ import annotations

import mmap
import platform as this
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, int64

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.state import Area
from moereplay.traces.units import GB

PAGE = 4096  #: bytes: alignment of direct reads, and size of a marked page
MARK = 8  #: bytes
SEED = 20_260_301
WEIGHT = 0.02  #: standard deviation
#: Formats of weights. Scales of the integer ones are bytes after the weights, if their bits say that there are any.
BITS_PER_WEIGHT = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "int2": 2}


class Format(NamedTuple):
    """How the bytes of a copy are stored."""

    size: int  #: bytes, in whole pages
    dtype: str  #: one of BITS_PER_WEIGHT


@dataclass(frozen=True)
class Layout:
    """Bytes of one expert by layer, and where each lies among all, which begin at pages."""

    experts: int
    sizes: tuple[int, ...]
    dtype: str  #: of the weights: one of BITS_PER_WEIGHT, or the model's own
    weights: str = ""  #: which they are: a digest of a model's; empty for random ones

    @property
    def count(self) -> int:
        """Number of experts over all layers."""
        return self.experts * len(self.sizes)

    def size(self, y: int) -> int:
        """Return the bytes of expert y = layer * experts + id."""
        return self.sizes[y // self.experts]

    def padded(self, y: int) -> int:
        """Return the bytes of expert y in whole pages."""
        return _pages(self.size(y))

    def format(self, y: int) -> Format:
        """Return how expert y is stored."""
        return Format(self.padded(y), self.dtype)

    def offset(self, y: int) -> int:
        """Return the offset of expert y."""
        layer, expert = divmod(y, self.experts)
        return sum(map(_pages, self.sizes[:layer])) * self.experts + expert * self.padded(y)

    @property
    def total(self) -> int:
        """Bytes of all experts."""
        return self.offset(self.count - 1) + self.padded(self.count - 1)

    def document(self) -> dict[str, object]:
        """Return the description that a file of these experts must have."""
        which = {"weights": self.weights} if self.weights else {"seed": SEED}
        return {"experts": self.experts, "sizes": list(self.sizes), "dtype": self.dtype, **which}


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def marks_of(layout: Layout) -> list[int]:
    """Return by expert the first weights of each of its pages as an integer, which differs between experts."""
    draw = np.random.default_rng(SEED)
    marks = _weights(draw, layout.count * MARK, layout.dtype).view(np.int64)
    assert len(np.unique(marks)) == layout.count
    return marks.tolist()


def contents(layout: Layout) -> Iterator[np.ndarray]:
    """Yield the bytes of every expert, padded, (n,) uint8, in one array that is reused."""
    largest = _pages(max(layout.sizes))
    draw = np.random.default_rng(SEED + 1)
    weights = np.array(_weights(draw, largest, layout.dtype))
    for y, mark in enumerate(marks_of(layout)):
        weights.view(np.int64)[:: PAGE // MARK] = mark
        yield weights[: layout.padded(y)]


def _weights(draw: np.random.Generator, size: int, dtype: str) -> np.ndarray:
    """Return random weights as bytes, (size,): the upper halves of float32 for bfloat16, any bytes for integers."""
    if dtype.startswith("int"):
        return draw.integers(0, 256, size, np.uint8)
    values = (draw.standard_normal(size * 8 // BITS_PER_WEIGHT[dtype], dtype=np.float32) * WEIGHT).view(np.uint32)
    return (values >> 16).astype(np.uint16).view(np.uint8) if dtype == "bfloat16" else values.view(np.uint8)


class Marks(NamedTuple):
    """The smallest and the largest mark of the pages of a slot: equal if all are of one expert."""

    least: int
    most: int


def page_marks(slot: Tensor) -> Tensor:
    """Return the first bytes of each page of a slot, (n,) uint8, as integers (pages,)."""
    return slot.view(int64)[:: PAGE // MARK]


# -- This machine: its name in a measurement, and its memory.


def described(device: str) -> str:
    """Return the name and the number of the processors that compute."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else this.processor() or this.machine()}, {max(len(names), 1)} cores"


def compute_on(threads: int) -> None:
    """Set the number of compute threads of a CPU, in addition to the thread that reads."""
    torch.set_num_threads(threads)


def free_memory(device: str) -> int:
    """Return the bytes that can be allocated on a device. Raises ConfigError if this torch does not have the device."""
    if device == "cpu":
        return available_memory()
    try:
        return torch.cuda.mem_get_info(device)[0]
    except (RuntimeError, AssertionError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"invalid --device {device}: {said}; pass cpu, or use a machine and a torch with CUDA"
        ) from None


def memory_of(device: str, size: int) -> Tensor:
    """Allocate memory, (size,) uint8."""
    return host_memory(size) if device == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)


def host_memory(size: int) -> Tensor:
    """Allocate main memory that begins at a page, as direct reads require; every page is touched here."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return torch.from_numpy(memory)


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


# -- The fast tier as real memory: slots of whole pages, equal for copies of a size, one copy each.


class Arena:
    """Slots of memory of a device, each as large as a copy."""

    def __init__(self, slots: int, size: int, device: str) -> None:
        """Allocate slots of `size` bytes each, rounded up to pages. On a CPU every page is touched here."""
        self.size, self.slots = -(-size // PAGE) * PAGE, slots
        self._bytes = memory_of(device, slots * self.size)

    def of(self, slot: int) -> Tensor:
        """Return the bytes of a slot, (size,) uint8."""
        return self._bytes[slot * self.size : (slot + 1) * self.size]


def arena_of(slots: int, size: int, device: str) -> Arena:
    """Raises ConfigError where the slots do not fit the device's memory."""
    return arenas_of({size: slots}, device)[size]


def arenas_of(slots: Mapping[int, int], device: str) -> dict[int, Arena]:
    """Return an arena by bytes of a copy. Raises ConfigError if they do not fit into the device's memory."""
    needed, free = sum(size * each for size, each in slots.items()), free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the cache needs {needed / GB:.3g} GB and {free / GB:.3g} GB are free; pass a smaller --capacity"
        )
    return {size: Arena(each, size, device) for size, each in slots.items()}


class Reads(Protocol):
    """Reads copies from the slow tier into slots."""

    def read(self, y: int, into: Tensor) -> None:
        """Copy y."""
        ...


class Slots:
    """Which slot has which copy, as the engine places them in one run."""

    def __init__(self, arenas: Sequence[Arena], reads: Reads) -> None:
        """Take an arena per precision. All slots are free; warm experts are read here."""
        self._arenas, self._reads = arenas, reads
        self._free = {id(arena): list(range(arena.slots)) for arena in arenas}
        self._slot: dict[int, int] = {}

    def _arena(self, y: int) -> Arena:
        return self._arenas[y % len(self._arenas)]

    def of(self, y: int) -> Tensor:
        """Return the bytes of the slot of copy y."""
        return self._arena(y).of(self._slot[y])

    def warmed(self, y: int) -> None:
        """Read before the run begins."""
        self.placed(y, Area.POOL)
        self._reads.read(y, self.of(y))

    def placed(self, y: int, area: Area) -> None:
        """Assign a free slot to the copy."""
        self._slot[y] = self._free[id(self._arena(y))].pop()

    def promoted(self, y: int) -> None:
        """Do nothing: the copy keeps its slot, because slots of a size are interchangeable."""

    def vacated(self, y: int) -> None:
        """Free the slot of the copy.

        A read into the slot that is still under way ends before the next one begins.
        """
        self._free[id(self._arena(y))].append(self._slot.pop(y))
