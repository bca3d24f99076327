"""A part of a trace: its first layers, and some tokens of its first request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.results.errors import ResultError, check_output
from moereplay.simulator.compiled.engine import can_step
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import rate_of
from moereplay.simulator.replay import Plan, plan
from moereplay.traces.dense import resolved
from moereplay.traces.drafts import parse_drafts
from moereplay.traces.schema import Geometry, Request, Trace, memory_trace
from moereplay.traces.texts import hint

PER_LAYER = ("weights", "logits", "residency")
PER_TOKEN = ("token_ids", "nll")


def tokens_of(trace: Trace, layers: int | None, first: int, last: int, prompt: int = 0) -> Trace:
    """Return tokens [first, last) of request 0 as a request, its first `prompt` in one pass, at the first `layers`.

    Raises ConfigError if the trace has fewer.
    """
    request = trace.request(0)
    here, most = len(request.chosen), trace.geometry.layers
    if last > here:
        raise ConfigError(f"the first request of the trace has {here} tokens, not {last}; pass a smaller --tokens")
    if layers is not None and layers > most:
        raise ConfigError(f"invalid --layers {layers}: expected at most {most}, the layers of the trace")
    kept = most if layers is None else layers
    others: dict[str, Any] = {
        name: _cut(getattr(request, name), first, last, kept) for name in (*PER_LAYER, *PER_TOKEN)
    }
    chosen = request.chosen[first:last, :kept]
    look = tuple(each[first:last, :kept] for each in request.lookahead)
    header = trace.header.model_copy(update={"geometry": shallow(trace.geometry, kept)})
    bias = None if trace.router_bias is None else trace.router_bias[:kept]
    return memory_trace(header, [Request(chosen, prompt, lookahead=look, **others)], bias)


def _cut(rows: np.ndarray | None, first: int, last: int, layers: int) -> np.ndarray | None:
    """Return rows (T, ...) or (T, L, ...) of these tokens and layers."""
    if rows is None or rows.ndim == 1:
        return rows if rows is None else rows[first:last]
    return rows[first:last, :layers]


def shallow(geometry: Geometry, layers: int) -> Geometry:
    """Return the geometry of the first layers."""
    others = {bits: sizes[:layers] for bits, sizes in geometry.bytes_by_bits.items()}
    cut = {"layers": layers, "expert_bytes": geometry.expert_bytes[:layers], "bytes_by_bits": others}
    if (whole := resolved(geometry, "")).head_bytes is not None:
        cut |= {"dense_layer_bytes": whole.dense_layer_bytes[:layers], "head_bytes": whole.head_bytes, "dense_bytes": 0}
    return geometry.model_copy(update=cut)


# -- The plan of a measured run, and what refuses it without torch.


def planned(trace: Trace, config: ReplayConfig) -> Plan:
    """Raises ConfigError or PolicyError for what cannot be replayed, and for platforms that no real run has."""
    if parse_drafts(config.draft).recorded:
        raise ConfigError("--draft recorded: not possible in a measured run of a part of the trace; pass --draft N")
    if config.arrive:
        raise ConfigError("--arrivals: not possible in a measured run, which has one request: expected all")
    ready = plan(trace, config)
    if ready.resident:
        raise ConfigError("--resident: not possible in a measured run; --warm FILE fills the cache at the start")
    if len(ready.machine.links) > 1 or ready.machine.tiers:
        raise ConfigError(f"platform {ready.machine.name}: expected one link and no lower tier in a measured run")
    return ready


AUTO, COMPILED, REFERENCE = WAYS = ("auto", "compiled", "reference")


def way_of(ready: Plan, wanted: str = AUTO) -> str:
    """Return the fastest way that this run allows, or the requested one. Raises ConfigError if it is not possible."""
    if wanted not in WAYS:
        raise ConfigError(f"unknown --decisions {wanted!r}: {hint(wanted, WAYS)}")
    steps = can_step(ready.spec(True))
    if wanted == COMPILED and not steps:
        raise ConfigError(
            f"--decisions {wanted} cannot run misses that a CPU computes, nor prices of platform {ready.machine.name} "
            "that are more than a number; pass --decisions reference"
        )
    return REFERENCE if wanted == REFERENCE or not steps else COMPILED


# -- A slow tier and its throttle as options name them; read before torch is imported.

COMPUTES = re.compile(r"cpu|cuda(:\d{1,3})?")


class Named(NamedTuple):
    """A slow tier as an option names it."""

    folder: Path | None  #: on a disk; None is main memory
    buffered: bool = False  #: read through the page cache


def slow_tier_named(text: str) -> Named:
    """Parse disk:DIR, disk:DIR:buffered or pinned. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    folder = rest.removesuffix(":buffered")
    if kind == "disk" and folder:
        return Named(Path(folder), rest.endswith(":buffered"))
    if text != "pinned":
        raise ConfigError(f"invalid --slow-tier {text!r}: expected disk:DIR, disk:DIR:buffered or pinned")
    return Named(None)


def throttle_named(text: str) -> float | None:
    """Parse a rate such as 400MB/s to bytes per second; None for `none`. Raises ConfigError."""
    return None if text.strip() == "none" else rate_of(text, "throttle", "a rate such as 400MB/s or 1GiB/s, or none")


def require_place(named: Named, device: str) -> None:
    """Raises ConfigError for a folder that cannot be made or written, and for a device that is none."""
    if not COMPUTES.fullmatch(device):
        raise ConfigError(f"invalid --device {device!r}: expected cpu, cuda or cuda:1")
    if named.folder is None:
        return
    try:
        check_output(named.folder / "experts.bin")
    except ResultError as refusal:
        raise ConfigError(f"--slow-tier disk:{named.folder}: {refusal}") from None
