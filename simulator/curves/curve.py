"""A curve: what a replay without prefetch would miss at every capacity, counted in one pass over the demand; and in how
many steps it would miss nothing.

Exact, and equal to the replays of `lru` and `belady` with `miss=fetch`, where nothing but the demand decides:

- LRU of equal or unequal bytes is a stack algorithm here, because victims leave strictly in order of last use until
  what comes in fits: a cache of C bytes holds the longest top of the stack that fits C.
- Belady is one if a pool's experts are of equal bytes; `belady.py` says how. Otherwise more room can cost hits.
- Relaxed Belady corresponds to no replay: it may keep experts that the fast tier could not hold at once. In a pool of
  unequal bytes it is bracketed, at given capacities (`unequal.py`).
- A step that does not fit its pool pushes its own experts out as they are computed, so times decide which are left.
  Where that can matter the capacity is *undecided*; `sweeps/grid.py` replays it on a machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from moereplay.results.remarks import with_routing
from moereplay.results.result import Row
from moereplay.results.settings import OF_CURVES, older
from moereplay.simulator.bounds import RELAXED as RELAXED_BOUND
from moereplay.simulator.bounds import Bound, bytes_of, count, misses_of
from moereplay.simulator.config import SEMANTICS_VERSION, ReplayConfig, configure
from moereplay.simulator.curves import belady, lru
from moereplay.simulator.curves.stream import Cut, Demands, Tally, demands_of, tally
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.threads import run_interruptibly
from moereplay.traces.demand import demand_of
from moereplay.traces.drafts import OFF
from moereplay.traces.schema import Geometry, Trace, canonical
from moereplay.traces.summary import synthetic

RELAXED = "relaxed_belady"
REPLAYED = ("lru", "belady")  #: counted by default: the misses of replays under the policy of that name
POLICIES = (*REPLAYED, RELAXED)
UNDECIDED = -1


@dataclass(frozen=True, eq=False)
class Curve:
    """Misses at G rising capacities of all pools together; L layers.

    Per layer, capacities are split evenly over layers by count. Between two capacities nothing changes if experts share
    a size, or a pool each layer; otherwise a curve has no values between its capacities.
    """

    policy: str  #: of POLICIES
    config: ReplayConfig  #: its `capacity` is of no account
    platform: str | None  #: the machine whose times decided where the demand does not, if any
    trace: str  #: digest
    model: str
    experts: int  #: of all layers
    total_bytes: int  #: of all experts
    dense: bool  #: whether misses change at these capacities only
    capacity_bytes: np.ndarray  #: (G,) int64
    layer_misses: np.ndarray  #: (L, G) int64, UNDECIDED where times decide
    layer_complete: np.ndarray  #: (L, G) int64: steps without a miss, UNDECIDED likewise
    layer_steps: np.ndarray  #: (L,) int64: steps that demand an expert
    layer_accesses: np.ndarray  #: (L,) int64
    layer_compulsory: np.ndarray  #: (L,) int64: misses at any capacity
    replayed: np.ndarray  #: (G,) bool: decided by replays on `platform`
    synthetic: str = ""  #: how a generator made the routing; empty for recorded routing
    #: (2, G) int64, where the fewest misses are not known: no way has fewer than the first, one has the second. Then
    #: the first are the curve's, and what is counted by layer is UNDECIDED.
    bracket: np.ndarray | None = None

    @property
    def decided(self) -> np.ndarray:
        """(G,) bool: the demand alone decides, or a replay has decided."""
        return self.layer_misses[0] != UNDECIDED if self.bracket is None else np.ones(len(self.capacity_bytes), bool)

    @property
    def misses(self) -> np.ndarray:
        """(G,) int64 of all layers, UNDECIDED where times decide."""
        if self.bracket is not None:
            return self.bracket[0]
        return np.where(self.decided, self.layer_misses.sum(0), UNDECIDED)

    @property
    def complete(self) -> np.ndarray:
        """(G,) int64: steps without a miss, UNDECIDED where times decide, or misses are a bound."""
        return np.where(self.layer_complete[0] == UNDECIDED, UNDECIDED, self.layer_complete.sum(0))

    @property
    def steps(self) -> int:
        """Steps that demand an expert."""
        return int(self.layer_steps.sum())

    @property
    def accesses(self) -> int:
        """Accesses of all layers."""
        return int(self.layer_accesses.sum())

    @property
    def compulsory(self) -> int:
        """Misses at any capacity."""
        return int(self.layer_compulsory.sum())

    @property
    def capacity_experts(self) -> np.ndarray:
        """(G,) f64: capacities in mean experts; whole numbers where experts share a size."""
        return self.capacity_bytes * self.experts / self.total_bytes

    @property
    def hit_rate(self) -> np.ndarray:
        """(G,) f64, not a number where undecided or without accesses."""
        hits = np.where(self.decided, self.accesses - self.misses, np.nan)
        return hits / self.accesses if self.accesses else np.full(len(hits), np.nan)

    def misses_at(self, capacity: int) -> int:
        """Return misses of a replay at a capacity in bytes. Raises ConfigError if the curve does not include it."""
        return int(self.misses[self._place(capacity)])

    def complete_at(self, capacity: int) -> int | None:
        """Return complete steps likewise; None where misses are a bound."""
        return None if self.bracket is not None else int(self.complete[self._place(capacity)])

    def _place(self, capacity: int) -> int:
        at = int(np.searchsorted(self.capacity_bytes, capacity, side="right")) - 1
        if at < 0 or not (self.dense or self.capacity_bytes[at] == capacity):
            raise ConfigError(f"this curve has no capacity of {capacity:,} bytes; pass it with capacities=")
        if not self.decided[at]:
            raise ConfigError(
                f"{capacity:,} bytes hold less than a step demands, so that {self.policy} depends on the machine's "
                "times there; replay that capacity"
            )
        return at


def curve(
    trace: Trace,
    policy: str = "lru",
    scope: str = "global",
    passes: str = "recorded",
    reset: str = "never",
    contract: str = "atomic",
    draft: str = OFF,
    seed: int = 0,
    capacities: Sequence[int] = (),
    done: Callable[[int], None] = lambda steps: None,
) -> Curve:
    """Count a trace's misses at every whole number of experts, and at `capacities` in bytes.

    With `scope="per_layer"` those are 1 to E per layer. Where experts differ in size, a number of them is that of mean
    experts, rounded down to bytes as `--capacity 51experts` is. `done` is called from time to time with how many more
    of the steps (passes x layers) have been counted. `relaxed_belady` is counted at `capacities` alone where experts
    of a pool differ in size. Raises ConfigError, PolicyError or TraceError.
    """
    config = settings(trace.geometry, policy, scope, passes, reset, contract, draft, seed)
    geometry, equal = trace.geometry, _shares_a_size(trace.geometry, scope)
    bracketed = policy == RELAXED and not equal
    grid = _asked(geometry, capacities) if bracketed else _grid(geometry, scope, () if equal else capacities)
    cut = Cut(geometry.layers, geometry.experts, scope == "per_layer", contract == "atomic")
    counted = tally(geometry.layers, len(grid), None if equal else grid)
    weights = np.ones(geometry.layers * geometry.experts, np.int64) if equal else geometry.rows.bytes
    demands = demands_of(trace, config.schedule, reset)
    if bracketed:
        run_interruptibly(partial(_count, demands, "lru", cut, weights, counted, lambda steps: None))
        found = run_interruptibly(partial(_bracket, trace, config, grid, done))
        made = _curve(trace, policy, config, grid, equal, counted)
        unknown = np.full_like(made.layer_misses, UNDECIDED)
        return replace(made, layer_misses=unknown, layer_complete=unknown, bracket=found)
    run_interruptibly(partial(_count, demands, policy, cut, weights, counted, done))
    return _curve(trace, policy, config, grid, equal, counted)


def settings(
    geometry: Geometry,
    policy: str,
    scope: str = "global",
    passes: str = "recorded",
    reset: str = "never",
    contract: str = "atomic",
    draft: str = OFF,
    seed: int = 0,
) -> ReplayConfig:
    """Return the configuration that a curve holds for, checked before counting. Raises ConfigError or PolicyError."""
    replayed = "belady" if policy == RELAXED else policy
    how = {"scope": scope, "passes": passes, "reset": reset, "contract": contract, "draft": draft}
    config = configure(eviction=replayed, seed=seed, **how)
    if policy not in POLICIES:
        raise ConfigError(
            f"invalid --eviction {policy!r}: expected {', '.join(POLICIES)}, stack algorithms, for which one pass "
            "counts the misses at every capacity; for others, `moereplay replay` the capacities that matter"
        )
    if scope == "per_link":
        raise ConfigError(
            "no curve with scope per_link: which experts share a pool depends on a platform; replay the capacities "
            "that matter, or count a curve per layer"
        )
    if scope == "per_layer" and geometry.bytes_by_expert:
        raise ConfigError(
            "no curve with scope per_layer where experts of a layer differ in bytes: pools are divided by bytes, and "
            "no capacity is a number of experts in each; replay the capacities that matter, or count a global curve"
        )
    if policy not in offered(geometry, scope):
        raise ConfigError(
            f"no curve of {policy} in a pool of unequal bytes: it is not a stack algorithm there, more room can cost "
            f"hits; {RELAXED} bounds it, {'' if geometry.bytes_by_expert else 'scope per_layer has it, '}and so has a "
            "replay of each capacity that matters"
        )
    return config


def offered(geometry: Geometry, scope: str) -> tuple[str, ...]:
    """Return the policies that have a curve in pools of that scope."""
    return POLICIES if _shares_a_size(geometry, scope) else ("lru", RELAXED)


def is_ready(policy: str) -> bool:
    """Return whether the curves of a policy can be counted without compiling first, which takes seconds."""
    return getattr((lru if policy == "lru" else belady).WALK, "is_kept", True)  # plain Python where nothing is compiled


def _shares_a_size(geometry: Geometry, scope: str) -> bool:
    """Return True if all experts of a pool have the same size."""
    return not geometry.bytes_by_expert and (scope == "per_layer" or len(set(geometry.expert_bytes)) == 1)


def _grid(geometry: Geometry, scope: str, more: Sequence[int]) -> np.ndarray:
    """Return (G,) int64 capacities: whole numbers of experts, and `more`, in bytes, from the largest expert on."""
    sizes, experts = geometry.expert_bytes, geometry.experts
    if scope == "per_layer":
        return np.arange(1, experts + 1) * sum(sizes)
    each = Fraction(geometry.total_bytes, geometry.layers * experts)
    whole = {int(count * each) for count in range(1, geometry.layers * experts + 1)}
    return np.array(sorted(capacity for capacity in whole | set(more) if capacity >= max(sizes)), np.int64)


def _asked(geometry: Geometry, capacities: Sequence[int]) -> np.ndarray:
    """Return (G,) int64, the capacities that hold the largest expert. Raises ConfigError if there are none."""
    known = sorted({each for each in capacities if each >= max(geometry.expert_bytes)})
    if not known:
        raise ConfigError(
            f"{RELAXED} in a pool of unequal bytes is counted capacity by capacity: pass capacities= in bytes, "
            f"of at least {max(geometry.expert_bytes):,}, the largest expert"
        )
    return np.array(known, np.int64)


def _bracket(trace: Trace, config: ReplayConfig, grid: np.ndarray, done: Callable[[int], None]) -> np.ndarray:
    """Return bounds on the fewest misses at each capacity (2, G): a lower bound, and a feasible number."""
    sizes, found = bytes_of(trace.geometry), []
    steps = len(demand_of(trace, config.schedule).offsets) - 1
    how = (RELAXED_BOUND, config.schedule, config.reset, config.scope, config.contract)
    for at, pool in enumerate(grid.tolist()):
        counted = count(trace, Bound(*how, (pool // min(sizes),), (), pool, sizes))
        accesses, feasible = counted["accesses"] or 0, counted["feasible_hits"] or 0
        found.append((misses_of(counted), accesses - feasible))
        done(steps * (at + 1) // len(grid) - steps * at // len(grid))
    return np.array(found, np.int64).T


def _count(
    demands: Demands, policy: str, cut: Cut, weights: np.ndarray, into: Tally, done: Callable[[int], None]
) -> None:
    if policy == "lru":
        lru.count(demands, cut, weights, into, done)
    else:
        belady.count(demands, cut, policy == RELAXED, into, done)


def _curve(trace: Trace, policy: str, config: ReplayConfig, grid: np.ndarray, dense: bool, counted: Tally) -> Curve:
    geometry = trace.geometry
    accesses = counted.found.sum(1)
    misses = accesses[:, None] - np.cumsum(counted.found[:, : len(grid)], axis=1)
    complete = np.cumsum(counted.complete[:, : len(grid)], axis=1)
    for each in (misses, complete):
        each[:, np.cumsum(counted.undecided[: len(grid)]) > 0] = UNDECIDED
    return Curve(
        policy=policy,
        config=config,
        platform=None,
        trace=trace.digest,
        model=trace.header.provenance.model,
        synthetic=synthetic(trace.header.provenance),
        experts=geometry.layers * geometry.experts,
        total_bytes=geometry.total_bytes,
        dense=dense,
        capacity_bytes=grid,
        layer_misses=misses,
        layer_complete=complete,
        layer_steps=counted.complete.sum(1),
        layer_accesses=accesses,
        layer_compulsory=counted.found[:, -1],
        replayed=np.zeros(len(grid), bool),
    )


# rows, as `curve --json` prints and `results.curves` stores them


def to_row(curve: Curve) -> Row:
    """Return the document that `curve --json` prints."""
    from moereplay.results.curves import CURVES_VERSION  # imports polars, which a replay does without

    config = {"policy": curve.policy} | {name: getattr(curve.config, name) for name in OF_CURVES}
    config |= {"seed": str(curve.config.seed if curve.config.draft != OFF else 0)}
    about = {"label": with_routing("SIMULATED", curve.synthetic), "identity": _identity(curve, config)}
    about |= {"trace": curve.trace, "model": curve.model}
    return {
        "curves_version": CURVES_VERSION,
        "config": config | {"platform": curve.platform},
        "about": about
        | {"semantics": SEMANTICS_VERSION, "experts": curve.experts}
        | {"total_bytes": curve.total_bytes, "dense": curve.dense},
        "capacity_bytes": curve.capacity_bytes.tolist(),
        "misses": _known(curve.misses.tolist()),
        "reached_misses": None if curve.bracket is None else curve.bracket[1].tolist(),
        "complete_steps": _known(curve.complete.tolist()),
        "replayed": curve.replayed.tolist(),
        "layer_misses": [_known(row) for row in curve.layer_misses.tolist()],
        "layer_complete": [_known(row) for row in curve.layer_complete.tolist()],
        "layer_steps": curve.layer_steps.tolist(),
        "layer_accesses": curve.layer_accesses.tolist(),
        "layer_compulsory": curve.layer_compulsory.tolist(),
    }


def write_curve(folder: Path, curve: Curve) -> Path:
    """Write `curve-<identity>.parquet`: the same settings replace their own file. Raises ResultError."""
    from moereplay.results.curves import write_row

    return write_row(folder, to_row(curve))


def _identity(curve: Curve, config: Row) -> str:
    """Return a hash of the demand without the machine, so that a completed curve replaces one with gaps."""
    later = older() | {"seed": "0"}
    counted = {name: value for name, value in config.items() if value != later.get(name)}
    return hashlib.sha256(canonical([SEMANTICS_VERSION, curve.trace, counted])).hexdigest()[:16]


def _known(counts: list[int]) -> list[int | None]:
    return [None if count == UNDECIDED else count for count in counts]
