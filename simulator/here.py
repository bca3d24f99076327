"""This machine: what the system says of it, and short measurements of its memory and disk.

RAM is read by as many threads as there are cores, and the disk at the size of an expert, past the page cache where the
system allows it. Together that takes less than ten seconds and writes at most `FILE_BYTES`, in a file that is removed.
"""

from __future__ import annotations

import mmap
import os
import platform as system
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np

from moereplay.simulator.cards import Card, card, link_rate
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled
from moereplay.traces.units import GB

RAM_SECONDS, DISK_SECONDS = 1.0, 2.0
ARRAY_BYTES = 64 << 20  #: read by each thread
FILE_BYTES = 512 << 20
READ_BYTES = 4 << 20  #: of a read, which is a multiple of a disk's block
LANES = 4  #: reads at once
ENOUGH = 4  #: times FILE_BYTES must be free
TIMEOUT_S = 5


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    vram_bytes: int
    link: str  #: PCIe generation and lanes, "" if unknown


class Found(NamedTuple):
    """What the system says."""

    cpu: str
    cores: int
    ram_bytes: int
    gpus: tuple[Gpu, ...]


def here(folder: Path = Path()) -> Machine:
    """Return this machine, with the disk that `folder` is on. Raises ConfigError if its memory cannot be told."""
    found = detected()
    ram = measured_ram(found.cores)
    disk, unmeasured = measured_disk(folder)
    parts = {"ram": f"{found.ram_bytes}B", "ram_rate": f"{int(ram)}B/s", "cores": str(found.cores)}
    if disk:
        parts["disk"] = f"{int(disk)}B/s"
    gpu, assumed = _gpu_parts(found.gpus)
    made = assembled(**parts, **gpu)
    notes = (*assumed, *([unmeasured] if unmeasured else []), *(each for each in made.assumed if not gpu.get("vram")))
    named = f"{found.gpus[0].name if found.gpus else found.cpu}"
    platform = made.platform.model_copy(
        update={
            "name": "here",
            "summary": f"{named}, {found.cores} cores, {found.ram_bytes / GB:.3g} GB of RAM",
            "source": f"detected on {system.node() or 'this machine'}; RAM and disk measured, compute assumed",
        }
    )
    return made._replace(platform=platform, assumed=notes)


def _gpu_parts(gpus: tuple[Gpu, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the options that describe the first GPU, and what was assumed."""
    if not gpus:
        return {}, ()
    first = gpus[0]
    others = (f"{len(gpus) - 1} more GPUs are left out",) if len(gpus) > 1 else ()
    parts = {"vram": f"{first.vram_bytes}B"} if first.vram_bytes else {}
    known = _card_of(first.name)
    if known is None:
        return parts, (*others, f"{first.name} is in no table: a card of its size is assumed (--gpu)")
    parts["gpu"] = known.name
    return parts | ({"link": first.link} if first.link else {}), others


def _card_of(name: str) -> Card | None:
    """Return the card of a driver's name: `NVIDIA GeForce RTX 4060 Laptop GPU`, `NVIDIA A100-SXM4-80GB`."""
    plain = re.sub(r"\b(GPU|Graphics|Generation|Edition)\b", "", name).replace("-", " ")
    words = plain.split()
    for last in range(len(words), 0, -1):
        with suppress(ConfigError):
            return card(" ".join(words[:last]))
    return None


# -- what the system says


def detected() -> Found:
    """Return CPU, cores, RAM within the limits of a container, and GPUs. Raises ConfigError if RAM is unknown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Found(_cpu_name(), cores, _ram_bytes(), (*_nvidia(), *_apple()))


def _cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
        if found:
            return found[1].strip()[:80]
    return system.processor() or system.machine()


def _ram_bytes() -> int:
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            sizes.append(int(Path(limit).read_text()))
    if not sizes:
        raise ConfigError("the size of this machine's memory cannot be told; pass --ram 64GB")
    return min(sizes)


def _nvidia() -> Iterator[Gpu]:
    """Yield the GPUs that nvidia-smi lists; none if it is missing or fails."""
    query = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    for line in _said(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]).splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[1].isdecimal():
            continue
        link = f"{parts[2]}.0x{parts[3]}" if parts[2].isdecimal() and parts[3].isdecimal() else ""
        try:
            link_rate(link)
        except ConfigError:
            link = ""
        yield Gpu(parts[0][:80], int(parts[1]) << 20, link)


def _apple() -> Iterator[Gpu]:
    """Yield the GPU of an Apple processor, which has no memory of its own."""
    if system.system() == "Darwin":
        name = _said(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()
        if name.startswith("Apple"):
            yield Gpu(name[:80], 0, "")


def _said(command: list[str]) -> str:
    """Return what a command prints; nothing if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# -- measurements


def measured_ram(threads: int, seconds: float = RAM_SECONDS) -> float:
    """Return the bytes/s at which so many threads read memory, the best of the rounds of `seconds`."""
    arrays = [np.ones(ARRAY_BYTES // 8) for _ in range(max(1, min(threads, 64)))]
    best = 0.0
    with ThreadPoolExecutor(len(arrays)) as pool:
        end = time.monotonic() + seconds
        while not best or time.monotonic() < end:
            began = time.monotonic()
            list(pool.map(np.sum, arrays))
            best = max(best, len(arrays) * ARRAY_BYTES / (time.monotonic() - began))
    return best


def measured_disk(folder: Path, seconds: float = DISK_SECONDS) -> tuple[float | None, str]:
    """Return the bytes/s of reads of the size of an expert, and why there is none, or what it may hold."""
    try:
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize < ENOUGH * FILE_BYTES:
            return None, f"the disk was not measured: less than {ENOUGH * FILE_BYTES / GB:.3g} GB are free (--disk)"
        with _file(folder) as (stream, direct):
            rate = _read_rate(stream.fileno(), seconds)
    except OSError as wrong:
        return None, f"the disk was not measured: {wrong.strerror or wrong} (--disk)"
    return rate, "" if direct else "the disk was read through the page cache and may be slower (--disk)"


@contextmanager
def _file(folder: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """Open a nameless file of FILE_BYTES, written through, and say whether it is read past the page cache."""
    with TemporaryFile(dir=folder) as stream:
        block = np.random.default_rng(0).bytes(READ_BYTES)
        for _ in range(FILE_BYTES // READ_BYTES):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
        direct = False
        with suppress(OSError, ImportError, AttributeError):
            import fcntl

            fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) | os.O_DIRECT)
            direct = True
        if not direct:
            with suppress(OSError, AttributeError):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield stream, direct


def _read_rate(file: int, seconds: float) -> float:
    """Return the bytes/s of LANES readers at places in a fixed random order."""
    places = np.random.default_rng(1).permutation(FILE_BYTES // READ_BYTES).tolist()
    end = time.monotonic() + seconds

    def lane(first: int) -> int:
        read = 0
        with mmap.mmap(-1, READ_BYTES) as buffer:  # aligned to pages, as reads past the page cache require
            for place in places[first::LANES]:
                read += os.preadv(file, [buffer], place * READ_BYTES)
                if time.monotonic() > end:
                    break
        return read

    began = time.monotonic()
    with ThreadPoolExecutor(LANES) as pool:
        total = sum(pool.map(lane, range(LANES)))
    return total / (time.monotonic() - began)
