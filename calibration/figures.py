"""A fitted figure with how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Figure(NamedTuple):
    """A price, and half the range that it has when each run is left out in turn (None with one run); `n` runs."""

    value: float
    spread: float | None
    n: int


def jackknifed(
    items: Sequence[Item], fitted: Callable[[Sequence[Item]], dict[str, float]], n: int | None = None
) -> dict[str, Figure]:
    """The figures of all items, each with its spread."""
    whole = fitted(items)
    without = [fitted([*items[:at], *items[at + 1 :]]) for at in range(len(items))] if len(items) > 1 else []
    return {name: Figure(value, _half_range(name, without), n or len(items)) for name, value in whole.items()}


def _half_range(name: str, fits: Sequence[dict[str, float]]) -> float | None:
    values = [fit[name] for fit in fits if name in fit]
    return (max(values) - min(values)) / 2 if values else None
