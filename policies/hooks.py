"""Every hook of the policy contract, declared once: its kind of policy, arguments, result, and when it is called.

A hook is a field of one of the classes below, from which `policies/contract.py` makes the kinds of policy; `HOOKS` is
the table of these fields. The checks of policy files, the bound hooks of both engines, the compiled adapters and the
table in docs/policies.md are made from it. So a new hook is a row here and a call in each engine.
"""
# ruff: noqa: RUF009 - `row` makes a field

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, NamedTuple, Protocol

KINDS = ("routing", "prefetch", "eviction", "miss")
#: The tables that every hook takes first, in this order; hooks at a gate take `step` after `now`.
TABLES = ("now", "experts", "copies", "own")
AT_GATE = ("now", "step", "experts", "copies", "own")


class Argument(NamedTuple):
    """An argument of a hook, besides the tables."""

    name: str
    meaning: str
    axes: int = 0  #: 0 an integer, 1 a list of integers, 2 a list of lists
    written: bool = False  #: whether it is an output


class Tables(Protocol):
    """The tables that every hook reads."""

    now: Any
    experts: Any
    copies: Any


class Hook(NamedTuple):
    """One row of the table of hooks."""

    name: str
    kinds: tuple[str, ...]  #: of policies that may give it
    own_arguments: tuple[Argument, ...]
    result: type
    meaning: str  #: of the result
    when: str
    at_gate: bool  #: whether it is called at a gate and sees `step`
    writes: bool  #: whether it may write `own` and its outputs

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments, in order."""
        return (AT_GATE if self.at_gate else TABLES) + tuple(argument.name for argument in self.own_arguments)

    def in_order(self, tables: Tables, own: Any, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arguments in order; `given` are the step, for a hook at a gate, and its own arguments."""
        if self.at_gate:
            return (tables.now, given[0], tables.experts, tables.copies, own, *given[1:])
        return (tables.now, tables.experts, tables.copies, own, *given)

    @property
    def is_event(self) -> bool:
        """True if it only reports an event: any policy may define it, and it returns nothing."""
        return self.kinds == KINDS


def row(
    when: str,
    *own_arguments: Argument,
    result: type = NoneType,
    meaning: str = "",
    at_gate: bool = False,
    writes: bool = True,
    required: bool = False,
) -> Any:
    """Return a field that holds a hook, without a default if every policy of the kind must define it."""
    facts = {"when": when, "own_arguments": own_arguments, "result": result, "meaning": meaning}
    facts |= {"at_gate": at_gate, "writes": writes}
    return field(metadata=facts) if required else field(default=None, metadata=facts)


COPY = Argument("y", "a copy")
NEW = Argument("prefetched", "1 if a prefetch brought it and nothing has used it yet, else 0")
PREFETCHED = Argument("prefetched", "1 if a prefetch would bring it, else 0")
POOL = Argument("pool", "the pool that needs space")
COMES_IN = Argument("y_in", "the copy that space is needed for")
GOES_OUT = Argument("y_out", "the copy that would be evicted for it")
POSITION = Argument("n", "a position in the demand")
MISSING = Argument("missing", "positions in the demand of the experts that are absent", axes=1)
FREE = Argument("free", "free bytes of the first one's pool")
VERDICT = Argument("verdict", "of each of `missing`: a precision to fetch at, DROP, CPU or PER_TOKEN", 1, written=True)
TOKEN = Argument("t", "a token of the pass")
PLACE = Argument("j", "the place among its experts of the one that is absent")
ELIGIBLE = Argument("eligible", "for each expert of the layer: 1 if it may substitute, else 0", axes=1)
IDS = Argument("out", "`out[t][j]` takes the j-th expert of token t, by its number in the layer", 2, written=True)
NAMES = Argument("out", "takes copies of later layers of this pass, first fetched first", 1, written=True)


Event = Callable[..., None] | None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class EventHooks:
    """Event hooks, which a policy of any kind may define, to keep count in `own`."""

    on_gate: Event = row(
        "once per step, when its demand is known and nothing is looked up yet; keys of this layer's copies may change",
        at_gate=True,
    )
    on_use: Event = row(
        "an expert is used: the step runs it, from the fast tier (where it is or will be) or on the CPU; one that is "
        "dropped or replaced is not used, its substitute is",
        COPY,
    )
    on_insert: Event = row(
        "a copy has entered its pool, from the link or a side buffer, or is there at the start", COPY, NEW
    )
    on_evict: Event = row("a copy has left its pool", COPY)
    on_predict: Event = row("a prefetch policy has suggested a copy that is resident", COPY)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RoutingHooks:
    """The hooks of routing policies."""

    choose: Callable[..., None] | None = row(
        "once per step, first of all at its gate; the arrays of its demand are empty", IDS, at_gate=True
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PrefetchHooks:
    """The hooks of prefetch policies."""

    suggest: Callable[..., int] | None = row(
        "once per step, at its gate or, under `--prefetch-at after_demand`, at its end",
        NAMES,
        result=int,
        meaning="how many copies it suggested",
        at_gate=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MissHooks:
    """The hooks of miss policies."""

    want: Callable[..., int] | None = row(
        "for every demanded expert, before it is looked up",
        POSITION,
        result=int,
        meaning="the lowest sufficient precision; 0 if there is no such hook",
        at_gate=True,
    )
    resolve: Callable[..., None] = row(
        "when demanded experts are absent: for all of a step, or under contract `sequential` for one after the other",
        MISSING,
        FREE,
        VERDICT,
        at_gate=True,
        required=True,
    )
    substitute: Callable[..., int] | None = row(
        "for every token of an expert whose verdict is PER_TOKEN",
        TOKEN,
        PLACE,
        ELIGIBLE,
        result=int,
        meaning="the substitute, or NONE",
        at_gate=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class EvictionHooks:
    """The hooks of eviction policies, each of which defines either `key` or `victim`."""

    key: Callable[..., int] | None = row(
        "when space is needed, for any copy and any number of times",
        COPY,
        result=int,
        meaning="the copy's key; the smallest is evicted",
        writes=False,
    )
    victim: Callable[..., int] | None = row(
        "when space is needed", POOL, COMES_IN, result=int, meaning="the copy to evict, or NONE"
    )
    admit: Callable[..., bool] | None = row(
        "when a copy would have to be evicted for another",
        COMES_IN,
        PREFETCHED,
        GOES_OUT,
        result=bool,
        meaning="False rejects the incoming copy",
    )


def _rows() -> Iterator[Hook]:
    owners = {EventHooks: KINDS, RoutingHooks: ("routing",), PrefetchHooks: ("prefetch",)}
    for owner, kinds in (owners | {MissHooks: ("miss",), EvictionHooks: ("eviction",)}).items():
        for each in fields(owner):
            yield Hook(each.name, kinds, **each.metadata)


#: Every hook by name, events first.
HOOKS = {hook.name: hook for hook in _rows()}
#: The names of events.
EVENTS = tuple(name for name, hook in HOOKS.items() if hook.is_event)


def given_by(policy: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the hooks that a policy defines, by name."""
    for name in HOOKS:
        hook = getattr(policy, name, None)
        if hook is not None:
            yield name, hook


def markdown() -> str:
    """Return the Markdown table of hooks in docs/policies.md."""
    head = ["hook", "given by", "takes, after the tables", "returns", "called"]
    body = [[f"`{hook.name}`", _givers(hook), _taken(hook), _returned(hook), hook.when] for hook in HOOKS.values()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _givers(hook: Hook) -> str:
    return "any" if hook.is_event else ", ".join(hook.kinds)


def _taken(hook: Hook) -> str:
    return "; ".join(f"`{each.name}`: {each.meaning}" for each in hook.own_arguments) or "nothing"


def _returned(hook: Hook) -> str:
    return f"`{hook.result.__name__}`: {hook.meaning}" if hook.meaning else "nothing"
