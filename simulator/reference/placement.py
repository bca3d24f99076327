"""Where copies lie in the fast tier, told to whoever holds the bytes: a real arena of slots, or nobody."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Area(Enum):
    """A part of the fast tier."""

    POOL = 0  #: the cache, within its capacity
    BYPASS = 1  #: the buffer of one expert for a demand whose admission was rejected
    SIDE = 2  #: the buffers of a prefetch policy


class Placement(Protocol):
    """Follows copies y. Space is vacated before what takes it is placed."""

    def warmed(self, y: int) -> None:
        """Copy y lies in the pool from the start; its bytes are to be there when this returns."""
        ...

    def placed(self, y: int, area: Area) -> None:
        """Space for copy y is taken; the transfer that fills it starts next."""
        ...

    def promoted(self, y: int) -> None:
        """Copy y, complete, belongs to the pool from now on and no longer to its side buffer."""
        ...

    def vacated(self, y: int) -> None:
        """The space of copy y is free. After a reset its transfer may still be under way."""
        ...


class Unobserved:
    """Nobody holds the bytes: the simulated machine."""

    def warmed(self, y: int) -> None:
        """Nothing to load."""

    def placed(self, y: int, area: Area) -> None:
        """Nothing to allocate."""

    def promoted(self, y: int) -> None:
        """Nothing to move."""

    def vacated(self, y: int) -> None:
        """Nothing to free."""
