"""This machine as a platform: detected (`detection.py`), measured, the rest assumed."""

from __future__ import annotations

import mmap
import os
import platform as system
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np

from moereplay.simulator.cards import link_rate, recognised
from moereplay.simulator.detection import Found, Gpu, detected, kernel_rate_here
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Cores, Machine, assembled
from moereplay.simulator.platforms import as_toml
from moereplay.simulator.rates import Roofline
from moereplay.traces.texts import counted, sold
from moereplay.traces.units import GB, SECOND

DISTURBED = "measured with other work running"  #: how the remark begins that stands first, beside any headline
BUSY = 0.5  #: load per core above which measured rates are doubtful


class Survey(NamedTuple):
    """This machine, with its detected and measured values."""

    machine: Machine
    found: Found
    ram_bytes_per_s: float
    disk: Disk | None
    folder: Path
    weights_per_s: float = 0  #: of llama.cpp's kernel on all cores, 0 if it was not measured

    def lines(self) -> list[tuple[str, str]]:
        """Return the detected and measured values with headings."""
        found, threads = self.found, min(self.found.cores, 64)
        gpus = [f"{gpu.name}, {_memory_of(gpu)}, {_link_of(gpu)}" for gpu in found.gpus]
        ram = f"{sold(found.ram_bytes)}, read at {self.ram_bytes_per_s / GB:.3g} GB/s"
        lines = [("CPU", f"{found.cpu}, {counted(found.cores, 'core')}")]
        lines += [("GPU", text) for text in gpus or ["none found"]]
        lines.append(("RAM", f"{ram} by {counted(threads, 'thread')} (measured)"))
        if self.weights_per_s:
            lines.append(("kernel", f"{self.weights_per_s / GB:.3g} billion 4-bit weights/s (llama.cpp's, measured)"))
        if self.disk:
            lines.append(("disk", f"of {self.folder.resolve()}: {_in_words(self.disk)}"))
        return lines

    def document(self) -> dict[str, object]:
        """Return the detected and measured values, for JSON."""
        disk = {"folder": str(self.folder.resolve()), **self.disk._asdict()} if self.disk else None
        gpus = [gpu._asdict() for gpu in self.found.gpus]
        found = {"cpu": self.found.cpu, "cores": self.found.cores, "ram_bytes": self.found.ram_bytes, "gpus": gpus}
        measured = {"ram_bytes_per_s": self.ram_bytes_per_s, "weights_per_s": self.weights_per_s or None}
        return {"found": found, "measured": measured | {"disk": disk}}


def here(folder: Path = Path(), said: Mapping[str, Any] | None = None) -> Machine:
    """Return this machine, with the disk of `folder`. Raises ConfigError if its memory size is unknown.

    `said` are options of `assembled` that override detected values.
    """
    return surveyed(folder, said).machine


def surveyed(folder: Path = Path(), said: Mapping[str, Any] | None = None) -> Survey:
    """Look at this machine and measure it within ten seconds. Raises ConfigError if the size of its RAM is unknown."""
    said = {name: text for name, text in (said or {}).items() if text}
    found = detected()
    ram, weights = measured_ram(found.cores), 0.0 if said.get("cores") else kernel_rate_here()
    disk, remark = measured_disk(folder)
    cores = Cores(max(1, found.cores // found.threads), found.kind, weights)
    parts = {"ram": f"{found.ram_bytes}B", "ram_rate": f"{int(ram)}B/s", "cores": f"{cores.many}x{cores.kind}"}
    if disk:
        parts["disk"] = f"{int(disk.bytes_per_s)}B/s"
    gpu, remarks = _gpu_parts(found.gpus)
    busy = _busy(found.cores)
    disturbed = [busy] if busy and not (said.get("ram_rate") and said.get("disk")) else []
    made = assembled(**dict[str, Any](parts | gpu | said))
    of_cpu = made.platform.cpu or made.platform.compute
    if weights and made.cores and isinstance(of_cpu, Roofline):
        made = made.with_cpu(of_cpu.kv_bytes_per_s or of_cpu.memory_bytes_per_s, cores)
    if disk and not said.get("disk"):
        made = _with_disk(made, disk)
    named = f"{_chosen(found.gpus).name if found.gpus else found.cpu}"
    platform = made.platform.model_copy(
        update={
            "name": "here",
            "summary": f"{named}, {counted(found.cores, 'core')}, {sold(found.ram_bytes)} of RAM",
            "source": _source(made, disk),
        }
    )
    if made.cores and not (weights or said.get("cores")):
        by = f"{made.cores.decoded() / GB:.3g} billion weights/s, by {made.cores.many} cores of kind {made.cores.kind}"
        remarks.append(f"the CPU decodes {by}; llama.cpp's test-backend-ops on the PATH is measured (--cores)")
    assumed = (*disturbed, *found.remarks, *remarks, *filter(None, [remark]), *made.assumed)
    return Survey(made._replace(platform=platform, assumed=assumed), found, ram, disk, folder, weights)


def _busy(cores: int) -> str:
    """Return a remark if other work ran during the measurements, else ""."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return ""
    if load <= BUSY * cores:
        return ""
    on = counted(cores, "core")
    return f"{DISTURBED} (load {load:.1f} on {on}), RAM and disk may be faster (--ram-rate, --disk)"


def _source(made: Machine, disk: Disk | None) -> str:
    measured = "RAM and disk measured" if disk else "RAM measured, the disk assumed"
    card = f"; compute of the card: {made.platform.source.partition(';')[0]}" if made.kind != "cpu" else ""
    return f"{system.node() or 'this machine'}: {measured}{card}"


def _with_disk(made: Machine, disk: Disk) -> Machine:
    """Return the machine with the latency and the readers that were measured."""
    measured = {"latency_ns": disk.latency_ns, "depth": LANES}
    platform = made.platform
    if platform.tiers:
        changed = {"tiers": (*platform.tiers[:-1], platform.tiers[-1].model_copy(update=measured))}
    else:
        changed = {"links": tuple(link.model_copy(update=measured) for link in platform.links)}
    return made._replace(platform=platform.model_copy(update=changed), disk_latency_ns=disk.latency_ns)


def _chosen(gpus: tuple[Gpu, ...]) -> Gpu:
    """Return the GPU of the most memory, the first of equal ones."""
    return max(gpus, key=lambda gpu: gpu.vram_bytes)


def _gpu_parts(gpus: tuple[Gpu, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the options that describe the GPU of the most memory, and remarks."""
    if not gpus:
        return {}, []
    gpu = _chosen(gpus)
    remarks = [f"{counted(len(gpus) - 1, 'more GPU')} left out: one computes"] if len(gpus) > 1 else []
    parts = {"vram": f"{gpu.vram_bytes}B"} if gpu.vram_bytes else {}
    known = recognised(gpu.name, gpu.vram_bytes)
    if known is None:
        return parts, [*remarks, f"{gpu.name} is in no table (--gpu names a card like it)"]
    parts["gpu"] = known.card.name
    if not known.is_exact:
        remarks.append(f"{gpu.name} is in no table and taken for a {known.card.name} (--gpu)")
    if known.card.is_unified:
        return {"gpu": known.card.name}, remarks
    try:
        link_rate(gpu.link)
    except ConfigError:
        seen = f"PCIe {gpu.link} has no measured rate" if gpu.link else "its link is unknown"
        return parts, [*remarks, f"{seen}: the card's own PCIe {known.card.pcie} is assumed (--link)"]
    return parts | {"link": gpu.link}, remarks


def _memory_of(gpu: Gpu) -> str:
    return sold(gpu.vram_bytes) if gpu.vram_bytes else "the machine's memory"


def _link_of(gpu: Gpu) -> str:
    return f"PCIe {gpu.link.replace('x', ' x')}" if gpu.link else "no link known" if gpu.vram_bytes else "no link"


def _in_words(disk: Disk) -> str:
    how = "past the page cache" if disk.past_cache else "through the page cache"
    return (
        f"{disk.bytes_per_s / GB:.3g} GB/s by {LANES} readers of {READ_BYTES >> 20} MiB, "
        f"{disk.one_reader / GB:.3g} by one, {disk.latency_ns / 1000:.0f} us for a page (measured {how})"
    )


# -- written


def as_file(made: Machine) -> str:
    """Return a machine as a platform file, with comments on assumed values and how to change them."""
    comments = [f"assumed: {each}" for each in made.assumed]
    if made.platform.tiers:
        comments += [
            "[[tiers]]: RAM that holds the experts read from the disk so far; the CPU reads it (--miss cpu). If all",
            "experts fit into RAM and are read before the first token, remove that table and `tier` of [cpu].",
        ]
    return "".join(f"# {' '.join(line.split())}\n" for line in comments) + as_toml(made.platform)


# -- Short measurements: how fast the cores read memory, and a disk the bytes of an expert.
#
# The disk is read past the page cache where the system allows it, in a file of `FILE_BYTES` that has no name where the
# system allows that, and is removed in any case. Both together take less than ten seconds.

RAM_SECONDS, DISK_SECONDS, WRITE_SECONDS = 1.0, 1.0, 4.0  #: of memory, of each of two measurements, of the file
ARRAY_BYTES = 64 << 20  #: read by each thread
FILE_BYTES, LEAST_BYTES = 512 << 20, 64 << 20  #: of the file, and of what a slow disk must have written in time
READ_BYTES, PAGE = 4 << 20, 4096  #: of an expert, and of the read whose time is the latency
LANES = 4  #: readers at once
ENOUGH = 4  #: times FILE_BYTES must be free
SEVERAL = 32  #: reads of a page


class Disk(NamedTuple):
    """Measured reads of a folder's disk."""

    bytes_per_s: float  #: of LANES readers
    one_reader: float  #: bytes/s of one
    latency_ns: int  #: median of a page
    past_cache: bool  #: False if the page cache may have answered


def measured_ram(threads: int, seconds: float | None = None) -> float:
    """Return the bytes/s at which `threads` threads read memory: the best of several rounds of `seconds`."""
    threads = max(1, min(threads, 64))
    arrays = [np.ones(ARRAY_BYTES // 8, np.int64) for _ in range(threads)]
    best, end = 0.0, time.monotonic() + (RAM_SECONDS if seconds is None else seconds)
    with ThreadPoolExecutor(threads) as pool:
        while not best or time.monotonic() < end:
            began = time.monotonic()
            list(pool.map(np.max, arrays))  # the fastest of numpy's whole reads; threads run side by side in it
            best = max(best, len(arrays) * ARRAY_BYTES / max(time.monotonic() - began, 1e-9))
    return best


def measured_disk(folder: Path) -> tuple[Disk | None, str]:
    """Return the read rates of a folder's disk, and a remark: why they are missing, or what may distort them."""
    try:
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize < ENOUGH * FILE_BYTES:
            return None, f"the disk was not measured: less than {ENOUGH * FILE_BYTES / GB:.3g} GB are free (--disk)"
        with _file(folder) as (stream, size, direct):
            disk = _read(stream.fileno(), size, direct)
    except (OSError, AttributeError) as wrong:
        reason = getattr(wrong, "strerror", None) or "the system has no direct reads"
        return None, f"the disk was not measured: {reason} (--disk)"
    return disk, "" if direct else "the disk was read through the page cache and may be slower (--disk)"


@contextmanager
def _file(folder: Path) -> Iterator[tuple[IO[bytes], int, bool]]:
    """Write an unnamed file to disk; return the file, its bytes, and whether it can be read past the page cache."""
    with TemporaryFile(dir=folder) as stream:
        block, size = np.random.default_rng(0).bytes(READ_BYTES), 0  # a disk that compresses gains nothing
        end = time.monotonic() + WRITE_SECONDS
        while size < FILE_BYTES and (size < min(LEAST_BYTES, FILE_BYTES) or time.monotonic() < end):
            stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            size += READ_BYTES
        yield stream, size, _goes_past_cache(stream.fileno())


def _goes_past_cache(file: int) -> bool:
    """Make reads of a file go past the page cache, where the system and the file system allow it."""
    with suppress(OSError, ImportError, AttributeError):
        import fcntl

        if no_cache := getattr(fcntl, "F_NOCACHE", 0):  # macOS
            fcntl.fcntl(file, no_cache, 1)
        else:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(file, [page], 0)  # some file systems take the flag and refuse the read
        return True
    with suppress(OSError, ImportError, AttributeError):
        import fcntl

        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    with suppress(OSError, AttributeError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return False


def _read(file: int, size: int, direct: bool) -> Disk:
    places = np.random.default_rng(1).permutation(size // READ_BYTES).tolist()
    several = _rate(file, places, LANES)
    one = _rate(file, places[::-1], 1)
    pages = np.random.default_rng(2).permutation(size // PAGE)[:SEVERAL].tolist()
    times = []
    with mmap.mmap(-1, PAGE) as buffer:
        for page in pages:
            began = time.perf_counter_ns()
            os.preadv(file, [buffer], page * PAGE)
            times.append(time.perf_counter_ns() - began)
    return Disk(max(several, one), one, int(statistics.median(times)), direct)


def _rate(file: int, places: list[int], lanes: int) -> float:
    """Return the bytes/s of readers at the given offsets, until one reaches its end or the time is over."""
    end = time.monotonic() + DISK_SECONDS

    def lane(first: int) -> int:
        read = 0
        with mmap.mmap(-1, READ_BYTES) as buffer:  # begins at a page, as reads past the page cache require
            for place in places[first::lanes]:
                read += os.preadv(file, [buffer], place * READ_BYTES)
                if time.monotonic() > end:
                    break
        return read

    began = time.perf_counter_ns()
    with ThreadPoolExecutor(lanes) as pool:
        total = sum(pool.map(lane, range(lanes)))
    return total * SECOND / max(time.perf_counter_ns() - began, 1)
