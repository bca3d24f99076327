"""Return memory to the system that a model on the CPU has freed and the C library keeps.

A key-value cache grows by a copy at every pass. The copies leave holes on the heap, between the data kept of every
gate, that are too small for the next, larger copy: 260 MB for four texts of 100 tokens of the miniature, and with the
square of their length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

PASSES = 32  #: of a model between two calls: one takes milliseconds


def return_freed_memory() -> None:
    """Return freed memory to the system. No effect with C libraries other than glibc."""
    _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # no glibc
        return lambda kept: None
