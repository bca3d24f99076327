"""Bytes of a KV cache by the length of the context."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field


class Window(NamedTuple):
    """Layers whose attention keeps only the last positions: sliding windows and chunks."""

    positions: Annotated[int, Field(ge=1, le=1 << 40)]
    kv_bytes: Annotated[int, Field(ge=1, le=1 << 60)]  #: per position, all such layers together


class Cached:
    """A model with keys and values: a geometry, or a known model."""

    kv_bytes: int
    kv_windows: tuple[Window, ...]

    def kv_cache(self, context: int) -> int:
        """Return the bytes of a KV cache of `context` positions."""
        beyond = sum(each.kv_bytes * max(0, context - each.positions) for each in self.kv_windows)
        return max(0, self.kv_bytes * context - beyond)
