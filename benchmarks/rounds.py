"""Compare variants fairly on a shared machine: in turns, with ratios within a round; describe the machine."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

Spent = Mapping[str, list[float]]
PACKAGES = ("numpy", "numba", "llvmlite", "simpy", "libcachesim")


def in_turns(variants: Mapping[str, Callable[[], float]], rounds: int) -> Spent:
    """Run variants in a new random order each round, after one warm-up; return their times by round."""
    spent: dict[str, list[float]] = {name: [] for name in variants}
    draw = random.Random(0)
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name in draw.sample(list(variants), len(variants)):
            spent[name].append(variants[name]())
    return spent


def compared(spent: Spent, over: str, under: str) -> dict[str, Any]:
    """Compare two variants: both medians in ns per access, and the median, least and greatest ratio."""
    ratios = [a / b for a, b in zip(spent[over], spent[under], strict=True)]
    return {
        "over": over,
        "under": under,
        "over_ns": median(spent[over]),
        "under_ns": median(spent[under]),
        "ratio": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that figures hold for."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        **{package: _version(package) for package in PACKAGES},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
