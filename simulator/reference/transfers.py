"""A transfer, and the cache's answer to its claim of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Claim(Enum):
    """The cache's answer to a transfer that is about to start."""

    GRANTED = 0
    BYPASSED = 1  #: a demand whose admission was rejected: it goes to the bypass buffer
    REFUSED = 2  #: no space, or a prefetch whose admission was rejected


@dataclass
class Transfer:
    """A transfer that is queued or under way."""

    y: int
    layer: int
    prefetch: bool
    target_step: int
    awaited: bool = False  #: a demand has met this prefetch in flight
    bypasses: bool = False  #: to the bypass buffer, not into the cache
    lands: int = 0  #: when it will be complete, if compute may begin before
    piece_here: bool = False  #: its first piece has arrived
    arrival_known: bool = False  #: compute knows that it may begin

    @property
    def unused(self) -> bool:
        """Whether nobody waits for it: a prefetch that no demand has met in flight."""
        return self.prefetch and not self.awaited

    @property
    def cause(self) -> str:
        """As the event log spells it: demand, prefetch or streamed."""
        return "prefetch" if self.prefetch else "streamed" if self.bypasses else "demand"
