"""What a replay reports: integer counters by name, per (layer, phase) and per request. Ratios are derived when read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from traces.schema import canonical

#: Every counter with its definition; `access` is a demanded expert of a step, after the union over tokens.
COUNTERS: dict[str, str] = {
    "accesses": "demanded experts summed over steps",
    "assignments": "(token, expert) pairs that the router chose, before routing policies and the union",
    "hits": "accesses whose expert was resident at look-up",
    "late": "accesses whose expert was in flight",
    "misses": "accesses whose expert was absent; hits + late + misses = accesses",
    "compulsory": "misses of experts never resident since start or reset",
    "collisions": "misses of experts whose latest eviction was in this same pass",
    "capacity": "the other misses; compulsory + collisions + capacity = misses",
    "prefetch_issued": "entries into the prefetch queue",
    "prefetch_started": "prefetches that reached the link",
    "prefetch_cancelled": "queued prefetches overtaken by their gate",
    "prefetch_dropped": "prefetches that found no room or were declined",
    "prefetch_hits": "hits that are the first use since a prefetch brought the expert",
    "prefetch_used": "prefetch hits and lates",
    "predicted": "experts named by the prefetch policy, each naming",
    "predicted_demanded": "of those, how many the target step demanded",
    "predictable": "how often these could have been: per access, the gates before it that may name its layer, "
    "or its namings if they are more",
    "evictions": "victims",
    "insertions": "arrivals that became resident",
    "declined": "demands streamed through the staging buffer",
    "dropped": "misses skipped by the miss policy",
    "substituted": "assignments given to another, resident expert",
    "cpu_executed": "misses executed on the CPU",
    "low_precision": "used experts below the highest precision tier",
    "bytes_demand": "bytes of demand transfers, charged when they start",
    "bytes_prefetch": "bytes of prefetch transfers, charged when they start",
    "bytes_wasted": "bytes prefetched and evicted before any use",
    "bytes_unused_at_end": "bytes prefetched and still unused at the end",
    "link_busy_ns": "time of the transfers, charged when they start",
    "dense_ns": "dense compute, including what a pass costs before layer 0",
    "expert_ns": "expert compute",
    "stall_ns": "per step end - gate - expert compute",
    "assignments_kept": "assignments of the router's own choice that were executed as chosen",
    "mass": "gate weight of the router's own choice, in 2**-24",
    "mass_kept": "of that, the part executed as chosen",
    "mass_low_precision": "of what was kept, the part executed below the highest precision tier",
    "mass_substituted": "gate weight of the router's own choice in whose place another expert was executed",
    "mass_dropped": "the rest of it, executed by nobody; mass_kept + mass_substituted + mass_dropped = mass",
    "rank_displacement": "sum over assignments of how far their rank is from the slot they fill",
    "variation": "sum over tokens and layers of half |w - w'| between original and used mixture, in 2**-24",
}
#: Counters that results written by earlier versions lack; they are null there.
ADDED = ("predictable",)
#: In the metadata of a Parquet file: sha256 of the file, with zeros where the digest stands.
FILE_DIGEST = "moereplay.sha256"
NO_DIGEST = "0" * 64
LIFETIME_BUCKETS = 24  #: bucket b counts copies evicted after [2**(b-1), 2**b) steps; bucket 0 within their own step

Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """One line of the event log; t1 = t0 for what takes no time."""

    t0: int
    t1: int
    kind: str
    step_pass: int
    layer: int
    expert: int
    precision: int
    cause: str


@dataclass(frozen=True)
class Result:
    """A replay's outcome; the same trace, configuration and version give the same."""

    config: Row
    totals: Row
    per_layer: list[Row]
    per_request: list[Row]
    about: Row
    events: list[Event] = field(default_factory=list)

    def to_json(self) -> Row:
        """The document that `replay --json` prints."""
        return {
            "config": self.config,
            "about": self.about,
            "totals": self.totals,
            "per_layer": self.per_layer,
            "per_request": self.per_request,
        }


def row_digest(row: Row) -> str:
    """sha256 of a stored row without its digest: polars checks no page of a Parquet file that it reads."""
    content = {name: value for name, value in row.items() if name != "digest"}
    return hashlib.sha256(canonical(content)).hexdigest()


def with_file_digest(data: bytes) -> bytes:
    """A Parquet file that was written with the metadata {FILE_DIGEST: NO_DIGEST}, with its digest there."""
    place = _file_digest(data)
    if place is None:
        raise AssertionError("the file was written without a place for its digest")
    return data[: place[0]] + hashlib.sha256(data).hexdigest().encode() + data[place[1] :]


def is_damaged(data: bytes) -> bool:
    """Whether a file is not what its digest says; one without a digest is an older version's."""
    place = _file_digest(data)
    if place is None:
        return False
    blank = data[: place[0]] + NO_DIGEST.encode() + data[place[1] :]
    return hashlib.sha256(blank).hexdigest().encode() != data[slice(*place)]


def _file_digest(data: bytes) -> tuple[int, int] | None:
    """Where the digest begins and ends: two bytes after its name, for the type and the length of a text in Thrift."""
    name = data.rfind(FILE_DIGEST.encode())  # metadata stand behind all rows
    begin = name + len(FILE_DIGEST) + 2
    return None if name < 0 else (begin, begin + len(NO_DIGEST))
