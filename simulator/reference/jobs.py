"""A transfer, and what became of its wish for room."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Claim(Enum):
    """The tier's answer to a transfer that is about to start."""

    GRANTED = 0
    STREAMED = 1  #: a declined demand, on its way to the staging buffer
    REFUSED = 2  #: no room, or a declined prefetch


@dataclass
class Job:
    """A transfer that is queued or under way."""

    y: int
    layer: int
    prefetch: bool
    target_step: int
    awaited: bool = False  #: a demand has met this prefetch in flight
    streamed: bool = False

    @property
    def unused(self) -> bool:
        """Whether it arrives without anybody waiting for it."""
        return self.prefetch and not self.awaited

    @property
    def cause(self) -> str:
        """For the event log."""
        return "prefetch" if self.prefetch else "streamed" if self.streamed else "demand"
