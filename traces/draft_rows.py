"""Recorded drafts: which tokens went through the model together, and the rows of the drafts that were rejected.

The token array `drafts` (T,) tells the passes: n >= 0 is a token that was known before its pass, in which n drafts were
verified beside it; -1 (RIGHT) is one of these drafts that was accepted. A pass is a known token, the a accepted drafts
that follow it, and n - a rejected ones. Rejected rows are not on the token axis: the arrays `draft/NAME` (D, ...)
have them in the order of passes. Draft j of the pass that begins with token i is computed at token i + j.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.traces.values import TraceError

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
