"""Logs that name layers only: requests and tokens follow from the order in which passes compute the layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moereplay.traces.importers.by_request import REQUEST, Columns, joined
from moereplay.traces.importers.contract import WARNED
from moereplay.traces.texts import counted


def in_groups(pieces: Iterable[Columns], k: int) -> Iterator[Columns]:
    """Yield the rows in whole groups of k that follow each other; the last piece may end inside a group."""
    left: list[Columns] = []
    for columns in pieces:
        together = joined([*left, columns])
        rows = len(next(iter(together.values())))
        whole = rows - rows % k
        left = [{name: values[whole:] for name, values in together.items()}]
        if whole:
            yield {name: values[:whole] for name, values in together.items()}
    if left and len(next(iter(left[0].values()))):
        yield left[0]


@dataclass
class Joined:
    """Counts passes of several tokens that follow each other: they are taken for one prompt."""

    passes: int = 0  #: that were joined to the one before

    def begun(self, requests: int, several: str = "passes of several tokens") -> str:
        """Describe how requests were recognised."""
        return f"{counted(requests, 'request')}, each a prompt ({several}) and its decode steps"

    def warnings(self) -> list[str]:
        """Return a warning if passes were joined."""
        text = (
            f"{WARNED}a pass of several tokens directly follows another {counted(self.passes, 'time')}: joined into "
            "one prompt, which a replay computes in one pass. If they are pieces of it, replay with --passes chunk:N; "
            "if they verify drafts or compute a prompt again, demand and times are too low: record without these"
        )
        return [text] if self.passes else []


@dataclass(frozen=True)
class Tokens:
    """Request and token of each of N rows; `phase` 0 is the prompt's."""

    request: np.ndarray
    token: np.ndarray
    phase: np.ndarray
    follows: np.ndarray  #: passes of several tokens, True if one follows another in its request


def tokens_of(layer: np.ndarray, run: np.ndarray, alone: bool = False) -> Tokens:
    """Return the tokens of rows (N,) of known layers and runs; `alone`: each pass of several tokens is a request."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(run) != 0]))
    rows = np.diff(np.append(starts, len(run)))
    passes = np.cumsum(np.concatenate([[0], np.diff(layer[starts]) <= 0]))
    lengths = np.zeros(passes[-1] + 1, np.int64)
    np.maximum.at(lengths, passes, rows)
    prompt = lengths > 1
    begins = prompt & (alone | np.concatenate([[True], ~prompt[:-1]]))
    begins[0] = True
    first = np.cumsum(lengths) - lengths
    skipped = lengths[passes] - rows
    within = np.arange(len(run)) - np.repeat(starts, rows)
    of_row = np.repeat(passes, rows)
    token = first[of_row] + np.repeat(skipped, rows) + within
    request, phase = np.cumsum(begins) - 1, (~prompt).astype(np.int64)
    return Tokens(request[of_row], token, phase[of_row], (prompt & ~begins)[prompt])


def by_pass(pieces: Iterable[Columns], alone: bool = False, found: Joined | None = None) -> Iterator[Columns]:
    """Yield rows with their `layer` and `run`, some at a time, as whole passes with `request`, `token` and `phase`.

    `run` differs where one run follows another; it is left out. The rows of a pass are held until the next one begins.
    `alone` is that of `tokens_of`; `found` counts the passes that are joined.
    """
    waiting: list[Columns] = []
    last = np.zeros((2, 0), np.int64)
    place = _Place(alone, found or Joined())
    for columns in pieces:
        layer, run = np.concatenate([last, [columns["layer"], columns["run"]]], axis=1)
        last = np.array([layer[-1:], run[-1:]])
        begins = np.flatnonzero((np.diff(run) != 0) & (np.diff(layer) <= 0)) + 1 - (len(layer) - len(columns["layer"]))
        cut = int(begins[-1]) if len(begins) else 0
        waiting.append({name: values[:cut] for name, values in columns.items()} if len(begins) else columns)
        if len(begins):
            yield place.of(joined(waiting))
            waiting = [{name: values[cut:] for name, values in columns.items()}]
    yield place.of(joined(waiting))


class _Place:
    """Requests and tokens before the next pass, and whether the last pass was a prompt's."""

    def __init__(self, alone: bool, found: Joined) -> None:
        self._found = found
        self._requests = self._tokens = 0
        self._prompt, self._alone = False, alone

    def of(self, columns: Columns) -> Columns:
        """Return whole passes with their requests, tokens and phases."""
        tokens = tokens_of(columns["layer"], columns["run"], self._alone)
        again = self._prompt and not self._alone and tokens.phase[0] == 0
        goes_on = self._requests > 0 and (tokens.phase[0] == 1 or again)
        self._found.passes += int(tokens.follows.sum()) + int(again)
        request, token = tokens.request + self._requests - goes_on, tokens.token + self._tokens
        self._requests, self._tokens = int(request[-1]) + 1, int(token.max()) + 1
        self._prompt = tokens.phase[-1] == 0
        kept = {name: values for name, values in columns.items() if name != "run"}
        return kept | {REQUEST: request, "token": token, "phase": tokens.phase}
