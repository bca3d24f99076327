"""The slow tier: a file of experts on a disk, read past the page cache, or main memory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.offload.memory import (
    Format,
    Layout,
    Marks,
    available_memory,
    contents,
    free_memory,
    host_memory,
    marks_of,
)
from moereplay.tracegen.offload.part import Named
from moereplay.traces.documents import json_text
from moereplay.traces.units import GB, SECOND

SPIN_NS = 100_000  #: a throttle sleeps until so long before its end, and yields from there on


class SlowTier(Protocol):
    """A slow tier that holds all experts. One thread reads."""

    label: str  #: what rows of results call it
    layout: Layout

    def read(self, y: int, into: Tensor) -> None:
        """Fill a slot, at least (padded,) uint8, with expert y. Raises OSError."""
        ...

    def read_bytes(self, begin: int, into: Tensor) -> None:
        """Fill `into`, whole pages, with what lies from `begin` on: a page's beginning. Raises OSError."""
        ...

    def on_host(self, y: int) -> Tensor:
        """Return expert y in main memory, (padded,) uint8, valid until the next call.

        Another thread may read. Raises OSError.
        """
        ...

    def buffer(self) -> Tensor:
        """Allocate memory for one expert, (n,) uint8, into which it can be read."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


class Memory:
    """All experts in main memory, pinned if a CUDA device reads them."""

    def __init__(self, layout: Layout, device: str, experts: Iterable[np.ndarray] | None = None) -> None:
        """Copy `experts`, the padded bytes of each (default: random). Raises ConfigError if they do not fit."""
        if layout.total > (free := available_memory()):
            raise ConfigError(
                f"--slow-tier pinned: {layout.total / GB:.3g} GB of experts in {free / GB:.3g} GB of free memory; "
                "use disk:DIR, or fewer layers"
            )
        self.layout, self._copies, self._device = layout, copier(device), device
        self.label = "memory" if device == "cpu" else "pinned memory"
        self._all = torch.empty(layout.total, dtype=torch.uint8, pin_memory=device != "cpu")
        for y, content in enumerate(contents(layout) if experts is None else experts):
            self._of(y).numpy()[:] = content

    def _of(self, y: int) -> Tensor:
        begin = self.layout.offset(y)
        return self._all[begin : begin + self.layout.padded(y)]

    def read(self, y: int, into: Tensor) -> None:
        """Copy the expert into a slot."""
        self._copies(self._of(y), into)

    def read_bytes(self, begin: int, into: Tensor) -> None:
        """Copy the expert into host memory."""
        self._copies(self._all[begin : begin + len(into)], into)

    def on_host(self, y: int) -> Tensor:
        """Return the host memory of expert y."""
        return self._of(y)

    def buffer(self) -> Tensor:
        """Allocate memory for one expert on the device."""
        return torch.zeros(largest(self.layout), dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Do nothing: no file is open."""


class Disk:
    """A file of experts, read past the page cache unless `buffered`; for a CUDA device by way of pinned memory."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        device: str,
        buffered: bool = False,
        experts: Iterable[np.ndarray] | None = None,
    ) -> None:
        """Open the file, which is written from `experts` if it is missing.

        Raises ConfigError if it cannot be written, or cannot be read past the page cache.
        """
        self.layout = layout
        self.label = "disk, buffered: the page cache answers too" if buffered else "disk"
        self._path = experts_file(folder, layout, experts)
        self._copies = copier(device)
        self._staging = None if device == "cpu" else torch.empty(largest(layout), dtype=torch.uint8, pin_memory=True)
        try:
            self._file = os.open(self._path, os.O_RDONLY | (0 if buffered else os.O_DIRECT))
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be read past the page cache ({error.strerror}); choose a folder on a disk, or "
                f"disk:{folder}:buffered, which measures the page cache as well"
            ) from None

    def read(self, y: int, into: Tensor) -> None:
        """Raises OSError for an error or a short read, naming the expert."""
        begin, size = self.layout.offset(y), self.layout.padded(y)
        if self._staging is None:
            self.read_bytes(begin, into[:size])
        else:
            self.read_bytes(begin, self._staging[:size])
            self._copies(self._staging[:size], into)

    def read_bytes(self, begin: int, into: Tensor) -> None:
        """Read the expert into host memory that begins at a page."""
        done, buffer = 0, memoryview(into.numpy())  # pyright: ignore[reportArgumentType]
        while done < len(into):
            read = os.preadv(self._file, [buffer[done:]], begin + done)
            if read == 0:
                said = f"has no byte {begin + done:,} of {self.layout.total:,}: it was cut off; remove the file"
                raise OSError(0, said, str(self._path))
            done += read

    @cached_property
    def _host(self) -> Tensor:
        return host_memory(largest(self.layout))

    def on_host(self, y: int) -> Tensor:
        """Read."""
        into = self._host[: self.layout.padded(y)]
        self.read_bytes(self.layout.offset(y), into)
        return into

    def buffer(self) -> Tensor:
        """Allocate host memory for one expert that begins at a page."""
        return host_memory(largest(self.layout))

    def close(self) -> None:
        """Close the file, which is kept for the next run."""
        os.close(self._file)


def kind_of(named: str) -> str:
    """Return the kind of a slow tier for a calibration: disk, disk:buffered or pinned, without its folder."""
    kind, _, rest = named.partition(":")
    return "disk:buffered" if rest.endswith(":buffered") else kind


def largest(layout: Layout) -> int:
    """Return the bytes of the largest expert in whole pages."""
    return max(map(layout.padded, range(0, layout.count, layout.experts)))


class _Copier(Protocol):
    def __call__(self, of: Tensor, into: Tensor) -> None: ...


def copier(device: str) -> _Copier:
    """Return a function that copies host memory into a slot and returns when done.

    On CUDA it uses a stream separate from compute.
    """
    if device == "cpu":
        return _copy
    stream = torch.cuda.Stream(device)

    def copy(of: Tensor, into: Tensor) -> None:
        with torch.cuda.stream(stream):
            into[: len(of)].copy_(of, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()

    return copy


def _copy(of: Tensor, into: Tensor) -> None:
    into[: len(of)].copy_(of)


def experts_file(folder: Path, layout: Layout, experts: Iterable[np.ndarray] | None = None) -> Path:
    """Return the file of these experts in the folder, which is written atomically if it is missing.

    Raises ConfigError.
    """
    about = json_text(layout.document(), sort_keys=True)
    path = folder / f"experts-{hashlib.sha256(about.encode()).hexdigest()[:12]}.bin"
    try:
        if not (path.exists() and path.stat().st_size == layout.total):
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, contents(layout) if experts is None else experts)
    except OSError as error:
        needed = f"{layout.total / GB:.3g} GB are needed there; nothing was left behind"
        raise ConfigError(f"--slow-tier disk:{folder}: {error.strerror}; {needed}") from None
    return path


def _write(path: Path, experts: Iterable[np.ndarray]) -> None:
    partial = path.with_suffix(".partial")
    with _removed_unless_whole(partial), partial.open("wb") as file:
        for content in experts:
            file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.replace(path)


@contextmanager
def _removed_unless_whole(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class Throttled:
    """A slow tier limited to a number of bytes per second: SpecMD's throttle."""

    def __init__(self, slow: SlowTier, bytes_per_s: float) -> None:
        """Wrap a slow tier, which its owner closes."""
        self._slow, self._rate = slow, bytes_per_s
        self.label, self.layout = slow.label, slow.layout

    def read(self, y: int, into: Tensor) -> None:
        """Read the expert; return no earlier than after size / rate."""
        until = time.perf_counter_ns() + int(self.layout.size(y) / self._rate * SECOND)
        self._slow.read(y, into)
        self._wait(until)

    def read_bytes(self, begin: int, into: Tensor) -> None:
        """Read any bytes from `begin` on."""
        until = time.perf_counter_ns() + int(len(into) / self._rate * SECOND)
        self._slow.read_bytes(begin, into)
        self._wait(until)

    def on_host(self, y: int) -> Tensor:
        """Return expert y from the slow tier, unthrottled: no byte crosses the link."""
        return self._slow.on_host(y)

    def buffer(self) -> Tensor:
        """Allocate memory as the slow tier does."""
        return self._slow.buffer()

    def _wait(self, until: int) -> None:
        while (left := until - time.perf_counter_ns()) > 0:
            time.sleep(max(left - SPIN_NS, 0) / SECOND)

    def close(self) -> None:
        """Do nothing: the owner closes the slow tier."""
        self._slow.close()


def throttled(slow: SlowTier, bytes_per_s: float | None) -> SlowTier:
    """Return the slow tier under a throttle, or unchanged without one."""
    return slow if bytes_per_s is None else Throttled(slow, bytes_per_s)


@contextmanager
def opened(
    named: Named, layout: Layout, device: str, experts: Iterable[np.ndarray] | None = None
) -> Iterator[SlowTier]:
    """Open the slow tier that an option names, with these experts. Raises ConfigError."""
    free_memory(device)  # or there is no such device
    if named.folder is None:
        slow: SlowTier = Memory(layout, device, experts)
    else:
        slow = Disk(named.folder, layout, device, named.buffered, experts)
    try:
        yield slow
    finally:
        slow.close()


@contextmanager
def faults_named() -> Iterator[None]:
    """Raise ConfigError, naming file and reason, for reads that fail in this block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the slow tier failed: {_words(error)}; the results of this run are discarded") from None


def _words(error: OSError) -> str:
    """Return file and reason of an error.

    SimPy raises a copy of a thread's error without the file, with the original as its cause.
    """
    own = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return f"{own.filename}: {own.strerror}" if own.filename else str(own)


# -- Copies of a run, of one precision or several: where each is read from, and what its bytes are.


class Copies:
    """Copies y = x * P + p of experts x = layer * E + e at precisions p, the most precise first."""

    def __init__(self, tiers: Sequence[SlowTier]) -> None:
        """Take a slow tier per precision."""
        self._tiers = tiers
        self._marks = [marks_of(tier.layout) for tier in tiers]

    def size(self, y: int) -> int:
        """Return the bytes of the copy."""
        layout, x = self._of(y)
        return layout.size(x)

    def read(self, y: int, into: Tensor) -> None:
        """Fill a slot, (n,) uint8, with the copy. Raises OSError."""
        self._tiers[y % len(self._tiers)].read(y // len(self._tiers), into)

    def on_host(self, y: int) -> Tensor:
        """Return the copy's bytes in main memory, (n,) uint8, for a CPU to compute with.

        Called by one thread. Raises OSError.
        """
        return self._tiers[y % len(self._tiers)].on_host(y // len(self._tiers))

    def format(self, y: int) -> Format:
        """Return how the copy is stored."""
        layout, x = self._of(y)
        return layout.format(x)

    @property
    def formats(self) -> list[Format]:
        """Return the formats of all copies."""
        layouts = [tier.layout for tier in self._tiers]
        return sorted({of.format(first) for of in layouts for first in range(0, of.count, of.experts)})

    def check(self, y: int, found: Marks) -> None:
        """Raises AssertionError unless every page of a slot has the mark of the copy."""
        mark = self._marks[y % len(self._tiers)][y // len(self._tiers)]
        if found != (mark, mark):
            raise AssertionError(f"the slot of expert {y} holds wrong bytes")

    def _of(self, y: int) -> tuple[Layout, int]:
        x, precision = divmod(y, len(self._tiers))
        return self._tiers[precision].layout, x
