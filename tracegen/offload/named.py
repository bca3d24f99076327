"""A slow tier and its throttle as options name them; read before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from simulator.capacity import parse_size
from simulator.errors import ConfigError


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
