"""How much of a fast memory is left for experts, beside dense weights, KV cache and what the engine itself takes."""

from __future__ import annotations

from typing import NamedTuple

from moereplay.simulator.capacity import dense_size, parse_size
from moereplay.simulator.errors import ConfigError
from moereplay.traces.dense import assumption, dense_of, recorded, resolved, with_bits, with_bytes
from moereplay.traces.geometry import as_known
from moereplay.traces.schema import Geometry, Trace, TraceError, shown

CONTEXT = 4096  #: positions in the KV cache, assumed where nobody says
RUNTIME = 500_000_000  #: bytes, assumed where nobody says: buffers, the engine's code, an accelerator's context


class Memory(NamedTuple):
    """A fast memory, divided; all in bytes."""

    total_bytes: int
    dense_bytes: int  #: weights of everything that is no routed expert; `traces/dense.py` says which are counted
    kv_bytes: int
    runtime_bytes: int

    @property
    def cache_bytes(self) -> int:
        """What is left for experts, 0 if nothing is."""
        return max(0, self.total_bytes - self.dense_bytes - self.kv_bytes - self.runtime_bytes)


def sized(geometry: Geometry, model: str, dense: str = "", dense_bits: str = "") -> Geometry:
    """Return the geometry of the model so called, with the bytes of its dense weights as far as they are stated.

    `dense` and `dense_bits` are the settings of those names; they win over what a trace says. Raises ConfigError.
    """
    try:
        if dense_bits:
            geometry = with_bits(geometry, model, dense_bits)
        return resolved(with_bytes(geometry, dense_size(dense)) if dense else geometry, model)
    except (TraceError, ValueError) as wrong:
        raise ConfigError(str(wrong)) from None


def divided(trace: Trace, total: str, context: int, runtime: str = "", dense: str = "", dense_bits: str = "") -> Memory:
    """The memory `total` of a machine that runs the trace's model with `context` positions in its KV cache.

    Raises ConfigError for what is no amount of bytes, and where not one expert fits, with what is missing.
    """
    about = trace.header.provenance
    geometry = sized(as_known(trace.geometry, about.model), about.model, dense, dense_bits)
    dense_bytes = dense_of(geometry).resident
    taken = size_of(runtime, "runtime") if runtime else RUNTIME
    found = Memory(size_of(total, "memory"), dense_bytes, geometry.kv_bytes * context, taken)
    largest = max(geometry.expert_bytes)
    if found.cache_bytes < largest:
        said = assumption(geometry, recorded(about))
        lacking = found.dense_bytes + found.kv_bytes + found.runtime_bytes + largest - found.total_bytes
        raise ConfigError(
            f"{total} hold {_spelled(found)} and no expert of {largest:,} bytes: {lacking / 1e9:.4g} GB are missing; "
            "give more memory, a shorter --context, or fewer bits per weight: --dense or --dense-bits here, "
            f"--expert-bits where the trace is made{f' ({said})' if said else ''}"
        )
    return found


def kv_bytes_of(trace: Trace) -> int:
    """Of KV cache that one position adds, by the trace or by the model that it names; 0 where neither says."""
    return as_known(trace.geometry, trace.header.provenance.model).kv_bytes


def size_of(text: str, what: str) -> int:
    """Bytes of `8GB` or `7.5GiB`. Raises ConfigError naming what it is of."""
    size = parse_size(text)
    if size is None:
        raise ConfigError(f"--{what} {shown(text)!r} is no size; write for example 8GB or 7.5GiB")
    return int(size)


def _spelled(memory: Memory) -> str:
    named = {"dense weights": memory.dense_bytes, "KV cache": memory.kv_bytes, "runtime": memory.runtime_bytes}
    return ", ".join(f"{size / 1e9:.4g} GB of {name}" for name, size in named.items())
