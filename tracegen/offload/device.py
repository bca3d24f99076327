"""Name of a machine in a measurement, and its free memory."""

from __future__ import annotations

import mmap
import platform as this
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moereplay.simulator.errors import ConfigError


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
