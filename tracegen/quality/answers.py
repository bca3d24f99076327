"""Answers of a model in a task: measures over all examples, and their values by example."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from moereplay.results.result import Row


class Measure(NamedTuple):
    """A figure of a task."""

    name: str
    value: float
    higher_is_better: bool


class Example(NamedTuple):
    """One measure of one example; equal `example` and `prompt_sha256` of two sets are a pair."""

    example: str
    prompt_sha256: str
    measure: str
    value: float
    weight: float = 1.0  #: in the mean over examples


class Answers(NamedTuple):
    """Answers of one task under one policy set."""

    measures: list[Measure]
    examples: list[Example]

    def row(self) -> Row:
        """Return the answers as `results.quality` stores them."""
        return {
            "measures": [each._asdict() for each in self.measures],
            "examples": [each._asdict() for each in self.examples],
        }


def sha256_of(text: str) -> str:
    """Return the sha256 of a prompt: results store digests, not prompts."""
    return hashlib.sha256(text.encode()).hexdigest()
