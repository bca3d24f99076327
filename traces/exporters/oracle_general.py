"""libCacheSim's oracleGeneral: a record per access, with the next access of the same object.

24 bytes, little-endian: timestamp u32, object u64, bytes u32, next access i64 (github.com/1a1a11a/libCacheSim,
oracleGeneralBin.h). The next access is counted from 1 over the records, as in libCacheSim's own converter; -1 means
never. An object is an expert, layer * E + expert; the timestamp is the number of the pass. Records are in the order in
which a replay with contract `sequential` looks experts up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moereplay.traces.demand import Demand, demand_of
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.growing import VALUES_AT_ONCE
from moereplay.traces.schema import Geometry, Trace, TraceError
from moereplay.traces.units import NEVER

RECORD = np.dtype([("timestamp", "<u4"), ("object", "<u8"), ("bytes", "<u4"), ("next", "<i8")])
MOST = 2**32 - 1  #: of a timestamp, and of an object's bytes
NOBODY = -1


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Write every access of the schedule of passes, of all layers or of one."""
    geometry = trace.geometry
    if max(geometry.expert_bytes) > MOST:
        raise TraceError(f"an expert has {max(geometry.expert_bytes):,} bytes; oracleGeneral holds at most {MOST:,}")
    if options.layer is not None and options.layer >= geometry.layers:
        raise TraceError(f"--layer {options.layer}: the trace has layers 0 to {geometry.layers - 1}")
    demand = demand_of(trace, options.passes or "recorded")
    if len(demand.offsets) // geometry.layers > MOST:
        raise TraceError(f"more than {MOST:,} passes, and a timestamp has 32 bits; export fewer requests with --limit")
    written = 0
    with target.open() as file:
        for records in _records(demand, geometry, options.layer):
            file.write(records.tobytes())
            written += len(records)
    accesses = f"{written:,} accesses of {_objects(geometry, options.layer):,} experts"
    return Answer("cachesim {path} oracleGeneral lru 0.05,0.25,0.5", (f"{accesses}, an object each",))


def _objects(geometry: Geometry, layer: int | None) -> int:
    return geometry.experts * (geometry.layers if layer is None else 1)


def _records(demand: Demand, geometry: Geometry, layer: int | None) -> Iterator[np.ndarray]:
    """Yield blocks of records, of one `layer` if given."""
    sizes, place = geometry.rows.bytes, _Places(demand, geometry.layers, layer)
    for first in range(0, len(demand.expert), VALUES_AT_ONCE):
        last = min(first + VALUES_AT_ONCE, len(demand.expert))
        at = np.arange(first, last)
        number, of = np.divmod(place.step(at), geometry.layers)
        records = np.empty(len(at), RECORD)
        x = of * geometry.experts + demand.expert[first:last]
        records["timestamp"], records["bytes"], records["object"] = number, sizes[x], x
        records["next"] = place.following(demand.next_use[first:last])
        yield records if layer is None else records[of == layer]


class _Places:
    """Positions in the demand, with their positions in the file."""

    def __init__(self, demand: Demand, layers: int, layer: int | None) -> None:
        self.offsets, self.layers, self.layer = np.asarray(demand.offsets), layers, layer
        if layer is not None:
            counts = self.offsets[layer + 1 :: layers] - self.offsets[layer::layers][: len(self.offsets) // layers]
            self.before = np.concatenate([[0], np.cumsum(counts)])  #: accesses of the layer in earlier passes

    def step(self, at: np.ndarray) -> np.ndarray:
        """Return the step, (pass, layer), of each position."""
        return np.searchsorted(self.offsets, at, "right") - 1

    def following(self, next_use: np.ndarray) -> np.ndarray:
        """Return the records of next uses, from 1, or NOBODY; entries of other layers are undefined."""
        if self.layer is None:
            return np.where(next_use == NEVER, NOBODY, next_use + 1)
        step = self.step(np.where(next_use == NEVER, 0, next_use))
        at = self.before[step // self.layers] + next_use - self.offsets[step]
        return np.where(next_use == NEVER, NOBODY, at + 1)


ORACLE_GENERAL = Exporter(
    name="oracle-general",
    summary="libCacheSim's binary trace, with each access's next one: object = layer x experts + expert, size = bytes",
    writes="FILE",
    write=write,
    keeps=frozenset({"chosen"}),
    takes=frozenset({"layer", "passes"}),
)
