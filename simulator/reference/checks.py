"""Checks of user policies at every call: reads, writes, errors, results, and the promises on keys.

Machine code would truncate a float that is written to an array of integers, and read old numbers from unused columns.
So the error is raised here, and names the file and line of the hook. Tests hold the shipped policies to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moereplay.policies.contract import (
    CPU,
    DROP,
    NONE,
    OPTIONAL,
    OPTIONAL_ARRAYS,
    PER_TOKEN,
    Eviction,
    Own,
    Policy,
    PolicyError,
    Step,
)
from moereplay.policies.declaration import BITS, check_result, fits
from moereplay.policies.files import blamed, complaint, complaint_here
from moereplay.policies.grammar import Chosen
from moereplay.policies.hooks import Hook
from moereplay.simulator.reference.state import Tables
from moereplay.traces.texts import hint


class Row:
    """A read-only row of a table."""

    __slots__ = ("_hidden", "_row")

    def __init__(self, row: Mapping[str, int], hidden: frozenset[str]) -> None:
        self._row, self._hidden = row, hidden

    def __getitem__(self, column: str) -> int:
        if column in self._hidden:
            raise undeclared(column)
        try:
            return self._row[column]
        except KeyError:
            known = [name for name in self._row if name not in self._hidden]
            raise complaint_here(f"unknown column {column!r}: {hint(str(column), known, 'the table has')}") from None

    def __setitem__(self, column: str, value: object) -> None:
        raise complaint_here(
            f"cannot write column {column!r} of a table: a hook may write to `own` and to its outputs only"
        )


class Table(list[Row]):
    """Read-only rows of a table. In machine code a negative index counts from the end, which no policy intends."""

    __slots__ = ("_name",)

    def __init__(self, name: str, rows: Sequence[Mapping[str, int]], hidden: frozenset[str]) -> None:
        super().__init__(Row(row, hidden) for row in rows)
        self._name = name

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int) and at < 0:
            raise complaint_here(f"invalid row {at} of {self._name}: rows are numbered from 0")
        return super().__getitem__(at)


class Hidden:
    """Stands for an array of `step` that the policy did not declare."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise undeclared(self._name)

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = _refuse


class Cells(list):
    """Writable numbers of one type, as an array holds them."""

    __slots__ = ("_name", "_owner")

    def __init__(self, name: str, values: Sequence[float], owner: CheckedTables) -> None:
        super().__init__(values)
        self._name, self._owner = name, owner

    def __setitem__(self, at: Any, value: Any) -> None:
        if self._owner.sealed:
            what = "engines call it any number of times; keep counts in other hooks"
            raise complaint_here(f"hook {self._owner.sealed} may not write: {what}")
        super().__setitem__(at, self._kept(value))

    def _kept(self, value: Any) -> float:
        if self._name == "own.reals" and isinstance(value, int | float):
            return float(value)
        if isinstance(value, int) and fits(value):
            return int(value)
        raise complaint_here(f"cannot write {value!r} to {self._name}: expected an integer of {BITS} bits")


class ReadOnly(tuple):
    """Read-only parameters and capacities."""

    __slots__ = ()

    def __setitem__(self, at: Any, value: object) -> None:
        raise complaint_here("own.par and own.capacity are read-only; keep numbers in own.rows, own.regs or own.reals")


class CheckedTables:
    """Tables as one policy sees them, and its memory."""

    def __init__(self, policy: Policy, tables: Tables) -> None:
        hidden = OPTIONAL - policy.may_read
        self.sealed = ""  #: the hook that runs, if it may not write
        self.now = Row(tables.now, frozenset())
        self.experts = Table("experts", tables.experts, hidden)
        self.copies = Table("copies", tables.copies, frozenset())
        self._arrays = {name: Hidden(name) for name in hidden & OPTIONAL_ARRAYS}
        self._gate = self._shown = Step(*[()] * len(Step._fields))

    def step(self, step: Step) -> Step:
        """Return the arrays of a gate as read-only; the engine keeps using the originals."""
        if step is not self._gate:
            self._gate, self._shown = step, Step(*map(_frozen, step))._replace(**self._arrays)
        return self._shown

    def memory(self, name: str, rows: Sequence[Sequence[float]]) -> tuple[Cells, ...]:
        """Return a table of `own` whose writes are checked."""
        return tuple(Cells(f"own.{name}", row, self) for row in rows)

    def output(self, length: int) -> Cells:
        """Return a list for a hook to write to."""
        return Cells("out", [0] * length, self)


def _frozen(rows: Any) -> Any:
    return tuple(map(_frozen, rows)) if isinstance(rows, list | tuple) else rows


def undeclared(name: str) -> PolicyError:
    """Return a PolicyError at the line of a hook that reads an undeclared column or array."""
    return complaint_here(f"undeclared read of {name!r}: add it to `reads`, or omit `reads`")


# calls and their results


class CheckedCalls:
    """Calls hooks of a user policy with checked tables.

    Rejects results of the wrong type, and numbers that are not an expert, copy or precision.
    """

    def __init__(self, policy: Policy, tables: Tables) -> None:
        self._policy, self._now, self._copies = policy, tables.now, tables.copies
        self.tables = CheckedTables(policy, tables)

    def call(self, hook: Hook, function: Callable[..., Any], own: Own, given: tuple[Any, ...]) -> Any:
        """Call the hook. Raises PolicyError with file, line and text for a fault."""
        self.tables.sealed = "" if hook.writes else hook.name
        if hook.at_gate:
            given = (self.tables.step(given[0]), *given[1:])
        arguments = hook.in_order(self.tables, own, given)
        try:
            result = function(*arguments)
        except (PolicyError, KeyboardInterrupt):  # the tables' errors name the line themselves
            raise
        except BaseException as error:  # here, as SimPy raises a copy without the line
            said = f"{type(error).__name__}: {error}"
            raise PolicyError(blamed(error) or str(complaint(function, said))) from error
        self._check(hook, function, result, given[1:] if hook.at_gate else given)
        return result

    def _check(self, hook: Hook, function: Callable[..., Any], result: Any, arguments: Sequence[Any]) -> None:
        """Raises PolicyError for a result of the wrong type or range. `arguments` are the hook's own."""
        check = getattr(self, f"_check_{hook.name}", None)
        try:
            check_result(hook, result)
            if check:
                check(result, *arguments)
        except ValueError as error:
            raise complaint(function, str(error)) from None

    def _check_want(self, precision: int, n: int) -> None:
        self._within("want returned precision", precision, range(self._now["precisions"]))

    def _check_resolve(self, _: None, missing: Sequence[int], free: int, verdict: Sequence[int]) -> None:
        per_token = [PER_TOKEN] if getattr(self._policy, "substitute", None) else []
        allowed = [*range(self._now["precisions"]), DROP, CPU, *per_token]
        if getattr(self._policy, "fetches_all", False) and any(verdict):
            raise ValueError(
                f"hook resolve returned verdict {next(filter(None, verdict))}; fetches_all promises 0 only"
            )
        for each in verdict:
            self._within("resolve returned verdict", each, allowed)

    def _check_substitute(self, expert: int, t: int, j: int, eligible: Sequence[int]) -> None:
        self._within("substitute returned expert", expert, [NONE, *(e for e, yes in enumerate(eligible) if yes)])

    def _check_choose(self, _: None, out: Sequence[Sequence[int]]) -> None:
        experts = range(NONE, self._now["experts"])
        for row in out:
            for each in row:
                self._within("choose returned expert", each, experts)
            named = [each for each in row if each != NONE]
            if len(set(named)) < len(named):
                raise ValueError(f"hook choose returned an expert twice for one token: {row}")

    def _check_suggest(self, count: int, out: Sequence[int]) -> None:
        self._within("suggest returned a count of", count, range(len(out) + 1))
        here = getattr(self._policy, "next_pass", False)
        width, layer = self._now["experts"] * self._now["precisions"], self._now["layer"]
        allowed = range(layer * width, (layer + 1) * width) if here else range((layer + 1) * width, len(self._copies))
        for y in out[:count]:
            self._within(f"suggest returned, for a copy of {'this' if here else 'a later'} layer,", y, allowed)

    def _within(self, what: str, value: int, allowed: Sequence[int]) -> None:
        if type(value) is not int or value not in allowed:
            raise ValueError(f"hook {what} {value!r}: expected {_in_words(allowed)}")


def _in_words(allowed: Sequence[int]) -> str:
    """Return `2, 5, 9`, or `0 to 7` if all between are allowed; `none`."""
    low, high = min(allowed, default=0), max(allowed, default=0)
    if len({*allowed}) > 1 and len({*allowed}) == high - low + 1:
        return f"{low} to {high}"
    return ", ".join(map(str, sorted({*allowed}))) or "none"


# promises on keys

#: Kept keys that are evaluated once more at a choice.
TRIED = 16
#: Keys that move by layer stay below, so that no two of them are farther apart than 64 bits hold.
MOST_BY_LAYER = 1 << 61
Order = tuple[int, int, int]  #: key, timestamp, copy


class KeyChecks:
    """Checks the promises `queue` and `key_scope` of an eviction policy on some copies at every choice."""

    def __init__(self, chosen: Chosen[Eviction], key: Callable[[int], int], tables: Tables) -> None:
        """`key` evaluates the policy's key of a copy."""
        self._policy, self._key, self._tables = chosen.policy, key, tables
        self._queue = chosen.policy.queue(chosen.params)
        self._scope = chosen.policy.scope(chosen.params)
        self._turn = 0
        self._before: dict[int, Order] = {}  # of the scope before this one, what nothing has happened to since

    def check_new(self, y: int, key: int) -> None:
        """Raises PolicyError unless the key is the promised timestamp, and within the range for `layer`."""
        if self._scope == "layer" and abs(key) > MOST_BY_LAYER:
            raise self._broken(f"returned {key} for copy {y}: key_scope='layer' requires keys within 2**61")
        copy, expert = self._tables.copies[y], self._tables.experts[y // self._tables.now["precisions"]]
        promised = {"": key, "last_use": expert["last_use"], "entered": copy["entered"]}[self._queue]
        if key != promised:
            raise self._broken(
                f"returned {key} for copy {y}, whose {self._queue} is {promised}: `queue` promises that they are equal"
            )

    def check_kept(self, kept: Mapping[int, Order], candidates: Sequence[int]) -> None:
        """Raises PolicyError if a key has changed against `key_scope`; candidates take turns."""
        for at in range(self._turn, self._turn + min(TRIED, len(candidates))):
            y = candidates[at % len(candidates)]
            key = self._key(y) if y in kept else None
            if y in kept and key != kept[y][0]:
                what = f"returned {kept[y][0]} and then {key} for copy {y}, which did not change"
                raise self._broken(f"{what}: key_scope={self._scope!r} promises that the key stays the same")
        self._turn += TRIED

    def move_on(self, kept: Mapping[int, Order], same_pass: bool) -> None:
        """Start a new scope; `kept` were valid until now."""
        self._before = dict(kept) if same_pass and self._scope == "layer" else {}

    def forget(self, y: int) -> None:
        """Forget the key of a copy that has changed."""
        self._before.pop(y, None)

    def check_moved(self, kept: Mapping[int, Order]) -> None:
        """Raises PolicyError unless all keys of a layer have moved by the same amount."""
        moved: dict[int, int] = {}
        for y in self._before.keys() & kept.keys():
            layer = self._tables.experts[y // self._tables.now["precisions"]]["layer"]
            by = kept[y][0] - self._before[y][0]
            if moved.setdefault(layer, by) != by:
                what = f"changed by {moved[layer]} and by {by} for two copies of layer {layer}"
                raise self._broken(f"{what}: key_scope='layer' promises the same change")

    def _broken(self, what: str) -> PolicyError:
        hook: Any = self._policy.key
        return complaint(hook, f"hook key {what}")
