"""What runs batches: processes here, a Ray cluster, or anything with these five members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moereplay.sweeps.batches import Batch, Headline
from moereplay.sweeps.jobs import Job


@dataclass(frozen=True)
class Stored:
    """A batch whose part is stored."""

    batch: Batch
    headlines: Sequence[Headline]


@dataclass(frozen=True)
class Lost:
    """A batch whose worker died: nothing of it is stored."""

    batch: Batch
    suspects: tuple[Job, ...]  #: what may have killed it: the job in progress, or all if that is not known
    reason: str


@dataclass(frozen=True)
class Unwritable:
    """A batch that was replayed and could not be stored: the disk is full, or the bucket out of reach."""

    batch: Batch
    reason: str


Event = Stored | Lost | Unwritable


class Executor(Protocol):
    """Runs batches. Order, retries and progress are the dispatcher's."""

    slots: int  #: batches that run at once

    @property
    def room(self) -> int:
        """Batches that would start now."""
        ...

    def submit(self, batch: Batch, alone: bool = False) -> None:
        """Run a batch; `alone` in a process that has nothing else to lose."""
        ...

    def collect(self, seconds: float) -> Sequence[Event]:
        """What has happened, waiting at most so long for something to."""
        ...

    def close(self) -> None:
        """Give everything back, running or not."""
        ...
