"""Short measurements of this machine: how fast its cores read memory, and its disk the bytes of an expert.

The disk is read past the page cache where the system allows it, in a file of `FILE_BYTES` that has no name where the
system allows that, and is removed in any case. Both together take less than ten seconds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np

from moereplay.traces.units import GB, SECOND

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
