"""Arrays of a trace: their names, dtypes, shapes and values, and the checks of rows.

Shapes use T tokens, L MoE layers, E experts, k active, D rows of rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

MOST_EXPERTS = 32_767  #: per layer: ids are int16, -1 is "not routed"
MOST_WEIGHT = 65_536  #: gate weight: sums over a pass are int64 in UNITs
LARGEST = float(np.finfo(np.float32).max)

#: Arrays along the token axis: name -> (dtype, axes after the token axis). `lookahead/d` follows `logits`.
TOKEN_ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chosen": ("<i2", ("layers", "k")),
    "weights": ("<f4", ("layers", "k")),
    "logits": ("<f4", ("layers", "experts")),
    "token_ids": ("<i4", ()),
    "nll": ("<f4", ()),
    "residency": ("i1", ("layers", "k")),
    "drafts": ("<i2", ()),
}
LOOKAHEAD, LOOKAHEAD_AXES = "lookahead/", ("<f4", ("layers", "experts"))
#: Arrays of rejected drafts, (D, ...): `draft/NAME` is like the token array NAME (below).
DRAFT = "draft/"
ROUTED = ("chosen", "weights", "logits", "token_ids")  #: and look-ahead: what a rejected draft has
MOST_DRAFTS = 255  #: that a pass verifies


class Values(NamedTuple):
    """Range of an array's values as passed, before conversion to the stored dtype."""

    kinds: str  #: numpy's kinds of allowed dtypes
    least: float
    most: float

    @property
    def expected(self) -> str:
        """Range in words."""
        if "f" not in self.kinds:
            return f"a whole number from {self.least} to {self.most}"
        return "a finite number" if self.most == LARGEST else f"a number from {self.least} to {self.most}"


VALUES: dict[str, Values] = {
    "chosen": Values("iu", -1, MOST_EXPERTS - 1),
    "weights": Values("iuf", 0, MOST_WEIGHT),
    "logits": Values("iuf", -LARGEST, LARGEST),
    "token_ids": Values("iu", 0, 2**31 - 1),
    "nll": Values("iuf", -LARGEST, LARGEST),
    "residency": Values("iu", -1, 2),
    "drafts": Values("iu", -1, MOST_DRAFTS),
}


class TraceError(Exception):
    """A trace, or a file to import, cannot be used; the message names the problem and what to do."""


class RowError(TraceError):
    """Invalid rows of a request; the message names the request but not the file that it came from."""


class Shape(Protocol):
    """Sizes of a model's MoE part, as of `Geometry`."""

    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def experts(self) -> int: ...  # noqa: D102
    @property
    def k(self) -> int: ...  # noqa: D102


def of_rejected(names: Iterable[str]) -> list[str]:
    """Return the token arrays of a trace, given by name, that rejected drafts have too; none without drafts."""
    found = set(names)
    alike = [name for name in sorted(found) if name in ROUTED or name.startswith(LOOKAHEAD)]
    return alike if "drafts" in found else []


def dtype_of(name: str) -> str:
    """Return the stored dtype of a token array."""
    name = name.removeprefix(DRAFT)
    return LOOKAHEAD_AXES[0] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][0]


def row_shape(name: str, geometry: Shape) -> tuple[int, ...]:
    """Return the shape of one token's row of an array."""
    name = name.removeprefix(DRAFT)
    axes = LOOKAHEAD_AXES[1] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][1]
    return tuple(getattr(geometry, axis) for axis in axes)


def values_of(name: str) -> Values:
    """Return the range of a token array's values."""
    name = name.removeprefix(DRAFT)
    return VALUES["logits" if name.startswith(LOOKAHEAD) else name]


def first_refused(values: np.ndarray, allowed: Values) -> tuple[int, ...] | None:
    """Return the index of the first number outside the range, or NaN; None if there is none."""
    if not values.size or (allowed.least <= values.min().item() and values.max().item() <= allowed.most):
        return None
    wide = values.astype(np.float64) if values.dtype.kind == "f" else values
    bad = np.argwhere(~((wide >= allowed.least) & (wide <= allowed.most)))
    return tuple(bad[0].tolist())


def check_values(values: np.ndarray, name: str, place: str) -> None:
    """Check values for the array `name` before conversion to its dtype. Raises TraceError naming `place` and index."""
    allowed = values_of(name)
    if values.dtype.kind not in allowed.kinds:
        wanted = "numbers" if "f" in allowed.kinds else "whole numbers"
        raise TraceError(f"{place} is an array of {values.dtype}: expected {wanted}")
    at = first_refused(values, allowed)
    if at is not None:
        raise TraceError(f"{place}{list(at)} is {values[at]}: expected {allowed.expected}")


def check_rows(name: str, rows: np.ndarray, geometry: Shape, where: str = "", first: int = 0) -> None:
    """Check rows of a token array (T, ...) as stored: values in range, ids below E and distinct within a layer.

    `first` is the token of the first row, and `where` begins the message. Raises TraceError naming token and layer.
    """
    allowed, expected = values_of(name), f"expected {values_of(name).expected}"
    is_choice = name.removeprefix(DRAFT) == "chosen"
    if is_choice:
        allowed = allowed._replace(most=geometry.experts - 1)
        expected = f"ids are 0 to {geometry.experts - 1}, or -1 for not routed"
    at = first_refused(rows, allowed)
    if at is not None:
        raise TraceError(f"{where}{_element(name, first, at)} is {rows[at]}{_place(name, first, at)}: {expected}")
    if is_choice:
        _check_distinct(name, rows, where, first)


def _check_distinct(name: str, ids: np.ndarray, where: str, first: int) -> None:
    ordered = np.sort(ids, axis=-1)
    bad = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bad.any():
        at = tuple(np.argwhere(bad)[0, :2].tolist())
        row = ids[at].tolist()
        raise TraceError(f"{where}{_element(name, first, at)} repeats an expert: {row}{_place(name, first, at)}")


def _element(name: str, first: int, at: tuple[int, ...]) -> str:
    return f"{name}{[first + at[0], *at[1:]]}"


def _place(name: str, first: int, at: tuple[int, ...]) -> str:
    what, row = "rejected draft" if name.startswith(DRAFT) else "token", first + at[0]
    return f" ({what} {row}, layer {at[1]})" if len(at) > 1 else f" ({what} {row})"


# -- Recorded drafts: which tokens went through the model together, and the rows of the drafts that were rejected. The
# -- token array `drafts` (T,) tells the passes: n >= 0 is a token that was known before its pass, in which n drafts
# -- were verified beside it; -1 (RIGHT) is one of these drafts that was accepted. A pass is a known token, the a
# -- accepted drafts that follow it, and n - a rejected ones. Rejected rows are not on the token axis: the arrays
# -- `draft/NAME` (D, ...) have them in the order of passes. Draft j of the pass that begins with token i is computed at
# -- token i + j.

RIGHT = -1


class Verified(NamedTuple):
    """The recorded passes, by the token that each begins with; (T,) int64 each."""

    many: np.ndarray  #: drafts of the pass; 0 at accepted drafts
    right: np.ndarray  #: of these, the accepted ones; 0 at accepted drafts
    first: np.ndarray  #: the first of its rejected rows, or the next one if it has none; -1 at accepted drafts

    def span(self, start: int, stop: int) -> tuple[np.ndarray, slice]:
        """Return `drafts` of tokens [start, stop), which begin with a known token, and the rejected rows among them.

        A pass that goes on after `stop` is cut: it keeps its accepted drafts before `stop`, and no rejected one.
        """
        at = np.arange(start, stop)
        known = at[self._begins[start:stop]]
        drafts = np.where(self._begins[start:stop], self.many[start:stop], RIGHT).astype(np.int16)
        last = int(known[-1])
        end = int(self.first[last] + self.many[last] - self.right[last])
        if last + int(self.right[last]) >= stop:
            drafts[last - start], end = stop - 1 - last, int(self.first[last])
        return drafts, slice(int(self.first[start]), end)

    @property
    def _begins(self) -> np.ndarray:
        return self.first >= 0


def verified(drafts: np.ndarray, offsets: np.ndarray, prompts: np.ndarray, rejected: int, where: str = "") -> Verified:
    """Return the passes of requests at `offsets` (R + 1,) with these prompts (R,) and `rejected` rows.

    Raises TraceError, beginning with `where` and naming the token, if they contradict each other.
    """
    many = drafts.astype(np.int64)
    known = np.flatnonzero(many >= 0)
    at = np.arange(len(many)) - np.repeat(offsets[:-1], np.diff(offsets))
    prompt = np.repeat(prompts, np.diff(offsets))
    _refuse((at < prompt) & (many != 0), many, where, "0 in a prompt, which verifies no drafts")
    _refuse((at <= prompt) & (many < 0), many, where, "0 or more where a prompt or a request ends")
    right, first = np.zeros(len(many), np.int64), np.full(len(many), -1, np.int64)
    right[known] = np.diff(np.append(known, len(many))) - 1
    wrong = many - right
    _refuse((many >= 0) & (wrong < 0), many, where, "as many drafts as the accepted ones that follow, or more")
    ends = np.cumsum(wrong[known])
    first[known] = ends - wrong[known]
    if (total := int(ends[-1])) != rejected:
        raise TraceError(f"{where}drafts tell of {total} rejected rows: expected {rejected}, the rows of draft/chosen")
    many[many < 0] = 0
    return Verified(many, right, first)


def _refuse(wrong: np.ndarray, drafts: np.ndarray, where: str, expected: str) -> None:
    if wrong.any():
        token = int(np.argmax(wrong))
        raise TraceError(f"{where}drafts[{token}] is {drafts[token]} (token {token}): expected {expected}")
