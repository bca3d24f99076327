"""What a model answered in a task: measures over all examples, and their values example by example."""

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
    """Of one task under one policy set."""

    measures: list[Measure]
    examples: list[Example]

    def row(self) -> Row:
        """As `results.quality` stores them."""
        return {
            "measures": [each._asdict() for each in self.measures],
            "examples": [each._asdict() for each in self.examples],
        }


def sha256_of(text: str) -> str:
    """Of a prompt, so that results hold none."""
    return hashlib.sha256(text.encode()).hexdigest()
