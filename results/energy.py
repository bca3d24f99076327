"""Energy of a replay, derived when results are read: a platform's watts times what its parts did.

Joules are idle_w x the run's time + compute_w x (dense + expert + loading) + cpu_w x CPU time + link_w x link time,
watts above idle each. A nanosecond at one watt is a nanojoule. No engine knows of it, and no identity contains it:
results keep the watts that their platform had, as facts (`WATTS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

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


def expressions(about: Sequence[str]) -> list[pl.Expr]:
    """Return the same as columns of a frame of results, null where a platform states no watts.

    `about` lists the facts that the frame has.
    """
    import polars as pl

    if IDLE not in about:
        return [pl.lit(None, pl.Float64).alias(name) for name in (ENERGY, DECODED)]

    def of_run(name: str) -> pl.Expr:
        return pl.col("totals").struct.field(name).fill_null(0)

    def of_decode(name: str) -> pl.Expr:
        rows = pl.element().filter(pl.element().struct.field("phase") == DECODE).struct.field(name)
        return pl.col("per_layer").list.eval(rows).list.sum()

    watts = {name: pl.col("about").struct.field(name) for name in WATTS}
    energy = watts[IDLE] * pl.col("totals").struct.field("time_ns")
    decoded = watts[IDLE] * pl.sum_horizontal([of_decode(name) for name in PHASE])
    for fact, names in SPENT.items():
        energy += watts[fact] * pl.sum_horizontal([of_run(name) for name in names])
        decoded += watts[fact] * pl.sum_horizontal([of_decode(name) for name in names])
    return [energy.alias(ENERGY), decoded.alias(DECODED)]
