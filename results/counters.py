"""Every counter of a replay, declared once: name, unit, definition, and the rows that have it.

Both engines store and report the counters declared here; the Parquet files, the tables of a sweep, the readers and the
table in docs/semantics.md derive from it. `access` is a demanded expert of a step, after the union over tokens.

Energy is derived from them when results are read, with a platform's watts: joules are idle_w x the run's time +
compute_w x (dense + expert + loading) + cpu_w x CPU time + link_w x link time, watts above idle each. A nanosecond at
one watt is a nanojoule. No engine knows of it, and no identity contains it: results keep the watts that their platform
had, as facts (`WATTS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import polars as pl


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
    Counter("steps", COUNT, "steps that demand an expert"),
    Counter("complete_steps", COUNT, "steps that demand an expert and have no miss; a late access is none"),
    Counter("prefetch_issued", COUNT, "entries into the prefetch queue"),
    Counter("prefetch_started", COUNT, "prefetches that reached the link"),
    Counter("prefetch_cancelled", COUNT, "queued prefetches overtaken by their gate"),
    Counter("prefetch_dropped", COUNT, "prefetches that found no space or were rejected by the eviction policy"),
    Counter("prefetch_hits", COUNT, "hits that are the first use since a prefetch brought the expert"),
    Counter("prefetch_used", COUNT, "prefetch hits and lates"),
    Counter("predicted", COUNT, "experts that the prefetch policy suggested, each time"),
    Counter("predicted_demanded", COUNT, "predicted experts that the target step demanded"),
    Counter(
        "predictable",
        COUNT,
        "sum over accesses: the gates before the access that may predict its layer, "
        "or its predictions if they are more",
    ),
    Counter("evictions", COUNT, "victims"),
    Counter("insertions", COUNT, "arrivals that became resident"),
    Counter("declined", COUNT, "demands that the eviction policy rejected; they use the bypass buffer"),
    Counter("dropped", COUNT, "misses skipped by the miss policy"),
    Counter("substituted", COUNT, "assignments given to another, resident expert"),
    Counter("cpu_executed", COUNT, "misses executed on the CPU"),
    Counter(
        "cpu_absent", COUNT, "CPU-executed misses that were not complete at the gate in the tier that the CPU reads"
    ),
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
    Counter("mass_kept", WEIGHT, "the part of mass executed as chosen"),
    Counter("mass_low_precision", WEIGHT, "the part of mass_kept executed below the highest precision tier"),
    Counter("mass_below_second", WEIGHT, "the part of mass_low_precision executed below the second precision tier"),
    Counter("mass_below_third", WEIGHT, "the part of mass_below_second executed below the third precision tier"),
    Counter(
        "mass_substituted",
        WEIGHT,
        "the part of mass in whose place another expert was executed",
    ),
    Counter(
        "mass_dropped",
        WEIGHT,
        "the part of mass not executed; mass_kept + mass_substituted + mass_dropped = mass",
    ),
    Counter("draft_rows", COUNT, "draft tokens, each once, at layer 0"),
    Counter("draft_rejected", COUNT, "rejected draft tokens: computed, but left out of the counters of single tokens"),
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
#: Counters of a row per request, layer and phase: those that figures by layer divide. Each is charged by whole passes.
BY_LAYER = ("accesses", "hits", "late", "misses", "compulsory", "collisions", "capacity")
#: Requests x layers up to which stored replays keep those rows unasked: at most 10 ms and some 100 kB a configuration.
MOST_BY_LAYER = 1 << 14
LIFETIME_BUCKETS = 24  #: bucket b counts copies evicted after [2**(b-1), 2**b) steps; bucket 0 within their own step


def reported(counts: Iterable[int], per: Rows) -> dict[str, int]:
    """Select the counters that a kind of row reports. `counts` has one value per counter, in their order."""
    names, wanted = _reported(per)
    return dict(zip(names, compress(counts, wanted), strict=True))


@cache
def _reported(per: Rows) -> tuple[list[str], list[bool]]:
    """Return the names of a row's counters, and for every counter whether it is one."""
    wanted = [per in each.per for each in COUNTERS.values()]
    return list(compress(COUNTERS, wanted)), wanted


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


# energy

IDLE = "power_idle_w"
#: By fact: the counters whose nanoseconds its watts are spent in, beside the idle ones, which are spent all the time.
SPENT = {
    "power_compute_w": ("dense_ns", "expert_ns", "loading_ns"),
    "power_cpu_w": ("cpu_ns",),
    "power_link_w": ("link_busy_ns",),
}
WATTS = (IDLE, *SPENT)
#: Together the time of a phase: rows per layer and phase have no `time_ns`.
PHASE = ("dense_ns", "expert_ns", "loading_ns", "stall_ns")
DECODE = "decode"
#: Columns of nanojoules: of the run, and of its decode phase.
ENERGY, DECODED = "energy_nj", "decode_energy_nj"


def facts(power: Mapping[str, float] | None) -> dict[str, float]:
    """Return the facts of a platform's `[power]`, none without it."""
    return {} if power is None else {f"power_{name}": watts for name, watts in power.items()}


def nanojoules(
    about: Mapping[str, Any], totals: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return `ENERGY` and `DECODED` of a result; nothing if its platform states no watts."""
    if about.get(IDLE) is None:
        return {}
    decode = [row for row in layers if row["phase"] == DECODE]
    names = dict.fromkeys((*PHASE, *(name for each in SPENT.values() for name in each)))
    sums = {name: sum(row[name] or 0 for row in decode) for name in names}
    return {
        ENERGY: _spent(about, totals, totals["time_ns"]),
        DECODED: _spent(about, sums, sum(sums[name] for name in PHASE)),
    }


def _spent(about: Mapping[str, Any], counted: Mapping[str, Any], time_ns: int) -> float:
    parts = (about[watts] * sum(counted[name] or 0 for name in names) for watts, names in SPENT.items())
    return about[IDLE] * time_ns + sum(parts)


def expressions(about: Sequence[str], summed: bool = False) -> list[pl.Expr]:
    """Return the same as columns of a frame of results, null where a platform states no watts.

    `about` lists the facts that the frame has. `summed`: its column `DECODE` has the sums of its layers' decode rows.
    """
    import polars as pl

    if IDLE not in about:
        return [pl.lit(None, pl.Float64).alias(name) for name in (ENERGY, DECODED)]

    def of_run(name: str) -> pl.Expr:
        return pl.col("totals").struct.field(name).fill_null(0)

    def of_decode(name: str) -> pl.Expr:
        if summed:
            return pl.col(DECODE).struct.field(name)
        rows = pl.element().filter(pl.element().struct.field("phase") == DECODE).struct.field(name)
        return pl.col("per_layer").list.eval(rows).list.sum()

    watts = {name: pl.col("about").struct.field(name) for name in WATTS}
    energy = watts[IDLE] * pl.col("totals").struct.field("time_ns")
    decoded = watts[IDLE] * pl.sum_horizontal([of_decode(name) for name in PHASE])
    for fact, names in SPENT.items():
        energy += watts[fact] * pl.sum_horizontal([of_run(name) for name in names])
        decoded += watts[fact] * pl.sum_horizontal([of_decode(name) for name in names])
    return [energy.alias(ENERGY), decoded.alias(DECODED)]


if __name__ == "__main__":
    print(markdown())
