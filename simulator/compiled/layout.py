"""The memory layout of a run: the numbers of its state, and the arrays that they address, with types and shapes.

Experts x = layer * E + e and copies y = x * P + p are numbered densely, so that nothing is looked up by name. What
policies see as `experts` and `copies` (`policies/contract.py`) are columns of three tables here (`state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moereplay.policies.hooks import EVENTS
from moereplay.simulator.platform import MOST_LINKS, MOST_TIERS


def record(names: str) -> np.dtype:
    """Return a record type of int64 numbers."""
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


#: Constants of a run. `listeners_*` are sets, with bit i for the i-th kind of policy; `keys_read_*` are dependencies of
#: the eviction policy's keys, `reads_*` the reads of any hook. `pooled`: one pool, one per layer or one per link, each
#: with `pool_rows` rows of candidates. `external`: the caller reports when activities end.
SETTING = (
    "layers experts width precisions passes pooled pool_rows sequential after_demand free_only reset_every "
    "side_slots reach logs keeps batched weighted scored knows_future by_key queue key_scope ranks row_length "
    "keys_read_demand keys_read_future keys_read_predictions keys_read_gate reads_passes reads_weights reads_logits "
    "reads_choice reads_ids reads_demand reads_need keeps_uses keeps_entered keeps_predictions renews "
    "has_choose has_suggest has_want has_resolve has_substitute has_admit asks_of_each has_cpu "
    "has_loading loads_prefetches waits_for_all has_start slows_compute reads_kv draft_ns has_pieces victim_ns "
    "by_matrix has_stages matrices cpu_tier sync_ns next_pass reads_unfetched arrives uneven external "
    + "".join(f"listeners_{event} " for event in EVENTS)
)
#: Variables of a run, in records; one chapter writes each (OWNS, tests/simulator/test_compiled_state.py). A ring is a
#: pair of positions that only grow; the index in its array is the remainder.
RECORDS = {
    "clock": record("time compute_at cpu_at go wake waiting"),
    "compute": record(
        "program_counter then index layer start tokens began gated_at looked_up turn coming running spent ready_first "
        "gathered"
    ),
    "loading": record("next"),
    "round": record("stages stage whole"),
    "preloads": record("first end"),  # prefetches that compute has to load
    "arrival": record("y behind"),  # what has just come where the CPU reads, and whether a prefetch goes on from there
    # works [first, end) of the look-up, the ends of those before `planned` being known; experts that are not computed;
    # the step after that which has paid `sync_ns`
    "cpu": record("first end planned left synced"),
    "demand": record("demanded assignments mass changed"),
    "gate": record("served missed"),  # of the look-up; misses of the step so far
    "substitution": record("substituted"),
    "cache": record("pinned_now done_now bypassed arrivals evicted_now"),
    "space": record("aside_now"),
    "uses": record("timestamps"),
    "ranking": record("invalid_now rows_marked"),
    "side_buffer": record("in_side"),
    "link": record("ready_end closed announced"),  # of all links; what each has is a row of ROWS["links"]
    "counters": record("row page"),
    "log": record("lines"),
    "notes": record("end crowded"),  # whether a step did not fit its pool
    "course": record("end started differs"),  # its next mark, and the transfers that have been noted
    "reset": record("tokens passes"),
    # next request, rows of all passes; of the pass: its context, and whether it shares no request with the one before
    "arrivals": record("coming rows context apart drafts"),
    "stepped": record("ended y elapsed"),
    "errors": record("error culprit"),
}
#: Records with several rows, up to a fixed number. They are part of the state, so that the first row needs no pointer.
#: A link: its constants, its rings, the completion time of its last transfer (-1 before the first), and whether the
#: first piece of the next transfer has arrived; links into the fast tier come first, then one into each lower tier. A
#: lower tier: bytes, and the ends of its list of complete copies.
LINK = record(
    "depth latency_ns first demand_first demand_end prefetch_first prefetch_end flight_first flight_end "
    "last_done pieced crossings matrices_here"
)
LOWER_TIER = record("capacity used complete held_bytes oldest newest fifo")
ROWS = {"links": (LINK, MOST_LINKS + MOST_TIERS), "lower": (LOWER_TIER, MOST_TIERS)}

#: Lengths of arrays that are not constants above.
LENGTHS = (
    "n_experts n_copies n_links n_tiers n_tiered n_pools n_reals n_queued n_kinds n_cells n_buckets n_log n_members "
    "n_ranks n_ring ring_mask n_steps n_demand n_rings n_wires n_starts n_matrices n_read_links n_reads n_lane_rates "
    "n_lanes n_crossings n_passes n_tokens n_weighted n_scored n_look n_lengths n_sizes n_most n_costs n_cpu_costs "
    "n_held n_pieces n_to_load n_contexts n_accesses n_kept n_rows n_counters n_times n_par n_warm n_resident "
    "n_warm_lower "
    "n_sums n_drafting n_batched n_batch n_slots n_shares n_share_rows n_arrivals n_firsts n_noted n_noted_tokens "
    "n_course n_layered n_layer_cells "
    "rows_0 regs_0 reals_0 rows_1 regs_1 reals_1 rows_2 regs_2 reals_2 rows_3 regs_3 reals_3 "
)

#: What a step reads and writes of every copy: two rows fill a line of the processor's cache, and all rows of a small
#: model its first level. The other columns are in OWNED and EXPERT.
COPY = np.dtype(
    [
        ("last_use", np.int64),  # of its expert; in the row of the expert's first copy
        ("since", np.int32),  # the step in which it came, while it is resident; else the pass in which it left
        ("target", np.int32),  # the step that its prefetch is for
        ("behind", np.int32),  # in a queue: the copies after and before it
        ("in_front", np.int32),
        ("state", np.int8),
        ("protected", np.int8),
        ("prefetched", np.int8),
        ("member", np.int8),  # 1 while it is resident in its pool
        ("done", np.int8),  # 1 from the end of its compute to the end of the step
        ("prefetch", np.int8),  # its transfer is a prefetch; is awaited by a demand
        ("awaited", np.int8),
        ("invalid", np.int8),  # 1 while its key is invalid
    ],
    align=True,
)
OWNED = np.dtype(
    [
        ("entered", np.int64),
        ("bytes", np.int64),
        ("pool", np.int32),
        ("x", np.int32),
        ("kind", np.int32),  # row of `Geometry.rows` * P + precision, which determines size and times
        ("member_at", np.int32),  # position in its layer's list of members
        ("row_at", np.int32),  # position in its layer's row of candidates, from 1; 0 if it is not one
        ("lower", np.int8),
        ("listed", np.int8),  # 1 if it is unpinned when the step ends
        ("aside", np.int8),  # state before it was selected as one of several victims (cache.py)
        ("counted", np.int8),  # 1 if its arrival by a prefetch counted as its first use
        ("side", np.int8),  # 1 while it is in a side buffer
        ("bypasses", np.int8),  # its transfer bypasses the cache
        ("link", np.int8),  # its home link
        ("for_cpu", np.int8),  # 1 while it comes where the CPU reads; 2 if a prefetch goes on from there
        ("for_good", np.int8),  # 1 if it never leaves the fast tier
        ("parts", np.int8),  # matrices that have landed, of a demand that is read matrix by matrix
    ],
    align=True,
)
EXPERT = np.dtype(
    [
        ("last_pass", np.int32),
        ("uses_ever", np.int32),
        ("uses_here", np.int32),
        ("prediction_pass", np.int32),
        ("layer", np.int32),
        ("needed", np.int8),
        ("last_prediction", np.int64),
        ("mass_ever", np.int64),
        ("next_use", np.int64),
        ("next_pass", np.int64),
        ("profile", np.int64),
    ],
    align=True,
)
#: Columns that policies see and that are written only if one of a run's policies names them.
IF_NAMED = {
    "keeps_uses": {"last_pass", "uses_ever", "uses_here"},
    "keeps_entered": {"entered"},
    "keeps_predictions": {"last_prediction", "prediction_pass"},
}
#: Passes and steps are numbers of 32 bits.
MOST_STEPS = np.iinfo(np.int32).max
POOL = record("capacity used open scope")
ACCESS = record("n x y tokens served")
EVENT = record("t0 t1 kind pass layer expert precision cause")
#: Request to stop a run (simulator/threads.py), written by another thread while machine code reads it.
STOP = record("requested")
#: The router's rule from shares to weights (traces/routers.py).
RULE = np.dtype([("family", np.int64), ("shared", np.int64), ("scale", np.float64), ("band", np.float32)], align=True)

#: Every array: its type and the numbers of the state that give its shape.
ARRAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    # the tables that policies see, and internal tables
    "experts": (EXPERT, ("n_experts",)),
    "copies": (COPY, ("n_queued",)),  # and a node for each pool's queue
    "copy_layer": (np.int16, ("n_copies",)),
    "owned": (OWNED, ("n_copies",)),
    "pools": (POOL, ("n_pools",)),
    "kind_bytes": (np.int64, ("n_kinds",)),
    "wire_ns": (np.int64, ("n_wires",)),
    "slow_wire_ns": (np.int64, ("n_wires",)),  # while the CPU computes
    "start_ns": (np.int64, ("n_starts",)),  # more latency on an idle wire
    # for batches: sums of the matrices' sizes; of each link its first point, points (bytes, bytes/s), rates by reads
    "matrix_sum": (np.int64, ("n_matrices",)),
    "read_first": (np.int64, ("n_read_links",)),
    "read_size": (np.int64, ("n_reads",)),
    "read_rate": (np.int64, ("n_reads",)),
    "slow_read_rate": (np.int64, ("n_reads",)),
    "lane_rate": (np.int64, ("n_lane_rates",)),
    "slow_lane_rate": (np.int64, ("n_lane_rates",)),
    # counters
    "cells": (np.int64, ("n_cells",)),  # by layer, phase, counter
    "lifetimes": (np.int64, ("n_buckets",)),  # by layer, phase, bucket
    "log": (EVENT, ("n_log",)),
    # decisions, for other platforms: hits and misses of every step; tokens of each, in passes of several (fast_path.py)
    "noted_hits": (np.int16, ("n_noted",)),
    "noted_misses": (np.int16, ("n_noted",)),
    "noted_tokens": (np.int32, ("n_noted_tokens",)),
    "course": (np.int16, ("n_course",)),  # starts, landings and computations in their order (fast_path.py)
    "rows": (np.int64, ("n_rows", "n_counters")),  # per request
    "row_times": (np.int64, ("n_rows", "n_times")),
    "before": (np.int64, ("n_counters",)),  # counters at the start of the current request
    "layered": (np.int64, ("n_layered",)),  # counters that rows per request and layer have, if they are kept
    "layer_rows": (np.int64, ("n_rows", "n_layer_cells")),  # per request: by layer, phase, `layered`
    "layer_before": (np.int64, ("n_layer_cells",)),
    # victim selection: rows of candidates, one per layer, or per pool and layer; their smallest keys; members; copies
    # with invalid keys
    "row_key": (np.int64, ("n_members",)),
    "row_order": (np.int64, ("n_members",)),
    "row_count": (np.int64, ("n_ranks",)),
    "least_key": (np.int64, ("n_ranks",)),
    "row_shift": (np.int64, ("n_ranks",)),
    "least_order": (np.int64, ("n_ranks",)),
    "row_marked": (np.int8, ("n_ranks",)),
    "marked_rows": (np.int64, ("n_ranks",)),
    "members": (np.int32, ("n_members",)),
    "member_count": (np.int64, ("n_ranks",)),
    "keyed_scope": (np.int64, ("n_ranks",)),  # the scope and the pass in which a row's keys were evaluated
    "keyed_pass": (np.int64, ("n_ranks",)),
    "invalid_copies": (np.int64, ("n_copies",)),
    "eval_copies": (np.int64, ("n_copies",)),  # a batch of copies, and their keys
    "eval_keys": (np.int64, ("n_copies",)),
    # rings of queued and moving copies, completion times, and arrivals that compute waits for; lengths are powers of
    # two. All but `ready` hold one ring per link in sequence, as do the wire times
    "demand_queue": (np.int64, ("n_rings",)),
    "prefetch_queue": (np.int64, ("n_rings",)),
    "flight": (np.int64, ("n_rings",)),
    "lands": (np.int64, ("n_rings",)),
    "piece_at": (np.int64, ("n_pieces",)),  # arrival times of first pieces
    "ready": (np.int64, ("n_ring",)),
    # of the first expert of a transfer, where links read matrix by matrix: its experts, and its time on the wire
    "batch_count": (np.int64, ("n_crossings",)),
    "bytes_at": (np.int64, ("n_crossings",)),
    "wire_until": (np.int64, ("n_crossings",)),
    "to_load": (np.int64, ("n_to_load",)),  # prefetches in the order of their suggestion
    # the lower tiers in sequence: complete copies, least recently read first
    "newer": (np.int64, ("n_tiered",)),
    "older": (np.int64, ("n_tiered",)),
    "is_there": (np.int8, ("n_tiered",)),
    "held": (np.int8, ("n_tiered",)),  # by transfers upwards that are queued or moving, and by the CPU
    "coming": (np.int8, ("n_tiered",)),  # whether it is on its way in, and what goes on from here (link.py)
    "cpu_queue": (np.int64, ("n_accesses",)),  # works of the CPU: accesses, and when they end as far as it is known
    "cpu_until": (np.int64, ("n_accesses",)),
    # lists of the step, and side buffers in the order of their transfers
    "pinned": (np.int64, ("n_copies",)),
    "done": (np.int64, ("n_copies",)),
    "chosen_victims": (np.int64, ("n_copies",)),  # in the order of selection
    "buffered": (np.int64, ("n_copies",)),
    # durations
    "dense_ns": (np.int64, ("n_lengths", "layers")),
    "slow_dense_ns": (np.int64, ("n_lengths", "layers")),  # while a link works
    "dense_row": (np.int64, ("n_costs",)),  # row by tokens of the pass
    "kv_ns": (np.int64, ("n_contexts",)),  # per pass, or per length of context (links.py), for one layer
    "slow_kv_ns": (np.int64, ("n_contexts",)),
    "load_ns": (np.int64, ("n_kinds",)),
    "cost_row": (np.int64, ("n_kinds",)),
    "expert_ns": (np.int64, ("n_sizes", "n_costs")),
    "slow_expert_ns": (np.int64, ("n_sizes", "n_costs")),
    "cpu_ns": (np.int64, ("n_sizes", "n_cpu_costs")),
    "slow_cpu_ns": (np.int64, ("n_sizes", "n_cpu_costs")),  # while the link works
    # the current step: its tokens, and their experts after routing and after misses, with weights
    "ids": (np.int64, ("n_most", "width")),
    "ran": (np.int64, ("n_most", "width")),
    "chosen": (np.int64, ("n_most", "width")),
    "units": (np.int64, ("n_most", "width")),
    "reweighed": (np.int64, ("n_most",)),  # 1 for tokens with new weights in `units`
    "weights": (np.int64, ("n_most", "width")),  # of routed experts, for policies
    "logits": (np.float64, ("n_held", "experts")),
    "choice": (np.float64, ("n_held", "experts")),
    "batch_scores": (np.int32, ("n_batch", "experts")),  # gathered tokens of a batched pass, for policies
    "batch_order": (np.int16, ("n_look", "n_batch", "experts")),
    "batch_score": (np.int32, ("n_look", "n_batch", "experts")),
    "own_in_run": (np.int64, ("width",)),  # of one token: positions of routed experts in the run, and the reverse
    "run_in_own": (np.int64, ("width",)),
    "suggested": (np.int64, ("n_copies",)),
    # the step's demand in demand order, and the demand after substitution
    "demand_expert": (np.int64, ("experts",)),
    "demand_rank": (np.int64, ("experts",)),
    "demand_mass": (np.int64, ("experts",)),
    "demand_sum": (np.int64, ("experts",)),
    "demand_tokens": (np.int64, ("experts",)),
    "demand_next": (np.int64, ("experts",)),
    "demand_pass": (np.int64, ("experts",)),
    "final_expert": (np.int64, ("experts",)),
    "final_rank": (np.int64, ("experts",)),
    "final_mass": (np.int64, ("experts",)),
    "final_sum": (np.int64, ("experts",)),
    "final_tokens": (np.int64, ("experts",)),
    "wants": (np.int64, ("experts",)),
    "missing": (np.int64, ("experts",)),
    "unfetched": (np.int64, ("experts",)),  # what becomes of a miss that is not fetched, if a policy reads it
    "verdict": (np.int64, ("experts",)),
    "eligible": (np.int64, ("experts",)),
    "stand_ins": (np.int64, ("experts",)),  # tokens that each expert takes over from the current access
    "tier": (np.int64, ("experts",)),  # precision at which each expert of the layer runs in this step, or NONE
    "slot": (np.int64, ("experts",)),  # the access that serves an expert, or NONE
    "predictions": (np.int32, ("n_experts",)),  # how often it was predicted for its layer's next gate
    "present": (np.int64, ("experts",)),  # demanded and resident, in demand order
    "absent": (np.int64, ("experts",)),  # demanded and absent
    "union_at": (np.int64, ("experts",)),  # an expert's position in the union being made, or NONE
    "access_of": (np.int64, ("experts",)),  # an expert's access while the union is made again, or NONE
    "accesses": (ACCESS, ("n_accesses",)),
    "others": (ACCESS, ("n_accesses",)),
    "kept": (np.int16, ("n_kept", "layers", "width")),  # experts that every token ran, if kept
    "slot_number": (np.int64, ("n_slots",)),  # of requests that arrive: who has a slot, its next share and their end
    "slot_next": (np.int64, ("n_slots",)),
    "slot_end": (np.int64, ("n_slots",)),
    "arrival_ns": (np.int64, ("n_arrivals",)),  # by number of the request
    "warm": (np.int64, ("n_warm",)),
    "resident": (np.int64, ("n_resident",)),
    "warm_tier": (np.int64, ("n_warm_lower",)),
    "warm_lower": (np.int64, ("n_warm_lower",)),
}
#: The demand side: a schedule of passes over recorded tokens. A pass consists of rows, numbered through the run. Unless
#: a state is `batched`, row r is token r, the rows of a pass share a request and phase, and arrays of rows are empty.
#: Requests are numbered in the order of their first rows. Absent arrays have length 0.
INPUT_ARRAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "pass_start": (np.int64, ("passes",)),  # first row
    "pass_tokens": (np.int64, ("passes",)),
    "pass_phase": (np.int64, ("passes",)),  # of the first row, as are the next
    "pass_request": (np.int64, ("passes",)),
    "pass_number": (np.int64, ("passes",)),
    "pass_position": (np.int64, ("passes",)),  # earlier tokens of the request
    "pass_apart": (np.int8, ("passes",)),  # 1 if it shares no request with the previous pass
    "pass_drafts": (np.int64, ("n_drafting",)),  # empty without drafts
    "row_token": (np.int64, ("n_batched",)),
    "row_reads": (np.int64, ("n_batched",)),  # the token whose routing it has
    "row_draft": (np.int8, ("n_batched",)),
    "row_number": (np.int64, ("n_batched",)),
    "row_phase": (np.int8, ("n_batched",)),
    "row_opens": (np.int8, ("n_batched",)),  # 1 for the first row of a request and phase in a pass
    "requests": (np.int64, ("n_rows",)),  # by number
    # where requests arrive: their shares of passes, in sequence. The arrays of passes and rows are then written by the
    # run, and those of the demand stream are empty
    "first_share": (np.int64, ("n_firsts",)),  # by number of the request; the last is the end
    "share_start": (np.int64, ("n_shares",)),  # first row; the last is the end
    "share_token": (np.int64, ("n_share_rows",)),
    "share_reads": (np.int64, ("n_share_rows",)),
    "share_draft": (np.int8, ("n_share_rows",)),
    "share_phase": (np.int8, ("n_share_rows",)),
    "offsets": (np.int64, ("n_steps",)),  # of a step in the demand stream; the last is its end
    "stream_expert": (np.int16, ("n_demand",)),
    "stream_rank": (np.int16, ("n_demand",)),
    "stream_mass": (np.int64, ("n_demand",)),
    "stream_sum": (np.int64, ("n_demand",)),
    "stream_tokens": (np.int32, ("n_demand",)),
    "stream_next": (np.int64, ("n_demand",)),
    "stream_pass": (np.int64, ("n_passes",)),  # of the next use
    "token_ids": (np.int16, ("n_tokens", "layers", "width")),
    "token_weights": (np.float32, ("n_weighted", "layers", "width")),
    "token_logits": (np.float32, ("n_scored", "layers", "experts")),
    "token_choice": (np.float32, ("n_scored", "layers", "experts")),
    "token_assigned": (np.int16, ("n_sums", "layers")),  # of a token: experts that its router chose, and their weight
    "token_mass": (np.int64, ("n_sums", "layers")),
    "token_scores": (np.int32, ("n_scored", "layers", "experts")),
    "token_shares": (np.float32, ("n_scored", "layers", "experts")),
    "look_order": (np.int16, ("n_look", "n_tokens", "layers", "experts")),
    "look_score": (np.int32, ("n_look", "n_tokens", "layers", "experts")),
}
#: Input arrays that a run with arrivals writes itself, those of passes and rows, by the names of their writers.
PLAN_ARRAYS = {f"plan_{name}": name for name in INPUT_ARRAYS if name.startswith(("pass_", "row_"))}
#: Memory of the four kinds of policy, in the order of simulator.config.KINDS.
MEMORIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    f"{column}_{kind}": (dtype, axes)
    for kind in range(4)
    for column, dtype, axes in (
        ("own_rows", np.int64, ("n_copies", f"rows_{kind}")),
        ("own_regs", np.int64, ("n_pools", f"regs_{kind}")),
        ("own_reals", np.float64, ("n_reals", f"reals_{kind}")),
        ("own_par", np.float64, ("n_par",)),
        ("own_capacity", np.int64, ("n_pools",)),
    )
}
#: The owner of each array, shared column and record that does not have its chapter's name: only this chapter writes it.
#: A function may also write to its arguments; the caller owns them.
OWNS = {
    "state": "errors",
    "counters": "log before cells lifetimes row_times rows layer_rows layer_before",
    "clock": "links.last_done compute.program_counter compute.then",
    "ranking": (
        "experts uses eval_copies invalid_copies keyed_pass keyed_scope least_key least_order marked_rows member_count "
        "members row_count row_key row_marked row_order row_shift pools.scope copies.invalid copies.last_use "
        "copies.behind copies.in_front owned.member_at owned.row_at"
    ),
    "cache": (
        "copies pools.used pools.open pinned done owned.counted owned.entered owned.for_good owned.listed "
        "space chosen_victims owned.aside side_buffer buffered owned.side"
    ),
    "link": (
        "links prefetch_queue demand_queue flight lands piece_at ready "
        "copies.awaited copies.prefetch owned.bypasses "
        "batch_count bytes_at wire_until owned.parts "
        "lower newer older is_there held coming owned.for_cpu arrival owned.lower"
    ),
    "links": "preloads to_load predictions link.announced copies.target",
    "demand": (
        "chosen ids ran weights logits choice batch_scores batch_order batch_score union_at "
        "demand_expert demand_mass demand_next demand_pass demand_rank "
        "demand_sum demand_tokens final_expert final_mass final_rank final_sum final_tokens "
        "substitution access_of eligible others stand_ins reweighed units own_in_run run_in_own"
    ),
    "gate": "now.absent accesses missing slot tier unfetched verdict",
    "passes": "reset arrivals slot_number slot_next slot_end " + " ".join(PLAN_ARRAYS),
    "compute": "now kept cpu cpu_queue cpu_until loading round accesses.served counters.page",
    "fast_path": "present absent course notes noted_hits noted_misses noted_tokens",
    "engine": "stepped",
    "adapters": "eval_keys wants suggested",
}

#: The start of a state: its numbers and the addresses of its arrays, all int64, with their positions.
HEAD = (
    *(SETTING + LENGTHS).split(),
    *(f"at_{name}" for name in ("now", "rule", "stop", *ARRAYS, *INPUT_ARRAYS, *MEMORIES)),
)
POSITIONS = {name: position for position, name in enumerate(HEAD)}
STATE = np.dtype(
    [
        *((name, np.int64) for name in HEAD),
        *RECORDS.items(),
        *((name, dtype, (most,)) for name, (dtype, most) in ROWS.items()),
    ],
    align=True,
)


# Kernel variants: the numbers of the state that are constants in each (`simulator/jit/translation.py`).

#: The engine computes when activities end.
OWN_CLOCK = {"external": 0}
#: Costs and machines that the fast path's own code computes, if it is compiled for them: numbers known in advance,
#: several links, lower tiers, experts for good and requests that arrive.
LOOKED_UP = ("has_start", "slows_compute", "reads_kv", "draft_ns", "has_pieces", "victim_ns")
LOOKED_UP += ("n_links", "n_tiers", "n_resident", "arrives")
#: Two tiers, no expert for good, no prefetch for the next pass, passes known before the run, and no cost term beyond a
#: table.
TWO_TIERS = dict.fromkeys((name for name in LOOKED_UP if name != "n_links"), 0)
TWO_TIERS |= dict.fromkeys(("has_loading", "loads_prefetches", "waits_for_all", "by_matrix", "has_stages"), 0)
TWO_TIERS |= dict.fromkeys(("cpu_tier", "sync_ns", "next_pass", "n_warm_lower"), 0)
PLAIN = TWO_TIERS | OWN_CLOCK
#: The caller reports when activities of compute and of one link end.
STEPPED = {**TWO_TIERS, "external": 1, "n_links": 1, "logs": 1, "has_cpu": 0}
#: Two tiers and one link, one precision, a size per layer, contract `atomic`, every miss fetched, no listeners, no log,
#: no cost term beyond a table.
FROZEN = {
    **PLAIN,
    "precisions": 1,
    "uneven": 0,  # it is 1 where experts of a layer differ in bytes, or slots are padded
    "n_links": 1,
    "by_key": 1,
    **dict.fromkeys(("sequential", "side_slots", "logs", "keeps", "n_warm"), 0),
    **dict.fromkeys(("has_want", "has_resolve", "has_substitute", "has_admit", "asks_of_each"), 0),
    **dict.fromkeys((f"listeners_{event}" for event in EVENTS), 0),
}


#: Where queues may replace keys (`ranking.py`): copies that are used without being in a pool would be queued as well.
QUEUED = {**OWN_CLOCK, "precisions": 1, "by_key": 1, "side_slots": 0, "has_admit": 0, "n_warm": 0}
#: The fast path with what LOOKED_UP names, and without it but for drafts.
PRICED = {name: value for name, value in FROZEN.items() if name not in LOOKED_UP}
FAST = {name: value for name, value in FROZEN.items() if name != "draft_ns"}


def is_plain(numbers: Mapping[str, Any]) -> bool:
    """Return whether a run needs neither lower tiers nor costs beyond tables."""
    return all(numbers[name] == value for name, value in PLAIN.items())


def depends_on_time(numbers: Mapping[str, Any]) -> bool:
    """Return whether decisions depend on time, so that their order in time has to be noted (fast_path.py)."""
    return bool(numbers["has_suggest"] or numbers["n_drafting"])


def is_fast(numbers: Mapping[str, Any]) -> bool:
    """Return whether a fast path can replay a run with these numbers."""
    return all(numbers[name] == value for name, value in PRICED.items())


def is_priced(numbers: Any) -> bool:
    """Return whether a fast path that can replay a run is the one with prices."""
    return any(numbers[name] != value for name, value in FAST.items())
