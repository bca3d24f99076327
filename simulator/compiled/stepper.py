"""The compiled engine driven step by step: it makes decisions, and the caller reports when activities end.

run(Stepper.of(trace, spec), machine, placement)   # simulator.steps: as with the reference engine, but faster
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from moereplay.simulator.compiled.clock import NEVER_DUE
from moereplay.simulator.compiled.counters import IS_DENSE, IS_EXPERT, EVENT_KINDS
from moereplay.simulator.compiled.engine import bound, prepare_inputs
from moereplay.simulator.compiled.initial import initial_state
from moereplay.simulator.compiled.inputs import Inputs, inputs_from
from moereplay.simulator.compiled.kernel import ABANDONED, BEGUN, CLOSED, COMPUTED, LANDED, RESUMED, stepped_kernel
from moereplay.simulator.compiled.outcome import cause_of, check, counters_of, event_of
from moereplay.simulator.compiled.program import OVER
from moereplay.simulator.interface import ACTED_ON, NO_COPY, Begun, FinishedRun, Oracle, RunSpec, oracle_of
from moereplay.simulator.source import Source
from moereplay.simulator.threads import run_interruptibly
from moereplay.traces.schema import Trace

#: Room in the log for the lines of one step, per copy of a layer's experts.
LINES_PER_COPY = 64
#: Kinds of log lines that the caller must carry out, by number.
WORDS = {number: word for number, word in enumerate(EVENT_KINDS) if word in ACTED_ON}
KIND = 2  #: column of a line


class Stepper:
    """One run, driven step by step; implements `Decisions` of `simulator.interface`."""

    def __init__(self, inputs: Inputs, oracle: Oracle, spec: RunSpec) -> None:
        """Raises PolicyError for a hook that does not compile. `can_step` tells which runs are supported."""
        lines = LINES_PER_COPY * spec.layout.geometry.experts * spec.layout.precisions
        self._spec, self._chosen = spec, spec.chosen
        self._state = initial_state(inputs, oracle, spec, lines, stepped=True)
        self._process_end = run_interruptibly(partial(bound, stepped_kernel, self._state, spec.chosen))
        self._lines: list[list[int]] = []
        state = self._state  # look up records once: a step takes microseconds
        self._clock, self._compute, self._errors = (state[name] for name in ("clock", "compute", "errors"))
        self._report, self._log, self._room = state["stepped"], state["log"], state.arrays["log"]
        self._accesses = state.arrays["accesses"]
        self._experts, self._precisions = spec.layout.geometry.experts, spec.layout.precisions

    @classmethod
    def of(cls, trace: Trace, spec: RunSpec) -> Stepper:
        """Create a stepper for a trace."""
        return cls(*prepare_inputs(trace, spec), spec)

    @classmethod
    def of_source(cls, source: Source, spec: RunSpec) -> Stepper:
        """Create a stepper for a source whose gates do not depend on earlier results."""
        return cls(inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction), spec)

    @property
    def is_over(self) -> bool:
        """True when compute has finished."""
        return self._compute["program_counter"] == OVER

    @property
    def is_called_up(self) -> bool:
        """True if blocked compute can resume."""
        return self._clock["compute_at"] != NEVER_DUE

    def begin(self, now: int) -> Sequence[Begun]:
        """Begin the run at `now`, ns."""
        return self._step(BEGUN, now, 0)

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Report that compute's activity of `elapsed` ns has ended at `now`."""
        return self._step(COMPUTED, now, elapsed)

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """Report that the transfer of copy y is complete; it occupied the link for `elapsed` ns."""
        return self._step(LANDED, now, elapsed, y)

    def resumed(self, now: int) -> Sequence[Begun]:
        """Resume compute."""
        self._clock["compute_at"] = NEVER_DUE
        return self._step(RESUMED, now, 0)

    def abandoned(self, y: int, elapsed: int) -> None:
        """Report the end of a transfer that a reset or the end of the run abandoned."""
        self._step(ABANDONED, int(self._clock["time"]), elapsed, y)

    def close(self) -> FinishedRun:
        """Return the counters and the event log."""
        end = int(self._clock["time"])
        self._step(CLOSED, end, 0)
        events = [event_of(line, self._spec) for line in self._lines]
        return FinishedRun(counters_of(self._state, self._spec), end, events)

    def note_end(self, line: int, now: int) -> None:
        """Set the end of an activity in a line of the event log."""
        self._lines[line][1] = now

    def _step(self, ended: int, now: int, elapsed: int, y: int = 0) -> Sequence[Begun]:
        report = self._report
        report["ended"], report["elapsed"], report["y"] = ended, elapsed, y
        self._clock["time"], self._log["lines"] = now, 0
        self._process_end()
        if self._errors["error"]:
            check(self._state, self._chosen)
        return self._begun(int(self._log["lines"]))

    def _begun(self, count: int) -> list[Begun]:
        if not count:
            return []
        assert count <= len(self._room)  # or LINES_PER_COPY is too small
        first, lines = len(self._lines), self._room[:count].tolist()
        self._lines += map(list, lines)
        return [self._one(n, line) for n, line in enumerate(lines, first) if line[KIND] in WORDS]

    def _one(self, n: int, line: Sequence[int]) -> Begun:
        _, _, kind, _, layer, expert, precision, cause = line
        y = (layer * self._experts + expert) * self._precisions + precision if expert >= 0 else NO_COPY
        return Begun(WORDS[kind], layer, y, self._tokens(kind), cause_of(cause, self._spec), n)

    def _tokens(self, kind: int) -> int:
        """Return the tokens of the activity that compute has just begun."""
        if kind == IS_EXPERT:
            return int(self._accesses[self._compute["running"]]["tokens"])
        return int(self._compute["tokens"]) if kind == IS_DENSE else 0


def can_step(spec: RunSpec) -> bool:
    """Return whether `Stepper` supports a run: all requests there at the start, one link, no lower tier, no CPU,
    and only costs that are tables.
    """
    times = spec.times
    miss = spec.chosen.miss
    if spec.arrivals or spec.resident or spec.chosen.prefetch.policy.next_pass:
        return False
    if spec.lower or times.has_pieces or times.waits_for_all or miss.policy.uses_cpu(miss.params):
        return False
    return len(times.depth) == 1
