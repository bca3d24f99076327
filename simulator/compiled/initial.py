"""The simulation state at the start of a run, made from input arrays and a run specification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import KEY_SCOPES, NEVER, NONE, NOW, QUEUES, Eviction, Memory
from moereplay.policies.grammar import Chosen
from moereplay.policies.hooks import EVENTS, HOOKS
from moereplay.simulator.capacity import bytes_before
from moereplay.simulator.compiled.clock import NEVER_DUE
from moereplay.simulator.compiled.counters import BUCKETS, LAYERED, NO_ROW, TIMES, WIDTH
from moereplay.simulator.compiled.demand import FAMILIES
from moereplay.simulator.compiled.hooks import named_by
from moereplay.simulator.compiled.inputs import Addressed, Inputs, costs_of, noted_lengths, pass_lengths
from moereplay.simulator.compiled.layout import (
    ARRAYS,
    HEAD,
    IF_NAMED,
    INPUT_ARRAYS,
    MEMORIES,
    MOST_STEPS,
    OWN_CLOCK,
    PLAN_ARRAYS,
    POSITIONS,
    QUEUED,
    RECORDS,
    ROWS,
    RULE,
    STATE,
    STEPPED,
    is_fast,
    is_plain,
    is_priced,
)
from moereplay.simulator.compiled.ranking import NO_QUEUE, TOUCH
from moereplay.simulator.compiled.state import BY_LAYER, BY_LINK, NEVER_LEFT, NO_KEY, ONE_POOL, READERS
from moereplay.simulator.config import KINDS, PolicySet, ReplayConfig, parse_reset
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import Oracle, RunSpec
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.rates import NOT_YET
from moereplay.simulator.threads import stop_flag
from moereplay.traces.passes import slots_of
from moereplay.traces.routers import is_shared

#: Alignment of arrays, bytes: no row of `copies` or `experts` lies in two cache lines.
CACHE_LINE = 64
#: Arrays of at most so many bytes share a block: making a hundred arrays would take as long as the other setup. Longer
#: ones are apart, because notes for other platforms keep some arrays, and with them a block.
MOST_IN_BLOCK = 1 << 16
#: Arrays of every run that start as zeros, unless a run gives them: type and axes.
ZEROS = {name: (np.dtype(kind), axes) for name, (kind, axes) in (ARRAYS | MEMORIES).items()}
AXES = tuple({axis: None for _, axes in ZEROS.values() for axis in axes})
#: Positions of the addresses in `layout.HEAD`, by array.
PLACES = {name.removeprefix("at_"): at for name, at in POSITIONS.items() if name.startswith("at_")}


class Block(NamedTuple):
    """The arrays of ZEROS in a run of these lengths: their places in a block, and those that are too long for it."""

    placed: dict[str, tuple[int, np.dtype, list[int]]]  #: byte of the block, type, shape
    apart: dict[str, tuple[np.dtype, list[int]]]
    size: int
    positions: np.ndarray  #: of the addresses of `placed`, in `layout.HEAD`
    offsets: np.ndarray


@lru_cache(maxsize=64)
def block_of(lengths: tuple[int, ...], given: frozenset[str]) -> Block:
    """Return the block for `lengths`, by AXES, without the arrays that are `given`."""
    numbers, placed, apart, end = dict(zip(AXES, lengths, strict=True)), {}, {}, 0
    for name, (kind, axes) in ZEROS.items():
        shape = [numbers[axis] for axis in axes]
        size = kind.itemsize * prod(shape)
        if name in given:
            continue
        if size > MOST_IN_BLOCK:
            apart[name] = kind, shape
        else:
            placed[name] = end, kind, shape
            end += (size // CACHE_LINE + 1) * CACHE_LINE  # no two have the same address
    offsets = np.array([at for at, _, _ in placed.values()])
    return Block(placed, apart, end, np.array([PLACES[name] for name in placed]), offsets)


class Arrays(dict[str, np.ndarray]):
    """The arrays of a run by name. Those in the block are made when they are first asked for."""

    def __init__(self, given: Mapping[str, np.ndarray], block: Block) -> None:
        """Make the arrays that are not `given`."""
        super().__init__(given)
        self.update({name: _zeros(*of) for name, of in block.apart.items()})
        self.placed, self.bytes = block.placed, _zeros(np.dtype(np.uint8), [block.size])

    def __missing__(self, name: str) -> np.ndarray:
        at, kind, shape = self.placed[name]
        self[name] = made = np.ndarray(shape, kind, self.bytes, at)
        return made


def _zeros(kind: np.dtype, shape: list[int]) -> np.ndarray:
    """Return zeros that start a cache line."""
    size = kind.itemsize * prod(shape)
    held = np.zeros(size + CACHE_LINE, np.uint8)
    first = -held.ctypes.data % CACHE_LINE
    return held[first : first + size].view(kind).reshape(shape)


class SimulationState:
    """The numbers of a run, and the arrays that they address: plain Python finds them as kernels write them."""

    def __init__(self, numbers: Mapping[str, int], given: Mapping[str, np.ndarray], *addressed: Addressed) -> None:
        """Store `numbers` by the names of `layout.STATE`, missing ones as 0, and arrays, those of ZEROS too."""
        self.is_fast, self.is_plain = is_fast(numbers), is_plain(numbers)
        self._row = np.zeros(1, STATE)
        every: dict[str, np.ndarray] = {}
        for arrays in (*addressed, given):
            every |= arrays
        block = block_of(tuple(int(numbers[axis]) for axis in AXES), frozenset(every.keys() & ZEROS))
        self.numbers, self.arrays = self._row[0], Arrays(every, block)
        self._records = {name: self.numbers[name] for name in (*RECORDS, *ROWS)}
        head = self._row.view(np.int64)[: len(HEAD)]
        head[:] = self._head(numbers, given.keys() | block.apart.keys(), addressed)
        head[block.positions] = block.offsets + self.arrays.bytes.ctypes.data
        if IS_PYTHON:
            arrays, names = self.arrays, {*every, *ZEROS}
            found = ((name, reader, arrays[reader.name]) for name, reader in READERS.items() if reader.name in names)
            vars(self).update({name: array if reader.axes else array[0] for name, reader, array in found})

    def _head(self, numbers: Mapping[str, int], own: Iterable[str], addressed: Iterable[Addressed]) -> list[int]:
        """Return the numbers and addresses of `layout.HEAD`, without addresses of the block."""
        head = [0] * len(HEAD)
        for name, value in numbers.items():
            head[POSITIONS[name]] = value
        for arrays in addressed:
            for name, address in arrays.addresses.items():
                head[PLACES[name]] = address
        for name in own:
            head[PLACES[name]] = self.arrays[name].ctypes.data
        return head

    @property
    def address(self) -> int:
        """Address of the numbers in memory."""
        return self._row.ctypes.data

    def __getitem__(self, name: str) -> Any:
        return self._records[name] if name in self._records else self.numbers[name]


def initial_state(
    inputs: Inputs,
    oracle: Oracle,
    spec: RunSpec,
    lines: int = 0,
    keep: bool = False,
    stepped: bool = False,
    notes: bool = False,
    known: Mapping[str, np.ndarray] | None = None,
) -> SimulationState:
    """Return the state at the start of a run, with room for `lines` of the event log.

    `keep`: store the experts that every token runs. `stepped`: the caller reports when activities end, and costs are
    only input to policies. `notes`: note decisions, if they may hold on other platforms. `known`: notes to follow.
    """
    chosen = spec.chosen.priced(spec.times)
    numbers = _scalars(spec, chosen) | _prices(inputs, spec) | _lengths(inputs, spec, chosen, lines, keep)
    numbers |= STEPPED if stepped else OWN_CLOCK
    numbers |= {"weighted": numbers["n_weighted"] > 0, "scored": numbers["n_scored"] > 0, "keeps": keep}
    numbers |= {"batched": numbers["n_batched"] > 0, "ring_mask": numbers["n_ring"] - 1}
    layered = len(LAYERED) if spec.by_layer else 0
    numbers |= {"n_layered": layered, "n_layer_cells": numbers["layers"] * 2 * layered}
    reads_future = bool(chosen.reads & {"next_use", "next_pass"})
    numbers |= {"knows_future": numbers["n_demand"] > 0 and reads_future and not chosen.changes_routing}
    arrives = bool(numbers["arrives"])
    numbers |= {"reads_ids": keep or arrives or numbers["precisions"] > 1 or _reads_ids(numbers, chosen.reads)}
    # queues where the key is a logical timestamp and every timed copy enters the pool, or else keys in rows
    queues = all(numbers[name] == value for name, value in QUEUED.items())
    queue = QUEUES.index(chosen.eviction.policy.queue(chosen.eviction.params)) if queues else NO_QUEUE
    numbers |= {"queue": queue, "ranks": numbers["by_key"] and queue == NO_QUEUE}
    # the fast path can note decisions that may hold on other platforms
    numbers |= noted_lengths(inputs, numbers, notes and is_fast(numbers) and not is_priced(numbers))
    costs = costs_of(inputs, spec)
    numbers |= costs.lengths | {"n_lanes": costs.lengths["n_lane_rates"] // numbers["n_links"]}
    if numbers["passes"] * numbers["layers"] > MOST_STEPS:
        raise ConfigError(f"invalid number of steps: expected at most {MOST_STEPS:,} in a replay; take fewer requests")
    given = {"now": np.zeros(1, NOW), "rule": np.zeros(1, RULE), "stop": stop_flag()}
    for name, array in (known or {}).items():
        numbers[ARRAYS[name][1][0]], given[name] = len(array), array
    if arrives:
        filled = {name: INPUT_ARRAYS[name] for name in PLAN_ARRAYS.values()}
        given |= {name: np.zeros([numbers[axis] for axis in axes], kind) for name, (kind, axes) in filled.items()}
    state = SimulationState(numbers, given, costs, inputs)
    state["clock"]["compute_at"], state["clock"]["cpu_at"] = NEVER_DUE, NEVER_DUE
    state["counters"]["row"], state["cache"]["bypassed"] = NO_ROW, NONE
    state["arrival"]["y"] = NONE
    _fill_tables(state, spec)
    _fill_oracle(state, oracle)
    _fill_constants(state, spec, chosen)
    return state


# numbers of the state


def _scalars(spec: RunSpec, chosen: PolicySet) -> dict[str, int]:
    config, layout, eviction = spec.config, spec.layout, chosen.eviction.policy
    geometry, cpu_works = layout.geometry, not chosen.miss.policy.fetches_all
    return {
        "layers": geometry.layers,
        "experts": geometry.experts,
        "precisions": layout.precisions,
        "uneven": bool(geometry.bytes_by_expert) or layout.slots is not None,
        "pooled": _pooled(spec),
        "pool_rows": 1 if _pooled(spec) == BY_LAYER else geometry.layers,
        "sequential": config.contract == "sequential",
        "after_demand": config.prefetch_at == "after_demand" or _suggests_late(config, chosen),
        "free_only": config.prefetch_admission == "free_only",
        "reset_every": parse_reset(config.reset),
        "side_slots": chosen.prefetch.policy.side_slots(chosen.prefetch.params),
        "reach": chosen.prefetch.policy.names_ahead(chosen.prefetch.params),
        "logs": spec.log,
        "by_key": eviction.victim is None,
        "key_scope": KEY_SCOPES.index(eviction.scope(chosen.eviction.params)),
        "row_length": geometry.experts * layout.precisions,
        "has_cpu": spec.times.has_cpu,
        "cpu_tier": spec.times.cpu_tier + 1 if cpu_works else 0,
        "sync_ns": spec.times.sync_ns if cpu_works else 0,
        "next_pass": chosen.prefetch.policy.next_pass,
    } | _given(chosen)


def _pooled(spec: RunSpec) -> int:
    """Return how copies are divided into pools."""
    if len(spec.pools) == 1:
        return ONE_POOL
    return BY_LINK if spec.config.scope == "per_link" else BY_LAYER


def _candidate_rows(spec: RunSpec) -> int:
    """Return the number of rows of candidates: a layer's experts may be at several links."""
    return spec.layout.geometry.layers * (len(spec.pools) if _pooled(spec) == BY_LINK else 1)


def _suggests_late(config: ReplayConfig, chosen: PolicySet) -> bool:
    """Return whether the prefetch policy reads verdicts that fall after the gate."""
    return config.contract == "sequential" and chosen.prefetch.policy.next_pass


def _prices(inputs: Inputs, spec: RunSpec) -> dict[str, int]:
    """Return which costs need code and not only a table."""
    names = ("has_loading", "loads_prefetches", "has_start", "slows_compute", "reads_kv", "has_pieces", "victim_ns")
    return {name: getattr(spec.times, name) for name in (*names, "by_matrix", "has_stages")} | {
        "waits_for_all": spec.times.waits_for_all and spec.config.contract == "atomic",
        "draft_ns": _draft_ns(inputs, spec),
        "matrices": len(spec.times.matrices),
    }


def _draft_ns(inputs: Inputs, spec: RunSpec) -> int:
    """Return what a draft takes; 0 without drafts."""
    if not len(inputs["pass_drafts"]) and not inputs["share_draft"].any():
        return 0
    spec.times.draft_ns(len(pass_lengths(inputs, spec)))  # not more than a time can be
    return spec.times.draft_ns(1)


def _reads_ids(numbers: Mapping[str, int], named: frozenset[str]) -> bool:
    """Return whether any policy reads or may change the tokens' experts."""
    hooks = ("has_suggest", "has_want", "listeners_on_gate")
    read = named & {"ids", "logits", "choice", "weight"} and any(numbers[hook] for hook in hooks)
    return bool(numbers["has_choose"] or numbers["has_resolve"] or read)


def _given(chosen: PolicySet) -> dict[str, int]:
    """Return which hooks exist, and which policies listen to which event."""
    policies = [getattr(chosen, kind).policy for kind in KINDS]
    listeners = {
        f"listeners_{event}": sum(1 << i for i, policy in enumerate(policies) if getattr(policy, event) is not None)
        for event in EVENTS
    }
    hooks = {
        "choose": chosen.routing,
        "suggest": chosen.prefetch,
        "want": chosen.miss,
        "substitute": chosen.miss,
        "admit": chosen.eviction,
    }
    given = {f"has_{hook}": getattr(owner.policy, hook) is not None for hook, owner in hooks.items()}
    eviction = chosen.eviction.policy
    given["has_resolve"] = not chosen.miss.policy.fetches_all
    given["has_admit"] = eviction.admit is not None and eviction.declines(chosen.eviction.params)
    each = given["has_admit"] or eviction.victim is not None  # a victim may depend on earlier victims
    given["asks_of_each"] = eviction.admit is not None and each and not eviction.decides_once
    named = chosen.reads
    reads = {"reads_passes": "next_pass" in named, "reads_weights": "weight" in named}
    reads |= {f"reads_{name}": name in named for name in ("logits", "choice", "unfetched")}
    reads |= {"reads_demand": bool(named & {"rank", "mass"}), "reads_need": bool(named & {"needed", "mass_ever"})}
    queue = eviction.queue(chosen.eviction.params)
    without_key = HOOKS.keys() - {"key"}  # the key of a queue is one column, whatever else its text names
    columns = frozenset({queue}).union(
        *(named_by(policy, without_key if policy is eviction and queue else HOOKS) for policy in policies)
    )
    reads |= {number: bool(names & columns) for number, names in IF_NAMED.items()}
    return listeners | given | reads | _key_dependencies(eviction) | {"renews": chosen.prefetch.policy.renews_queue}


def _key_dependencies(eviction: Eviction) -> dict[str, int]:
    """Return the table columns on which the eviction policy's keys depend."""
    named = eviction.may_read
    return {
        "keys_read_demand": bool(named & {"needed", "mass_ever"}),
        "keys_read_future": bool(named & {"next_use", "next_pass"}),
        "keys_read_predictions": bool(named & {"prediction_pass", "last_prediction"})
        or eviction.on_predict is not None,
        "keys_read_gate": eviction.on_gate is not None,
    }


def _lengths(inputs: Inputs, spec: RunSpec, chosen: PolicySet, lines: int, keep: bool) -> dict[str, int]:
    layout, geometry = spec.layout, spec.layout.geometry
    most, copies = len(pass_lengths(inputs, spec)) - 1, layout.experts * layout.precisions
    numbers = inputs.lengths | {
        "n_experts": layout.experts,
        "n_copies": copies,
        "n_links": len(spec.times.depth),
        "n_tiers": len(spec.lower),
        "n_tiered": len(spec.lower) * copies,
        "n_pools": len(spec.pools),
        "n_reals": max(geometry.layers, len(spec.pools)),
        "n_queued": copies + len(spec.pools),
        "n_cells": geometry.layers * 2 * WIDTH,
        "n_buckets": geometry.layers * 2 * BUCKETS,
        "n_log": lines,
        "n_members": copies * (_candidate_rows(spec) // geometry.layers),
        "n_ranks": _candidate_rows(spec),
        "n_ring": 1 << ((1 + (spec.times.cpu_tier >= 0)) * copies).bit_length(),
        "n_most": most,
        "n_held": most if inputs.lengths["n_scored"] else 0,
        "n_accesses": 2 * geometry.experts,
        "n_batch": most if inputs.lengths["n_batched"] else 0,
        "n_kept": int(inputs["pass_tokens"].sum()) + len(inputs["share_token"]) if keep else 0,
        "n_counters": WIDTH,
        "n_times": TIMES,
        "n_par": len(chosen.eviction.par()),
        "n_warm": len(spec.start[0]),
        "n_warm_lower": sum(map(len, spec.start[1:])),
        "n_resident": len(spec.resident),
        "n_to_load": copies if spec.times.loads_prefetches else 0,
        "arrives": inputs.lengths["n_shares"] > 0,
    }
    numbers |= _of_arrivals(numbers, spec) if numbers["arrives"] else {"n_slots": 0, "n_arrivals": 0}
    rings = numbers["n_links"] * numbers["n_ring"]
    numbers |= {"n_rings": rings, "n_pieces": rings if spec.times.has_pieces else 0}
    numbers |= {"n_crossings": rings if spec.times.by_matrix else 0}
    for i, kind in enumerate(KINDS):
        memory: Memory = getattr(chosen, kind).policy.memory
        rows = memory.rows + memory.rows_per_expert * geometry.experts
        numbers |= {f"rows_{i}": rows, f"regs_{i}": memory.regs, f"reals_{i}": memory.reals}
    return numbers


def _of_arrivals(numbers: Mapping[str, int], spec: RunSpec) -> dict[str, int]:
    """Return the lengths of arrays that a run with arrivals fills: each share could have a pass of its own."""
    slots = slots_of(spec.config.passes)
    assert slots is not None  # checked when the run was planned
    return {
        "passes": numbers["n_shares"] - 1,
        "n_drafting": numbers["n_shares"] - 1,
        "n_batched": numbers["n_share_rows"],
        "n_batch": numbers["n_most"],
        "n_slots": min(slots.many, numbers["n_rows"]),
        "n_arrivals": numbers["n_rows"],
    }


# contents of the arrays


def _fill_tables(state: SimulationState, spec: RunSpec) -> None:
    """Fill in the constant columns, and the initial values that are not 0."""
    arrays, layout, geometry = state.arrays, spec.layout, spec.layout.geometry
    experts, owned, copies, pools = (arrays[name] for name in ("experts", "owned", "copies", "pools"))
    y = np.arange(len(owned))
    owned["x"], copies["since"] = y // layout.precisions, NEVER_LEFT
    arrays["copy_layer"][:] = owned["x"] // geometry.experts
    owned["kind"] = layout.rows[owned["x"]] * layout.precisions + y % layout.precisions
    arrays["kind_bytes"][:] = np.array(layout.tiers, np.int64).T.ravel()
    if state["n_links"] > 1:
        owned["link"] = np.array(spec.times.homes)[owned["x"]]
    links = state["links"][: state["n_links"]]
    links["depth"], links["latency_ns"] = spec.times.depth, spec.times.latency_ns
    links["first"], links["last_done"] = spec.times.first, NOT_YET
    lower = state["lower"][: state["n_tiers"]]
    lower["fifo"], lower["capacity"], lower["oldest"], lower["newest"] = spec.times.fifo, spec.lower, NONE, NONE
    owned["bytes"] = layout.taken
    by_layer = arrays["copy_layer"] if len(pools) > 1 else 0
    owned["pool"] = np.array(spec.pool_of)[owned["x"]] if _pooled(spec) == BY_LINK else by_layer
    experts["layer"] = np.arange(len(experts)) // geometry.experts
    experts["last_pass"] = experts["prediction_pass"] = -1
    pools["capacity"], pools["scope"] = spec.pools, NEVER_LEFT
    arrays["union_at"][:], arrays["access_of"][:] = NONE, NONE
    arrays["least_key"][:], arrays["least_order"][:] = NO_KEY, NO_KEY
    copies["behind"] = copies["in_front"] = np.arange(len(copies))
    arrays["keyed_scope"][:] = 0 if state["key_scope"] == TOUCH else NEVER_LEFT
    arrays["keyed_pass"][:] = NEVER_LEFT
    arrays["layered"][:] = LAYERED[: len(arrays["layered"])]
    first, *below = (x * layout.precisions for x in spec.start)
    arrays["warm"][:], arrays["resident"][:] = first, spec.resident
    if below:
        arrays["warm_tier"][:] = np.repeat(np.arange(len(below)), [*map(len, below)])
        arrays["warm_lower"][:] = np.concatenate([y[::-1] for y in below])  # the first to be evicted first
    if spec.arrivals:
        arrays["arrival_ns"][:] = np.array(spec.arrivals, np.int64)[arrays["requests"]]


def _fill_oracle(state: SimulationState, oracle: Oracle) -> None:
    """Fill in oracle information: next uses, next passes and the profile ranking."""
    experts, owned = state.arrays["experts"], state.arrays["owned"]
    experts["next_use"] = np.asarray(oracle.first_uses, np.int64) if len(oracle.first_uses) else NEVER
    experts["next_pass"] = np.asarray(oracle.first_passes, np.int64) if len(oracle.first_passes) else NEVER
    experts["profile"], ranked = NEVER, np.array(oracle.ranking, np.int64)
    of = owned[ranked * int(state["precisions"])]
    experts["profile"][ranked] = bytes_before(of["pool"], of["bytes"])


def _fill_constants(state: SimulationState, spec: RunSpec, chosen: PolicySet) -> None:
    """Fill in constants that policies and routers read."""
    geometry, here = spec.layout.geometry, state.arrays["now"]
    here["layers"], here["experts"], here["k"] = geometry.layers, geometry.experts, geometry.k
    here["precisions"], here["seed"] = spec.layout.precisions, spec.config.seed
    for i, kind in enumerate(KINDS):
        of: Chosen = getattr(chosen, kind)
        state.arrays[f"own_par_{i}"][:] = of.par()
        state.arrays[f"own_capacity_{i}"][:] = spec.pools
    rule, router = state.arrays["rule"], geometry.router
    rule["family"], rule["shared"] = FAMILIES.index(router.family), is_shared(router)
    rule["scale"], rule["band"] = router.scale, 2 * router.jitter
