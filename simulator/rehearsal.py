"""A rehearsal: the reference engine runs the start of a replay before machine code runs all of it.

Machine code says neither where a policy went wrong nor that an answer has the wrong type. The reference engine checks
the answers of a policy from a user's own file, and what it raises names a line.
"""

from __future__ import annotations

from contextlib import suppress

from simulator.reference import engine as reference
from simulator.setting import Setting
from simulator.source import Gate, Pass, Source, TraceSource

#: Demanded experts and tokens, summed over gates, after which the next gate is not heard: under a second in Python.
ENOUGH = 4096


class Over(Exception):  # noqa: N818 - nothing is wrong
    """Enough has been heard."""


class Opening(TraceSource):
    """The first gates of a trace, at least one; the one after them raises Over."""

    _left = ENOUGH

    def gate(self, step: Pass, layer: int) -> Gate:
        """The recorded gate. Raises Over."""
        if self._left <= 0:
            raise Over
        gate = super().gate(step, layer)
        self._left -= len(gate.demand.expert) + step.tokens
        return gate


def rehearse(opening: Source, setting: Setting) -> None:
    """Run what there is of it. Raises PolicyError with file and line for a wrong answer, or what a hook raises."""
    with suppress(Over):
        reference.run(opening, setting)
