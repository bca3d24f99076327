"""The tables as a user's own policy sees them: reading what `reads` leaves out, and writing a table, is an error.

Machine code would cut a float that is written to an array of integers, and find old numbers in columns that nothing
reads. So the error comes here, and names the file and the line of the hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.policies.contract import OPTIONAL, OPTIONAL_ARRAYS, Policy, PolicyError, Step
from moereplay.policies.declaration import BITS, fits
from moereplay.policies.files import complaint_here
from moereplay.simulator.reference.state import Tables


class Row:
    """A row of a table, to be read."""

    __slots__ = ("_hidden", "_row")

    def __init__(self, row: Mapping[str, int], hidden: frozenset[str]) -> None:
        self._row, self._hidden = row, hidden

    def __getitem__(self, column: str) -> int:
        if column in self._hidden:
            raise undeclared(column)
        return self._row[column]

    def __setitem__(self, column: str, value: object) -> None:
        raise complaint_here(f"{column!r} of a table is written; a hook writes only `own` and its outputs")


class Table(list[Row]):
    """The rows of a table. In machine code a number below 0 counts from the end, which no rule means."""

    __slots__ = ("_name",)

    def __init__(self, name: str, rows: Sequence[Mapping[str, int]], hidden: frozenset[str]) -> None:
        super().__init__(Row(row, hidden) for row in rows)
        self._name = name

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int) and at < 0:
            raise complaint_here(f"row {at} of {self._name} is read; rows are numbered from 0")
        return super().__getitem__(at)


class Hidden:
    """In place of an array of `step`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise undeclared(self._name)

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = _refuse


class Cells(list):
    """Numbers of one type, as an array holds them, which are written one by one."""

    __slots__ = ("_name", "_owner")

    def __init__(self, name: str, values: Sequence[float], owner: CheckedTables) -> None:
        super().__init__(values)
        self._name, self._owner = name, owner

    def __setitem__(self, at: Any, value: Any) -> None:
        if self._owner.sealed:
            what = "engines call it as often as they like, so other hooks keep count"
            raise complaint_here(f"hook {self._owner.sealed} writes; {what}")
        super().__setitem__(at, self._kept(value))

    def _kept(self, value: Any) -> float:
        if self._name == "own.reals" and isinstance(value, int | float):
            return float(value)
        if isinstance(value, int) and fits(value):
            return int(value)
        raise complaint_here(f"{value!r} is written to {self._name}, which holds integers of {BITS} bits")


class Given(tuple):
    """Parameters and capacities, to be read."""

    __slots__ = ()

    def __setitem__(self, at: Any, value: object) -> None:
        raise complaint_here("own.par and own.capacity are only read; keep numbers in own.rows, own.regs or own.reals")


class CheckedTables:
    """The tables as one policy sees them, and its memory."""

    def __init__(self, policy: Policy, tables: Tables) -> None:
        hidden = OPTIONAL - policy.may_read
        self.sealed = ""  #: the hook that runs, if it may not write
        self.now = Row(tables.now, frozenset())
        self.experts = Table("experts", tables.experts, hidden)
        self.copies = Table("copies", tables.copies, frozenset())
        self._arrays = {name: Hidden(name) for name in hidden & OPTIONAL_ARRAYS}
        self._gate = self._shown = Step(*[()] * len(Step._fields))

    def step(self, step: Step) -> Step:
        """The arrays of a gate, which are not to be written: the engine goes on with them."""
        if step is not self._gate:
            self._gate, self._shown = step, Step(*map(_frozen, step))._replace(**self._arrays)
        return self._shown

    def memory(self, name: str, rows: Sequence[Sequence[float]]) -> tuple[Cells, ...]:
        """A table of `own`, whose writes are checked."""
        return tuple(Cells(f"own.{name}", row, self) for row in rows)

    def output(self, length: int) -> Cells:
        """A list for a hook to write to."""
        return Cells("out", [0] * length, self)


def _frozen(rows: Any) -> Any:
    return tuple(map(_frozen, rows)) if isinstance(rows, list | tuple) else rows


def undeclared(name: str) -> PolicyError:
    """PolicyError at the line of a hook that reads what it must not."""
    return complaint_here(f"{name!r} is read, which `reads` does not name; add it there, or leave `reads` out")
