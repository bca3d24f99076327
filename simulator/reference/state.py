"""The tables of the policy contract, as rows of dicts: every policy sees them, the engine alone writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from moereplay.policies.contract import ABSENT, COPY, EXPERT, NEVER, NOW
from moereplay.simulator.interface import CopyLayout, Oracle


class Tables:
    """`now`, and a row per expert and per copy, by the columns of the contract."""

    def __init__(self, layout: CopyLayout, pools: Sequence[int], oracle: Oracle, seed: int) -> None:
        geometry = layout.geometry
        self.now = dict.fromkeys(NOW.names or (), 0) | {
            "layers": geometry.layers,
            "experts": geometry.experts,
            "k": geometry.k,
            "precisions": layout.precisions,
            "seed": seed,
        }
        self.experts = [dict.fromkeys(EXPERT.names or (), 0) for _ in range(layout.experts)]
        self.copies = [dict.fromkeys(COPY.names or (), 0) for _ in range(layout.experts * layout.precisions)]
        self._describe(layout, len(pools))
        for x, position in enumerate(oracle.first_uses):
            self.experts[x]["next_use"] = position
        for x, first_pass in enumerate(oracle.first_passes):
            self.experts[x]["next_pass"] = first_pass
        self._rank(oracle.ranking, len(pools))
        self.clear()

    def _describe(self, layout: CopyLayout, pools: int) -> None:
        for x, row in enumerate(self.experts):
            row["layer"] = x // layout.geometry.experts
            row["next_use"] = row["next_pass"] = row["profile"] = NEVER
        for y, row in enumerate(self.copies):
            layer = self.experts[y // layout.precisions]["layer"]
            row["bytes"] = layout.tiers[y % layout.precisions][layer]
            row["pool"] = layer if pools > 1 else 0

    def _rank(self, ranking: Sequence[int], pools: int) -> None:
        """How many bytes of its pool a profile gives away before it comes to each expert."""
        taken = [0] * pools
        for x in ranking:
            copy = self.copies[x * self.now["precisions"]]
            self.experts[x]["profile"] = taken[copy["pool"]]
            taken[copy["pool"]] += copy["bytes"]

    def clear(self) -> None:
        """As at the start, but for the future and the profile."""
        for row in self.experts:
            row.update(last_use=0, last_pass=-1, prediction_pass=-1, last_prediction=0, uses_ever=0, uses_here=0)
            row.update(mass_ever=0, needed=0)
        for row in self.copies:
            row.update(state=ABSENT, protected=0, entered=0, prefetched=0)


# -- A transfer, and the cache's answer to its claim of bytes.


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


# -- Where copies lie in the fast tier, told to whoever holds the bytes: a real arena of slots, or nobody.


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
