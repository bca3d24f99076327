"""A slow tier and its throttle as options name them; read before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from moereplay.results.outputs import check_output
from moereplay.results.result import ResultError
from moereplay.simulator.capacity import parse_size
from moereplay.simulator.errors import ConfigError

COMPUTES = re.compile(r"cpu|cuda(:\d{1,3})?")


class Named(NamedTuple):
    """Where experts lie."""

    folder: Path | None  #: on a disk; None is main memory
    buffered: bool = False  #: read through the page cache


def slow_tier_named(text: str) -> Named:
    """Of disk:DIR, disk:DIR:buffered or pinned. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    folder = rest.removesuffix(":buffered")
    if kind == "disk" and folder:
        return Named(Path(folder), rest.endswith(":buffered"))
    if text != "pinned":
        raise ConfigError(f"--slow-tier {text!r} is unknown; write disk:DIR, disk:DIR:buffered or pinned")
    return Named(None)


def throttle_named(text: str) -> float | None:
    """Bytes per second of 400MB/s; None for none. Raises ConfigError."""
    word = text.strip()
    size = parse_size(word.removesuffix("/s"))
    if word != "none" and (not size or not word.endswith("/s")):
        raise ConfigError(f"--throttle {word!r} is no rate; write 400MB/s, 1GiB/s or none")
    return float(size) if size else None


def require_place(named: Named, device: str) -> None:
    """Raises ConfigError for a folder that cannot be made or written, and for a device that is none."""
    if not COMPUTES.fullmatch(device):
        raise ConfigError(f"--device {device}: no such device; write cpu, cuda or cuda:1")
    if named.folder is None:
        return
    try:
        check_output(named.folder / "experts.bin")
    except ResultError as refusal:
        raise ConfigError(f"--slow-tier disk:{named.folder}: {refusal}") from None
