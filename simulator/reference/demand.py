"""The demand of a step after its gate: which experts run, on how many tokens, and how each is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moereplay.policies.contract import Step
from moereplay.simulator.source import Gate, Pass
from moereplay.traces.demand import Union


class Served(Enum):
    """How an access is served."""

    HIT = 0
    LATE = 1
    FETCH = 2
    DROP = 3
    CPU = 4
    REPLACED = 5  #: by substitutes, for every token

    @property
    def runs_here(self) -> bool:
        """Whether it is computed from the fast tier, perhaps after a transfer."""
        return self in (Served.HIT, Served.LATE, Served.FETCH)

    @property
    def runs(self) -> bool:
        """Whether it is computed at all, on the accelerator or on the CPU."""
        return self.runs_here or self is Served.CPU

    @property
    def waits(self) -> bool:
        """Whether compute waits for a transfer first."""
        return self in (Served.LATE, Served.FETCH)


@dataclass
class Access:
    """One demanded expert of a step, or a substitute, and how it will be served."""

    n: int  #: position in the demand, NONE for a substitute
    x: int
    y: int  #: the copy that serves it
    tokens: int
    served: Served
    substitutes: dict[int, int] = field(default_factory=dict)  #: expert x -> tokens that it takes over


#: Not resident at look-up, and executed.
ABSENT_YET_RUN = (Served.FETCH, Served.CPU)


@dataclass
class Demanded:
    """A step after its gate."""

    step_pass: Pass
    gate: Gate
    union: Union
    step: Step
    ids: list[list[int]]  #: what each token runs: routing's choice, then substitutes and -1 for dropped
    wants: list[int]
    tiers: dict[int, int] = field(default_factory=dict)  #: executed expert of the layer -> precision it runs at
