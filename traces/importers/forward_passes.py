"""Tokens of a log that names layers only: rows in the order in which forward passes computed them.

A *run* is what one layer computed in one pass, a row per token. A pass begins where the layer does not ascend. Engines
compute the last layer only for tokens that something is read from, the last ones of the pass. A pass of several tokens
belongs to a prompt, one of a single token is a decode step; after decode steps the next prompt begins a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moereplay.traces.importers.by_request import REQUEST, Columns, joined


@dataclass(frozen=True)
class Tokens:
    """Where each of N rows belongs; `phase` 0 is the prompt's."""

    request: np.ndarray
    token: np.ndarray
    phase: np.ndarray

    @property
    def requests(self) -> int:
        """How many there are."""
        return int(self.request.max()) + 1


def tokens_of(layer: np.ndarray, run: np.ndarray, alone: bool = False) -> Tokens:
    """Tokens of rows (N,) of known layers and runs; `alone`: each pass of several tokens is a request of its own."""
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
    return Tokens((np.cumsum(begins) - 1)[of_row], token, (~prompt).astype(np.int64)[of_row])


def by_pass(pieces: Iterable[Columns]) -> Iterator[Columns]:
    """Rows with their `layer` and `run`, some at a time, as whole passes with `request`, `token` and `phase`.

    `run` differs where one run follows another. The rows of a pass are held until the next one begins.
    """
    waiting: list[Columns] = []
    last = np.zeros((2, 0), np.int64)
    place = _Place()
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
    """How many requests and tokens there were before the passes that come next, and whether the last was a prompt's."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0
        self._prompt = False

    def of(self, columns: Columns) -> Columns:
        """Whole passes with their requests, tokens and phases."""
        tokens = tokens_of(columns["layer"], columns["run"])
        goes_on = self._requests > 0 and (self._prompt or tokens.phase[0] == 1)
        request, token = tokens.request + self._requests - goes_on, tokens.token + self._tokens
        self._requests, self._tokens = int(request[-1]) + 1, int(token.max()) + 1
        self._prompt = tokens.phase[-1] == 0
        return {**columns, REQUEST: request, "token": token, "phase": tokens.phase}
