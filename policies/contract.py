"""The contract between policies and engines: the tables that a policy sees and the hooks that it may define.

A policy is written once and runs in every engine. Its hooks are plain functions of fixed signature over tables:

    now       one record: the execution point (pass, layer, phase, ...), see NOW
    experts   a row per expert x = layer * E + e, see EXPERT_COLUMNS
    copies    a row per copy y = x * P + p at precision p (0 is the most precise), see COPY_COLUMNS
    own       the policy's own memory: own.rows[y], own.regs[pool], own.reals[layer or pool], own.par[slot]
    step      the gate's arrays (hooks that are called at a gate only), see Step

`policies/hooks.py` lists the hooks: what each takes after these tables, what it returns, and when it is called.

Rows are read as `experts[x]["last_use"]`: a dict row in the reference engine, a structured array in the compiled one.
A hook sees no time, link, queue or torch. It writes only `own` and its outputs, and `key` nothing. It uses integers of
64 bits, or + - * / and the square root, which is rounded correctly everywhere, on floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from moereplay.policies.errors import PolicyError as PolicyError  # as policies know it
from moereplay.policies.hooks import EventHooks, EvictionHooks, MissHooks, PrefetchHooks, RoutingHooks
from moereplay.traces.units import DECODE as DECODE  # re-exported: policies import the contract only
from moereplay.traces.units import NEVER as NEVER
from moereplay.traces.units import PREFILL as PREFILL
from moereplay.traces.units import UNIT as UNIT

#: States of a copy.
ABSENT, QUEUED, IN_FLIGHT, RESIDENT = 0, 1, 2, 3
#: Verdicts of a miss policy: a precision index (0, 1, ...) up to the wanted one to fetch at, or one of these.
DROP, CPU, PER_TOKEN = -1, -2, -3
#: What becomes of a miss that is not fetched (`step.unfetched`); 0: a hit, or a miss that is fetched.
ON_CPU, DROPPED, REPLACED = 1, 2, 3
#: Logical timestamps that a queue may be ordered by: none, `experts[x]["last_use"]`, `copies[y]["entered"]`.
QUEUES = ("", "last_use", "entered")
#: When the key of an untouched copy may change, the least often first; Eviction says what each promises.
KEY_SCOPES = ("touch", "layer", "step", "pass")
#: No victim, no substitute.
NONE = -1
#: Which profile a policy is fitted to: none, what --profile gives, or the demand of the trace's first N tokens, 0 all.
NO_PROFILE, GIVEN_PROFILE = -2, -1

#: The execution point: it moves when a step starts, before its dense part.
NOW_COLUMNS = {
    "pass": "number of the pass in the run",
    "layer": "the MoE layer",
    "step": "pass * layers + layer",
    "phase": "PREFILL or DECODE, of the pass's first row",
    "tokens": "rows of the pass",
    "gated": "1 from the gate to the end of the step",
    "request": "number of the first row's request in the trace",
    "absent": "experts of this step that were absent and run all the same; -1 before a look-up",
    "clock": "tokens of the run before this pass",
    "position": "tokens of the first row's request before this pass",
    "layers": "MoE layers of the model",
    "experts": "experts of a layer",
    "k": "experts of a token",
    "precisions": "copies of an expert",
    "seed": "that of the run",
}
NOW = np.dtype([(name, np.int64) for name in NOW_COLUMNS], align=True)

#: One row per expert, written by the engine, kept whether resident or not and cleared by a reset.
EXPERT_COLUMNS = {
    "last_use": "logical timestamp, advanced by every use and by the arrival of a prefetch",
    "last_pass": "pass of that timestamp; -1 without one",
    "uses_ever": "uses: steps that run it, from the fast tier or on the CPU",
    "uses_here": "uses since it last had no copy, the one that fetched it included; a prefetch that finds none arrives "
    "with 1, and its first use leaves it at 1",
    "layer": "its MoE layer",
    "prediction_pass": "pass in which a prefetch policy last predicted it while resident; -1 before",
    "last_prediction": "timestamp of that prediction, from the counter of `last_use`",
    "mass_ever": "sum of the gate weights, in UNITs, of all its assignments, also of those that nothing runs",
    "next_use": "position of its next demand not yet looked up, or NEVER; needs `future`",
    "next_pass": "pass of that demand, or NEVER",
    "profile": "bytes of the experts that the profile ranks before it in its pool; NEVER if it does not list it",
    "needed": "1 from the gate that demands it until it has run from the fast tier, or will not",
}
#: One row per copy, written by the engine.
COPY_COLUMNS = {
    "entered": "order in which it last entered its pool, or a side buffer while it is there",
    "bytes": "what it takes of its pool",
    "pool": "number of its pool",
    "state": "ABSENT, QUEUED, IN_FLIGHT or RESIDENT",
    "protected": "1 while it may not be a victim",
    "prefetched": "1 if its last arrival was a prefetch not yet used",
    "lower": "1 while it is complete in the highest of the platform's lower tiers",
}


def expert_of(now: Any, y: int) -> int:
    """Return the expert x that y is a copy of, without a division if each has one copy: keys call it very often."""
    return y if now["precisions"] == 1 else y // now["precisions"]


class Own(NamedTuple):
    """A policy's own memory, sized by its `Memory`; zero at start and after a reset, except `par` and `capacity`."""

    rows: Annotated[Any, "(copies, Memory.rows) int64"]
    regs: Annotated[Any, "(pools, Memory.regs) int64"]
    reals: Annotated[Any, "(layers, Memory.reals) float64; as many rows as pools if these are more (a pool per link)"]
    par: Annotated[Any, "(PAR_SLOTS,) float64: the parameters in declaration order, to be read"]
    capacity: Annotated[Any, "(pools,) int64: bytes of each pool, to be read"]


class Step(NamedTuple):
    """State of a gate. T tokens, n demanded experts in demand order; absent arrays are empty."""

    ids: Annotated[Any, "(T, k) chosen expert of the layer, -1 none"]
    logits: Annotated[Any, "(T, E) raw router logits"]
    choice: Annotated[Any, "(T, E) choice scores after group masking"]
    gate: Annotated[Any, "(T, E) router probabilities in UNITs"]
    look_order: Annotated[Any, "(D, T, E) experts of layer + 1 + d by descending look-ahead score"]
    look_score: Annotated[Any, "(D, T, E) those scores in UNITs, by expert"]
    expert: Annotated[Any, "(n,) demanded expert x"]
    rank: Annotated[Any, "(n,) its best rank over the tokens"]
    mass: Annotated[Any, "(n,) its largest gate weight over the tokens, in UNITs"]
    tokens: Annotated[Any, "(n,) tokens routed to it"]
    weight: Annotated[Any, "(T, k) gate weight of each of `ids` in UNITs"] = ()
    unfetched: Annotated[
        Any, "(n,) ON_CPU, DROPPED, REPLACED (by substitutes), or 0, as far as misses were looked up"
    ] = ()


#: What costs something to keep current: columns of `experts`, and arrays of `step`. `Policy.reads` may name them.
OPTIONAL_COLUMNS = frozenset({"prediction_pass", "last_prediction", "mass_ever", "needed", "next_pass", "next_use"})
OPTIONAL_ARRAYS = frozenset({"ids", "logits", "choice", "weight", "rank", "mass", "unfetched"})
OPTIONAL = OPTIONAL_COLUMNS | OPTIONAL_ARRAYS


def markdown() -> str:
    """Return the Markdown table of columns and arrays in docs/policies.md; a star marks what `reads` declares."""
    of = {"now": NOW_COLUMNS, "experts[x]": EXPERT_COLUMNS}
    of["copies[y]"] = COPY_COLUMNS
    for table, arrays in (("step", Step), ("own", Own)):
        hints = get_type_hints(arrays, include_extras=True)
        of[table] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    lines = ["| table | column | meaning |", "| --- | --- | --- |"]
    for table, columns in of.items():
        for name, meaning in columns.items():
            lines.append(f"| `{table}` | `{name}`{' *' if name in OPTIONAL else ''} | {meaning} |")
    return "\n".join(lines)


class Costs(NamedTuple):
    """Costs of the mean expert on the platform, most precise copy, in nanoseconds."""

    load: int  #: to bring it over the link, latency included
    compute: int  #: to run one token through it
    cpu: int  #: to run one token through it on the CPU, 1 or more; 0 without one


@dataclass(frozen=True)
class Number:
    """A numeric parameter; `integer` ones refuse fractions. One slot."""

    name: str
    default: float
    low: float
    high: float
    integer: bool = False
    added: bool = False  #: since version 0.1: at its default no text names it, so that what is stored is found again
    width = 1

    @property
    def allowed(self) -> str:
        """The range, for errors and help."""
        return f"{'an integer' if self.integer else 'a number'} from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        """Parse a value. Raises ValueError."""
        value = float(text)
        if not self.low <= value <= self.high or (self.integer and not value.is_integer()):
            raise ValueError(text)
        return int(value) if self.integer else value

    def slots(self, value: float) -> list[float]:
        """Return the value as floats for `own.par`."""
        return [float(value)]


@dataclass(frozen=True)
class HalfLife(Number):
    """A half-life in tokens; the second slot holds the factor of one token."""

    width = 2

    def slots(self, value: float) -> list[float]:
        """Return the value and the factor of one token."""
        return [float(value), 0.5 ** (1.0 / float(value))]


@dataclass(frozen=True)
class Choice:
    """A parameter with named options; its slot holds the option's index."""

    name: str
    default: str
    options: tuple[str, ...]
    added: bool = False  #: as of Number
    width = 1

    @property
    def allowed(self) -> str:
        """The options, for errors and help."""
        return " | ".join(self.options)

    def parse(self, text: str) -> str:
        """Parse an option's name. Raises ValueError."""
        if text not in self.options:
            raise ValueError(text)
        return text

    def slots(self, value: str) -> list[float]:
        """Return the option's index."""
        return [float(self.options.index(value))]


@dataclass(frozen=True)
class Numbers:
    """A list parameter, written 8/4/2; its slots hold the count and up to four values."""

    name: str
    default: tuple[float, ...]
    low: float
    high: float
    width = 5

    @property
    def allowed(self) -> str:
        """The range, for errors and help."""
        return f"one to four numbers from {self.low:g} to {self.high:g}, separated by /"

    def parse(self, text: str) -> tuple[float, ...]:
        """Parse the values. Raises ValueError."""
        values = tuple(float(part) for part in text.split("/"))
        if not 1 <= len(values) <= self.width - 1 or not all(self.low <= value <= self.high for value in values):
            raise ValueError(text)
        return values

    def slots(self, value: Sequence[float]) -> list[float]:
        """Return count, values, and zeros up to the width."""
        return [float(len(value)), *map(float, value), *[0.0] * (self.width - 1 - len(value))]


Parameter = Number | Choice | Numbers
Params = Mapping[str, Any]
PAR_SLOTS = 16


def slot(params: tuple[Parameter, ...], name: str) -> int:
    """Return the first slot of a parameter in `own.par`: declaration order, each as wide as its kind."""
    at = 0
    for param in params:
        if param.name == name:
            return at
        at += param.width
    raise KeyError(name)


@dataclass(frozen=True)
class Memory:
    """Numbers of columns of a policy's own memory."""

    rows: int = 0
    regs: int = 0
    reals: int = 0
    rows_per_expert: int = 0  #: more columns of `rows`, this many for each expert of a layer


def always(*capabilities: str) -> Callable[[Params], frozenset[str]]:
    """Return needs that no parameter changes: any of weights, logits, lookahead, future."""
    needed = frozenset(capabilities)
    return lambda params: needed


IDS_ALONE = always()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Policy(EventHooks):
    """Declarations of every kind. Hooks are called at gates, arrivals and transfer starts only.

    Policies are compared by identity: a class of forty fields whose methods are generated takes 3 ms to import.
    """

    name: str
    summary: str
    source: str
    params: tuple[Parameter, ...] = ()
    memory: Memory = Memory()
    #: capabilities the trace must have under these parameters: weights, logits, lookahead, future
    needs: Callable[[Params], frozenset[str]] = IDS_ALONE
    #: which of OPTIONAL the hooks read; no other one is kept current, or can be read. None: all are, at some cost
    reads: frozenset[str] | None = None
    #: (params, Costs) -> params: fills in the parameters that depend on the platform, before a run; no hook sees times
    priced: Callable[[Params, Costs], Params] = lambda params, costs: params
    profile: Callable[[Params], int] = lambda params: NO_PROFILE  #: what fills `experts[x]["profile"]`
    version: str = ""  #: of a user's own file: the first digits of its sha256, set by `policies/files.py`
    kind: str = field(init=False, default="")

    @property
    def may_read(self) -> frozenset[str]:
        """The declared `reads`, or everything that it could read."""
        return OPTIONAL if self.reads is None else self.reads

    def decides(self, params: Params) -> bool:
        """Return whether it predicts or scores in every step, which takes a real engine time."""
        return False

    @property
    def label(self) -> str:
        """The name, with the version that distinguishes user policies of one name."""
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Routing(RoutingHooks, Policy):
    """May change which experts a token uses; weights always come from the unmodified logits.

    Position j in a token's row is the rank that drop rules and `rank_displacement` use: write choices in the router's
    order.
    """

    drops: bool = False  #: whether it may give a token fewer experts than its router did
    kind: str = field(init=False, default="routing")

    def decides(self, params: Params) -> bool:
        """Return whether it chooses experts."""
        return self.choose is not None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Prefetch(PrefetchHooks, Policy):
    """Suggests copies of later layers of this pass, or of this layer for the next pass, in queue order."""

    depth: Callable[[Params], int] = lambda params: 0  #: how many layers of look-ahead it reads
    reach: Callable[[Params], int] | None = None  #: how many layers ahead it predicts; None: `depth`, at least the next
    own_scores: Callable[[Params], bool] = lambda params: False  #: whether by this layer's own scores
    side_slots: Callable[[Params], int] = lambda params: 0  #: separate buffers that never evict a cached expert
    side_inside: Callable[[Params], bool] = lambda params: False  #: whether their bytes are taken from the capacity
    renews_queue: bool = False  #: its queued prefetches are cancelled when it suggests again
    #: whether it suggests copies of this layer for the next pass, when every miss of the step has been decided on
    next_pass: bool = False
    kind: str = field(init=False, default="prefetch")

    def names_ahead(self, params: Params) -> int:
        """Return how many layers ahead it may predict under these parameters; 0 if it predicts nothing."""
        if self.suggest is None:
            return 0
        return max(1, self.depth(params)) if self.reach is None else self.reach(params)

    def decides(self, params: Params) -> bool:
        """Return whether it predicts."""
        return self.suggest is not None

    def gates_ahead(self, params: Params) -> int:
        """Return how many gates of later layers it evaluates at each gate: none by this layer's own scores."""
        return 0 if self.suggest is None or self.own_scores(params) else self.depth(params)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Miss(MissHooks, Policy):
    """Decides the required precision of each demanded expert, and how each miss is handled."""

    bits: Callable[[Params], tuple[float, ...]] = (
        lambda params: ()
    )  #: precision tiers, most precise first; () = as stored
    #: every verdict is 0, so that engines may skip `resolve`, which must not write either
    fetches_all: bool = False
    changes_output: bool = False
    uses_cpu: Callable[[Params], bool] = lambda params: False  #: refused on a platform without one
    never_fetches: Callable[[Params], bool] = lambda params: False  #: no verdict fetches, so that no room is needed
    kind: str = field(init=False, default="miss")

    def decides(self, params: Params) -> bool:
        """Return whether it rates misses."""
        return not self.fetches_all


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Eviction(EvictionHooks, Policy):
    """Selects victims: by smallest key (ties by least recent timestamp, then lowest id) or by a `victim` hook.

    If one copy needs several victims, `admit` is called with each before any is evicted; one False rejects the
    incoming copy. Until the last call the victims selected so far are `protected`, and `victim` is called for the next;
    then they are evicted in the order of selection, each with its `on_evict`. What `victim` wrote stays written after a
    rejection, and as no eviction follows, it may be called for the same space later. Without `admit`, or if it
    `decides_once`, a victim is evicted before the next is selected.
    """

    #: when an untouched copy's key may change: "touch" (never), "pass", "step" (start, gate), or "layer": as "step",
    #: but within a pass keys of untouched copies of one layer all change by as much, and stay within 2**61; or as
    #: parameters say
    key_scope: str | Callable[[Params], str] = "touch"
    #: which of QUEUES its key is, and nothing else, so that engines may keep a queue and evaluate no key
    queue: Callable[[Params], str] = lambda params: ""
    #: whether `admit` ever rejects under these parameters; if not, engines may skip it, so that it must not write
    declines: Callable[[Params], bool] = lambda params: True
    decides_once: bool = False  #: `admit` is called with the first victim alone, and its answer holds for the others
    kind: str = field(init=False, default="eviction")

    def scope(self, params: Params) -> str:
        """Return when an untouched copy's key may change, under these parameters."""
        return self.key_scope if isinstance(self.key_scope, str) else self.key_scope(params)

    def decides(self, params: Params) -> bool:
        """Return whether it scores copies that were not used: at a gate, or because their keys change."""
        return self.on_gate is not None or self.scope(params) != "touch"
