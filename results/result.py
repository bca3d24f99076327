"""The result of a replay: integer counters by name, per (layer, phase) and per request, without derived metrics.

Every counter is declared here once: name, unit, definition, and the rows that have it. Both engines store and report
them; the Parquet files, the tables of a sweep, the readers and the table in docs/semantics.md derive from it. `access`
is a demanded expert of a step, after the union over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import polars as pl


Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A line of the event log; t1 = t0 if it takes no time."""

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
    kinds: Mapping[str, str]  #: of each setting in `config`: a key of `results.schema.DTYPES`
    totals: Row
    per_layer: list[Row]
    per_request: list[Row]
    about: Row
    events: list[Event] = field(default_factory=list)

    def to_json(self) -> Row:
        """Return the document that `replay --json` prints."""
        return {
            "config": self.config,
            "about": self.about,
            "totals": self.totals,
            "per_layer": self.per_layer,
            "per_request": self.per_request,
        }

    def frame(self) -> pl.DataFrame:
        """Return one tidy row: settings, every counter, `time_ns`; bounds are null."""
        from moereplay.results.read import runs

        return runs(self._nested())

    def layers_frame(self) -> pl.DataFrame:
        """Return one tidy row per layer and phase ("prefill", "decode"); a phase without steps has no row."""
        from moereplay.results.read import layers

        return layers(self._nested())

    def _nested(self) -> pl.DataFrame:
        from moereplay.results.schema import nested

        return nested([self.to_json()], [None], self.kinds)


COUNT, BYTES, NS = "count", "bytes", "ns"
WEIGHT = "2**-24"  #: of a gate weight of 1
#: A row per layer and phase, a row per request; the totals have every counter.
Rows = Literal["layer", "request"]
BOTH: tuple[Rows, ...] = ("layer", "request")


@dataclass(frozen=True)
class Counter:
    """A sum of integers over a run."""

    name: str
    unit: str
    definition: str
    per: tuple[Rows, ...] = BOTH
    column: str = ""  #: in tables that also have settings, if it is not its name

    @property
    def heading(self) -> str:
        """The counter's column in tables that also have settings."""
        return self.column or self.name


_DECLARED = (
    Counter("accesses", COUNT, "demanded experts summed over steps"),
    Counter("assignments", COUNT, "(token, expert) pairs that the router chose, before routing policies and the union"),
    Counter("hits", COUNT, "accesses whose expert was resident at look-up"),
    Counter("late", COUNT, "accesses whose expert was in flight"),
    Counter("misses", COUNT, "accesses whose expert was absent; hits + late + misses = accesses"),
    Counter("compulsory", COUNT, "misses of experts never resident since start or reset"),
    Counter("collisions", COUNT, "misses of experts whose latest eviction was in this same pass"),
    Counter(
        "capacity",
        COUNT,
        "the other misses; compulsory + collisions + capacity = misses",
        column="capacity_misses",  # `capacity` is a setting
    ),
    Counter("prefetch_issued", COUNT, "entries into the prefetch queue"),
    Counter("prefetch_started", COUNT, "prefetches that reached the link"),
    Counter("prefetch_cancelled", COUNT, "queued prefetches overtaken by their gate"),
    Counter("prefetch_dropped", COUNT, "prefetches that found no space or were rejected by the eviction policy"),
    Counter("prefetch_hits", COUNT, "hits that are the first use since a prefetch brought the expert"),
    Counter("prefetch_used", COUNT, "prefetch hits and lates"),
    Counter("predicted", COUNT, "experts that the prefetch policy suggested, each time"),
    Counter("predicted_demanded", COUNT, "those that the target step demanded"),
    Counter(
        "predictable",
        COUNT,
        "how often these could have been: per access, the gates before it that may predict its layer, "
        "or its predictions if they are more",
    ),
    Counter("evictions", COUNT, "victims"),
    Counter("insertions", COUNT, "arrivals that became resident"),
    Counter("declined", COUNT, "demands that the eviction policy rejected; they use the bypass buffer"),
    Counter("dropped", COUNT, "misses skipped by the miss policy"),
    Counter("substituted", COUNT, "assignments given to another, resident expert"),
    Counter("cpu_executed", COUNT, "misses executed on the CPU"),
    Counter("cpu_absent", COUNT, "of these, how many were not complete at the gate in the tier that the CPU reads"),
    Counter("low_precision", COUNT, "used experts below the highest precision tier"),
    Counter("bytes_demand", BYTES, "bytes of demand transfers, charged when they start"),
    Counter("bytes_prefetch", BYTES, "bytes of prefetch transfers, charged when they start"),
    Counter("bytes_lower", BYTES, "bytes of transfers into the tiers below the fast one, charged when they start"),
    Counter("bytes_wasted", BYTES, "bytes prefetched and evicted before any use; without bytes cleared by a reset"),
    Counter(
        "bytes_unused_at_end",
        BYTES,
        "bytes prefetched, resident and unused at the end; without bytes in flight or cleared by a reset",
    ),
    Counter(
        "link_busy_ns",
        NS,
        "time of the transfers, end_i - max(issue_i, end_(i-1)), charged when they start; the sum over all links",
    ),
    Counter("dense_ns", NS, "dense compute, including the work of a pass before layer 0"),
    Counter("expert_ns", NS, "expert compute"),
    Counter("cpu_ns", NS, "CPU time of experts, charged when the work begins"),
    Counter("loading_ns", NS, "compute's own time to have experts loaded"),
    Counter("stall_ns", NS, "per step end - gate - expert compute - loading"),
    Counter("assignments_kept", COUNT, "assignments of the router's own choice that were executed as chosen"),
    Counter("mass", WEIGHT, "gate weight of the router's own choice"),
    Counter("mass_kept", WEIGHT, "of that, the part executed as chosen"),
    Counter("mass_low_precision", WEIGHT, "the part of mass_kept executed below the highest precision tier"),
    Counter(
        "mass_substituted",
        WEIGHT,
        "gate weight of the router's own choice in whose place another expert was executed",
    ),
    Counter(
        "mass_dropped",
        WEIGHT,
        "the part not executed; mass_kept + mass_substituted + mass_dropped = mass",
    ),
    Counter("draft_rows", COUNT, "draft tokens, each once, at layer 0"),
    Counter(
        "draft_rejected", COUNT, "of these, the rejected ones: computed, but left out of the counters of single tokens"
    ),
    Counter("rank_displacement", COUNT, "sum over assignments of how far their rank is from the slot they fill"),
    Counter(
        "variation",
        WEIGHT,
        "sum over tokens and layers of half |w - w'| between original and used mixture, each rounded down",
    ),
)
#: By name, in the order of columns.
COUNTERS: dict[str, Counter] = {counter.name: counter for counter in _DECLARED}
#: Columns of a row per request, in addition to the counters; `ttft_ns` is null without a prompt.
REQUEST_TIMES = ("start_ns", "ttft_ns", "decode_ns", "decode_passes", "decode_tokens", "end_ns", "tokens")
REQUEST_TIMES += ("arrival_ns", "queued_ns")
PHASES = ("prefill", "decode")
LIFETIME_BUCKETS = 24  #: bucket b counts copies evicted after [2**(b-1), 2**b) steps; bucket 0 within their own step


def reported(counts: Iterable[int], per: Rows) -> dict[str, int]:
    """Select the counters that a kind of row reports. `counts` has one value per counter, in their order."""
    pairs = zip(COUNTERS.values(), counts, strict=True)
    return {counter.name: amount for counter, amount in pairs if per in counter.per}


def queued(arrivals: Sequence[int], request: int, start: int) -> dict[str, int]:
    """Return when a request arrived and how long it waited for its first pass, at `start`; all arrive at 0 if empty."""
    arrival = arrivals[request] if arrivals else 0
    return {"arrival_ns": arrival, "queued_ns": start - arrival}


def heading_of(name: str) -> str:
    """Return a counter's column in tables that also have settings; for an unknown counter, its name."""
    return COUNTERS[name].heading if name in COUNTERS else name


def markdown() -> str:
    """Return the Markdown table of counters in docs/semantics.md."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| counter | unit | definition |"
    yield "|---|---|---|"
    for counter in COUNTERS.values():
        only = "" if counter.per == BOTH else f" (per {counter.per[0]} only)"
        yield f"| `{counter.name}` | {counter.unit} | {counter.definition}{only} |"


if __name__ == "__main__":
    print(markdown())
