"""Runs a decision engine step by step on any machine of the reference engine.

The reference engine decides within its machine's events, which is slow in Python. Here the compiled engine decides in
steps (`simulator.compiled.stepper`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from moereplay.simulator.interface import Begun, Decisions, FinishedRun
from moereplay.simulator.reference.machine import Activity, Machine, Span, Wakeup
from moereplay.simulator.reference.state import Area, Placement, Transfer


def run(decisions: Decisions, machine: Machine, placement: Placement, warm: Iterable[int] = ()) -> FinishedRun:
    """Run to the end; copies `warm` are resident from the start. Raises errors of the machine and of policies."""
    for y in warm:
        placement.warmed(y)
    stage = _Stage(decisions, machine, placement, warm)
    stage.act(decisions.begin(int(machine.env.now)))
    while not decisions.is_over or stage.resume_due:
        machine.env.step()
    while stage.under_way:  # its duration is known only at its end
        stage.closed = True
        machine.env.step()
    return decisions.close()


class _Stage:
    """Activities that are running on the machine."""

    def __init__(self, decisions: Decisions, machine: Machine, placement: Placement, warm: Iterable[int]) -> None:
        self._decisions, self._machine, self._placement = decisions, machine, placement
        self._placed = set(warm)
        self._streamed: int | None = None  # the copy in the bypass buffer
        self._epoch = 0
        self.under_way = 0  #: transfers
        self.resume_due = False  #: compute is about to be resumed
        self.closed = False

    def act(self, begun: Sequence[Begun]) -> None:
        """Start these on the machine, in this order."""
        for each in begun:
            getattr(self, f"_{each.kind}")(each)

    def _dense(self, begun: Begun) -> None:
        self._compute(begun, self._machine.accelerator.dense(begun.layer, begun.tokens))

    def _expert(self, begun: Begun) -> None:
        self._compute(begun, self._machine.accelerator.expert(begun.layer, begun.y, begun.tokens))

    def _compute(self, begun: Begun, activity: Activity) -> None:
        activity.measured(partial(self._note_end, begun))
        activity.then(partial(self._computed, activity, begun.y))

    def _transfer(self, begun: Begun) -> None:
        streams = begun.cause == "streamed"
        self._placed.add(begun.y)
        self._placement.placed(begun.y, Area.BYPASS if streams else Area.POOL)
        self._streamed = begun.y if streams else self._streamed
        transfer = Transfer(begun.y, begun.layer, begun.cause == "prefetch", 0, bypasses=streams)
        activity = self._machine.links[0].start(transfer, False)
        self.under_way += 1
        activity.measured(partial(self._note_end, begun))
        activity.then(partial(self._landed, activity, begun.y, self._epoch))

    def _evict(self, begun: Begun) -> None:
        self._vacate(begun.y)

    def _reset(self, begun: Begun) -> None:
        """Evict everything; transfers in flight end without effect."""
        self._epoch += 1
        self._machine.links[0].abandon()
        for y in sorted(self._placed):
            self._vacate(y)

    def _vacate(self, y: int) -> None:
        self._placed.remove(y)
        self._placement.vacated(y)

    # ends

    def _note_end(self, begun: Begun, span: Span) -> None:
        self._decisions.note_end(begun.line, span.ended)

    def _computed(self, activity: Activity, y: int) -> None:
        assert activity.span is not None
        if y == self._streamed:
            self._vacate(y)
            self._streamed = None
        self.act(self._decisions.computed(int(self._machine.env.now), activity.span.spent))

    def _landed(self, activity: Activity, y: int, epoch: int) -> None:
        assert activity.span is not None
        self.under_way -= 1
        if self.closed or epoch != self._epoch:
            self._decisions.abandoned(y, activity.span.spent)
            return
        self.act(self._decisions.landed(y, int(self._machine.env.now), activity.span.spent))
        if self._decisions.is_called_up and not self.resume_due:
            self.resume_due = True  # in an event of this time, after everything that lands now
            wakeup = Wakeup(self._machine.env)
            wakeup.callbacks.append(self._resume)
            wakeup.ring()

    def _resume(self, _: object) -> None:
        self.resume_due = False
        self.act(self._decisions.resumed(int(self._machine.env.now)))
