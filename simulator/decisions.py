"""Who decides, apart from what takes time: it learns what has ended, and says what begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moereplay.simulator.interface import FinishedRun

NO_COPY = -1
#: What is begun, in the words of the event log.
ACTED_ON = ("dense", "expert", "transfer", "evict", "reset")


class Begun(NamedTuple):
    """Something that begins."""

    kind: str  #: one of ACTED_ON
    layer: int
    y: int  #: copy, NO_COPY of a dense part or a reset
    tokens: int  #: of a dense part or an expert
    cause: str  #: as in the event log
    line: int  #: of the event log


class Decisions(Protocol):
    """Who decides in a run. Times are integer nanoseconds of the machine's clock."""

    @property
    def is_over(self) -> bool:
        """Whether compute has nothing left to do."""
        ...

    @property
    def is_called_up(self) -> bool:
        """Whether compute, which waited, may go on: `resumed` is due when nothing else lands now."""
        ...

    def begin(self, now: int) -> Sequence[Begun]:
        """The run begins."""
        ...

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Compute has ended, at `now`, what it was busy with for `elapsed` ns."""
        ...

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """The oldest transfer under way, of copy y, is complete; it kept the link for `elapsed` ns."""
        ...

    def resumed(self, now: int) -> Sequence[Begun]:
        """Compute goes on."""
        ...

    def abandoned(self, y: int, elapsed: int) -> None:
        """A transfer has ended that a reset, or the end of the run, has abandoned."""
        ...

    def note_end(self, line: int, now: int) -> None:
        """What began in this line of the event log was over at `now`."""
        ...

    def close(self) -> FinishedRun:
        """The counters and the event log; the run ended with its last step."""
        ...
