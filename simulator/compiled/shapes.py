"""What a kernel knows of a hook that it calls through a pointer."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """What goes in beside the state, and what comes out."""

    numbers: int
    answers: bool  #: with a number
    listeners: int = 0  #: how many pointers there are, for an event
