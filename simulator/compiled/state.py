"""Access to the state of a run: a function per array, policies' memories, properties of copies, and event listeners."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from moereplay.policies.contract import NOW, Own
from moereplay.policies.hooks import HOOKS, KINDS
from moereplay.simulator.compiled.layout import ARRAYS, INPUT_ARRAYS, MEMORIES, PLAN_ARRAYS, RULE, STOP
from moereplay.simulator.jit.marks import array_reader, called, fast, merged, record_reader

#: Larger than every key.
NO_KEY = (1 << 63) - 1
NEVER_LEFT = -1
now = record_reader("now", NOW)
rule = record_reader("rule", RULE)
stop_flag = record_reader("stop", STOP)
_reader = {name: array_reader(name, dtype, *axes) for name, (dtype, axes) in ARRAYS.items()}
_reader |= {name: array_reader(name, dtype, *axes, readonly=True) for name, (dtype, axes) in INPUT_ARRAYS.items()}
#: Where requests arrive: writers of the passes.
_reader |= {name: array_reader(of, INPUT_ARRAYS[of][0], *INPUT_ARRAYS[of][1]) for name, of in PLAN_ARRAYS.items()}
#: Readers of whole arrays, for policies.
_whole = {name: array_reader(name, dtype, *axes, whole=True) for name, (dtype, axes) in (ARRAYS | MEMORIES).items()}
_whole |= {
    name: array_reader(name, dtype, *axes, readonly=True, whole=True) for name, (dtype, axes) in INPUT_ARRAYS.items()
}
#: Arrays that are read-only for hooks: a hook that writes to one does not compile.
_INPUTS = ("ids", "logits", "choice", "weights", "missing", "unfetched")
_INPUTS += ("demand_expert", "demand_rank", "demand_mass", "demand_tokens")
_INPUTS += ("batch_scores", "batch_order", "batch_score")
_INPUTS += tuple(name for name in MEMORIES if name.startswith(("own_par", "own_capacity")))
for _name in _INPUTS:
    _dtype, _axes = (ARRAYS | MEMORIES)[_name]
    _whole[_name] = array_reader(_name, _dtype, *_axes, readonly=True, whole=True)

experts = _reader["experts"]
copies = _reader["copies"]
owned = _reader["owned"]
pools = _reader["pools"]
wire_ns = _reader["wire_ns"]
slow_wire_ns = _reader["slow_wire_ns"]
start_ns = _reader["start_ns"]
cells = _reader["cells"]
lifetimes = _reader["lifetimes"]
log = _reader["log"]
rows = _reader["rows"]
row_times = _reader["row_times"]
before = _reader["before"]
row_key = _reader["row_key"]
row_order = _reader["row_order"]
row_count = _reader["row_count"]
least_key = _reader["least_key"]
row_shift = _reader["row_shift"]
least_order = _reader["least_order"]
row_marked = _reader["row_marked"]
marked_rows = _reader["marked_rows"]
members = _reader["members"]
member_count = _reader["member_count"]
keyed_scope = _reader["keyed_scope"]
keyed_pass = _reader["keyed_pass"]
behind = _reader["behind"]
in_front = _reader["in_front"]
invalid_copies = _reader["invalid_copies"]
eval_copies = _reader["eval_copies"]
eval_keys = _reader["eval_keys"]
demand_queue = _reader["demand_queue"]
prefetch_queue = _reader["prefetch_queue"]
flight = _reader["flight"]
lands = _reader["lands"]
batch_count = _reader["batch_count"]
bytes_at = _reader["bytes_at"]
wire_until = _reader["wire_until"]
matrix_sum = _reader["matrix_sum"]
read_first = _reader["read_first"]
read_size = _reader["read_size"]
read_rate = _reader["read_rate"]
slow_read_rate = _reader["slow_read_rate"]
lane_rate = _reader["lane_rate"]
slow_lane_rate = _reader["slow_lane_rate"]
piece_at = _reader["piece_at"]
to_load = _reader["to_load"]
ready = _reader["ready"]
newer = _reader["newer"]
older = _reader["older"]
is_there = _reader["is_there"]
held = _reader["held"]
coming = _reader["coming"]
cpu_queue = _reader["cpu_queue"]
cpu_until = _reader["cpu_until"]
resident = _reader["resident"]
unfetched = _reader["unfetched"]
pinned = _reader["pinned"]
done = _reader["done"]
chosen_victims = _reader["chosen_victims"]
buffered = _reader["buffered"]
dense_ns = _reader["dense_ns"]
slow_dense_ns = _reader["slow_dense_ns"]
dense_row = _reader["dense_row"]
kv_ns = _reader["kv_ns"]
slow_kv_ns = _reader["slow_kv_ns"]
load_ns = _reader["load_ns"]
cost_row = _reader["cost_row"]
expert_ns = _reader["expert_ns"]
slow_expert_ns = _reader["slow_expert_ns"]
cpu_ns = _reader["cpu_ns"]
slow_cpu_ns = _reader["slow_cpu_ns"]
ids = _reader["ids"]
ran = _reader["ran"]
chosen = _reader["chosen"]
units = _reader["units"]
reweighed = _reader["reweighed"]
weights = _reader["weights"]
logits = _reader["logits"]
choice = _reader["choice"]
own_in_run = _reader["own_in_run"]
run_in_own = _reader["run_in_own"]
suggested = _reader["suggested"]
demand_expert = _reader["demand_expert"]
demand_rank = _reader["demand_rank"]
demand_mass = _reader["demand_mass"]
demand_sum = _reader["demand_sum"]
demand_tokens = _reader["demand_tokens"]
demand_next = _reader["demand_next"]
demand_pass = _reader["demand_pass"]
final_expert = _reader["final_expert"]
final_rank = _reader["final_rank"]
final_mass = _reader["final_mass"]
final_sum = _reader["final_sum"]
final_tokens = _reader["final_tokens"]
wants = _reader["wants"]
missing = _reader["missing"]
verdict = _reader["verdict"]
eligible = _reader["eligible"]
stand_ins = _reader["stand_ins"]
tier = _reader["tier"]
slot = _reader["slot"]
predictions = _reader["predictions"]
present = _reader["present"]
accesses = _reader["accesses"]
others = _reader["others"]
union_at = _reader["union_at"]
access_of = _reader["access_of"]
kept = _reader["kept"]
noted_hits = _reader["noted_hits"]
noted_misses = _reader["noted_misses"]
noted_tokens = _reader["noted_tokens"]
course = _reader["course"]
warm = _reader["warm"]
pass_start = _reader["pass_start"]
pass_tokens = _reader["pass_tokens"]
pass_phase = _reader["pass_phase"]
pass_request = _reader["pass_request"]
pass_number = _reader["pass_number"]
pass_position = _reader["pass_position"]
pass_apart = _reader["pass_apart"]
pass_drafts = _reader["pass_drafts"]
row_token = _reader["row_token"]
row_reads = _reader["row_reads"]
row_draft = _reader["row_draft"]
row_number = _reader["row_number"]
row_phase = _reader["row_phase"]
row_opens = _reader["row_opens"]
requests = _reader["requests"]
first_share = _reader["first_share"]
share_start = _reader["share_start"]
share_token = _reader["share_token"]
share_reads = _reader["share_reads"]
share_draft = _reader["share_draft"]
share_phase = _reader["share_phase"]
slot_number = _reader["slot_number"]
slot_next = _reader["slot_next"]
slot_end = _reader["slot_end"]
arrival_ns = _reader["arrival_ns"]
plan_start = _reader["plan_start"]
plan_tokens = _reader["plan_tokens"]
plan_phase = _reader["plan_phase"]
plan_request = _reader["plan_request"]
plan_number = _reader["plan_number"]
plan_position = _reader["plan_position"]
plan_apart = _reader["plan_apart"]
plan_token = _reader["plan_token"]
plan_drafts = _reader["plan_drafts"]
plan_reads = _reader["plan_reads"]
plan_draft = _reader["plan_draft"]
plan_row_number = _reader["plan_row_number"]
plan_row_phase = _reader["plan_row_phase"]
plan_opens = _reader["plan_opens"]
offsets = _reader["offsets"]
stream_expert = _reader["stream_expert"]
stream_rank = _reader["stream_rank"]
stream_mass = _reader["stream_mass"]
stream_sum = _reader["stream_sum"]
stream_tokens = _reader["stream_tokens"]
stream_next = _reader["stream_next"]
stream_pass = _reader["stream_pass"]
token_ids = _reader["token_ids"]
token_weights = _reader["token_weights"]
token_logits = _reader["token_logits"]
token_choice = _reader["token_choice"]
token_shares = _reader["token_shares"]
look_order = _reader["look_order"]
look_score = _reader["look_score"]
token_scores = _reader["token_scores"]
token_assigned = _reader["token_assigned"]
token_mass = _reader["token_mass"]
batch_scores = _reader["batch_scores"]
batch_order = _reader["batch_order"]
batch_score = _reader["batch_score"]
all_experts = _whole["experts"]
all_copies = _whole["copies"]
all_eval_copies = _whole["eval_copies"]
all_eval_keys = _whole["eval_keys"]
all_suggested = _whole["suggested"]
all_eligible = _whole["eligible"]
all_ids = _whole["ids"]
all_logits = _whole["logits"]
all_choice = _whole["choice"]
all_weights = _whole["weights"]
all_chosen = _whole["chosen"]
all_missing = _whole["missing"]
all_verdict = _whole["verdict"]
all_unfetched = _whole["unfetched"]
all_wants = _whole["wants"]
all_demand_expert = _whole["demand_expert"]
all_demand_rank = _whole["demand_rank"]
all_demand_mass = _whole["demand_mass"]
all_demand_tokens = _whole["demand_tokens"]
all_token_scores = _whole["token_scores"]
all_look_order = _whole["look_order"]
all_look_score = _whole["look_score"]
all_batch_scores = _whole["batch_scores"]
all_batch_order = _whole["batch_order"]
all_batch_score = _whole["batch_score"]
_own_rows_0 = _whole["own_rows_0"]
_own_regs_0 = _whole["own_regs_0"]
_own_reals_0 = _whole["own_reals_0"]
_own_par_0 = _whole["own_par_0"]
_own_capacity_0 = _whole["own_capacity_0"]
_own_rows_1 = _whole["own_rows_1"]
_own_regs_1 = _whole["own_regs_1"]
_own_reals_1 = _whole["own_reals_1"]
_own_par_1 = _whole["own_par_1"]
_own_capacity_1 = _whole["own_capacity_1"]
_own_rows_2 = _whole["own_rows_2"]
_own_regs_2 = _whole["own_regs_2"]
_own_reals_2 = _whole["own_reals_2"]
_own_par_2 = _whole["own_par_2"]
_own_capacity_2 = _whole["own_capacity_2"]
_own_rows_3 = _whole["own_rows_3"]
_own_regs_3 = _whole["own_regs_3"]
_own_reals_3 = _whole["own_reals_3"]
_own_par_3 = _whole["own_par_3"]
_own_capacity_3 = _whole["own_capacity_3"]


@merged
def own_routing(s):
    return Own(_own_rows_0(s), _own_regs_0(s), _own_reals_0(s), _own_par_0(s), _own_capacity_0(s))


@merged
def own_prefetch(s):
    return Own(_own_rows_1(s), _own_regs_1(s), _own_reals_1(s), _own_par_1(s), _own_capacity_1(s))


@merged
def own_eviction(s):
    return Own(_own_rows_2(s), _own_regs_2(s), _own_reals_2(s), _own_par_2(s), _own_capacity_2(s))


@merged
def own_miss(s):
    return Own(_own_rows_3(s), _own_regs_3(s), _own_reals_3(s), _own_par_3(s), _own_capacity_3(s))


@fast
def expert_of(s, y):
    if s["precisions"] == 1:
        return np.int64(y)
    return np.int64(owned(s)[y]["x"])


@fast
def layer_of(s, y):
    return np.int64(owned(s)[y]["layer"])


ONE_POOL, BY_LAYER, BY_LINK = range(3)


@fast
def pool_of(s, y):
    """Return the pool of a copy; reading it from the copy's row would delay every later access to the pool."""
    if s["pooled"] == ONE_POOL:
        return 0
    if s["pooled"] == BY_LAYER:
        return layer_of(s, y)
    return np.int64(copies(s)[y]["pool"])


@fast
def kind_of(s, y):
    """Return layer * P + precision."""
    if s["precisions"] == 1:
        return layer_of(s, y)
    return np.int64(owned(s)[y]["kind"])


@fast
def home_of(s, y):
    """Return the link into the fast tier that carries a copy."""
    if s["n_links"] == 1:
        return 0
    return np.int64(owned(s)[y]["link"])


# rows of a pass


@fast
def row_at(s, t):
    """Return the run-wide number of the t-th row of the current pass."""
    return s["compute"]["start"] + t


@fast
def token_at(s, t):
    """Return the token whose routing the t-th row has, as an index of the token axis."""
    return row_at(s, t) if s["batched"] == 0 else row_reads(s)[row_at(s, t)]


# outcomes of an access

#: REPLACED: by substitutes for every token. HAS_RUN, IN_ROUND: in an earlier round of the step, or the present one.
HIT, DELAYED, FETCH, DROPPED, ON_CPU, REPLACED, HAS_RUN, IN_ROUND = range(8)


@fast
def runs_here(served):
    """Return whether an access runs from the fast tier, at once or after a wait."""
    return served <= FETCH


@fast
def runs(served):
    """Return whether an access runs, from the fast tier or on the CPU."""
    return served <= FETCH or served == ON_CPU


@fast
def waits(served):
    """Return whether compute waits for the access's transfer."""
    return served == DELAYED or served == FETCH


# errors that end a run

NO_ERROR, STUCK, NO_CPU, NO_LOGITS, NO_HOOK = range(5)
BAD_VICTIM, BAD_CHOICE, BAD_NAME, BAD_WANT, BAD_VERDICT, BAD_STAND_IN = range(5, 11)
STOPPED, TOO_LATE = 11, 12


@fast
def fail(s, error, culprit):
    """End the run with an error. `culprit`: the invalid value that a hook returned, or 0."""
    s["errors"]["error"], s["errors"]["culprit"] = error, culprit


# events: the policies that listen are called in the order of `KINDS`

ROUTING, PREFETCH, EVICTION, MISS = (1 << at for at in range(len(KINDS)))


@cache
def notifier(event: str) -> Callable:
    """Return a function of the state, the bound hooks and the event's arguments that calls every listener's hook."""
    listeners, pointers = f"listeners_{event}", list(HOOKS).index(event)

    @called
    def notify(s, hooks, *numbers):
        listening = s[listeners]
        if listening & ROUTING:
            hooks[pointers][0](s, *numbers)
        if listening & PREFETCH:
            hooks[pointers][1](s, *numbers)
        if listening & EVICTION:
            hooks[pointers][2](s, *numbers)
        if listening & MISS:
            hooks[pointers][3](s, *numbers)

    return notify
