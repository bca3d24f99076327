"""Tokens of a log that names layers only: rows in the order in which forward passes computed them.

A *run* is what one layer computed in one pass, a row per token. A pass begins where the layer does not ascend. Engines
compute the last layer only for tokens that something is read from, the last ones of the pass. A pass of several tokens
belongs to a prompt, one of a single token is a decode step; after decode steps the next prompt begins a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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


def runs_of(layer: np.ndarray) -> np.ndarray:
    """The run (N,) of each row: rows of one layer that follow each other."""
    return np.concatenate([[0], np.cumsum(np.diff(layer) != 0)])


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
