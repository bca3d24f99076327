"""The compiled engine in steps: it decides, and the caller says what has ended and when.

run(Stepper.of(trace, spec), machine, placement)   # simulator.steps: what the reference engine does there, faster
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from moereplay.simulator.compiled.clock import NEVER_DUE
from moereplay.simulator.compiled.compute import OVER
from moereplay.simulator.compiled.cost_tables import Inputs
from moereplay.simulator.compiled.engine import bound, given
from moereplay.simulator.compiled.initial import initial_state
from moereplay.simulator.compiled.inputs import inputs_from
from moereplay.simulator.compiled.log import IS_DENSE, IS_EXPERT, KINDS
from moereplay.simulator.compiled.outcome import cause_of, check, counters_of, event_of
from moereplay.simulator.compiled.stepped import ABANDONED, BEGUN, CLOSED, COMPUTED, LANDED, RESUMED, stepped_kernel
from moereplay.simulator.interface import ACTED_ON, NO_COPY, Begun, FinishedRun, Oracle, RunSpec, oracle_of
from moereplay.simulator.source import Source
from moereplay.simulator.threads import run_interruptibly
from moereplay.traces.schema import Trace

#: Lines of the log that one step has room for, per copy of a layer's experts.
LINES = 64
#: Words of the log's numbers that somebody must act on.
WORDS = {number: word for number, word in enumerate(KINDS) if word in ACTED_ON}
KIND = 2  #: of a line, its kind


class Stepper:
    """One run, in steps."""

    def __init__(self, inputs: Inputs, oracle: Oracle, spec: RunSpec) -> None:
        """Raises PolicyError for a hook that does not compile. `can_step` says what can be run so."""
        lines = LINES * spec.layout.geometry.experts * spec.layout.precisions
        self._spec, self._chosen = spec, spec.chosen
        self._state = initial_state(inputs, oracle, spec, lines, stepped=True)
        self._take_up = run_interruptibly(partial(bound, stepped_kernel, self._state, spec.chosen))
        self._lines: list[list[int]] = []
        state = self._state  # its records by name, once: a step is a matter of microseconds
        self._clock, self._compute, self._errors = (state[name] for name in ("clock", "compute", "errors"))
        self._ended, self._log, self._room = state["stepped"], state["log"], state.arrays["log"]
        self._accesses = state.arrays["accesses"]
        self._experts, self._precisions = spec.layout.geometry.experts, spec.layout.precisions

    @classmethod
    def of(cls, trace: Trace, spec: RunSpec) -> Stepper:
        """Of a trace."""
        return cls(*given(trace, spec), spec)

    @classmethod
    def of_source(cls, source: Source, spec: RunSpec) -> Stepper:
        """Of a source that does not react to what is made of its gates."""
        return cls(inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction), spec)

    @property
    def is_over(self) -> bool:
        """Whether compute has nothing left to do."""
        return self._compute["program_counter"] == OVER

    @property
    def is_called_up(self) -> bool:
        """Whether compute, which waited, may go on."""
        return self._clock["compute_at"] != NEVER_DUE

    def begin(self, now: int) -> Sequence[Begun]:
        """The run begins."""
        return self._step(BEGUN, now, 0)

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Compute has ended, at `now`, what it was busy with for `elapsed` ns."""
        return self._step(COMPUTED, now, elapsed)

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """The transfer under way, of copy y, is complete; it kept the link for `elapsed` ns."""
        return self._step(LANDED, now, elapsed, y)

    def resumed(self, now: int) -> Sequence[Begun]:
        """Compute goes on."""
        self._clock["compute_at"] = NEVER_DUE
        return self._step(RESUMED, now, 0)

    def abandoned(self, y: int, elapsed: int) -> None:
        """A transfer has ended that a reset or the end of the run has abandoned."""
        self._step(ABANDONED, int(self._clock["time"]), elapsed, y)

    def close(self) -> FinishedRun:
        """What the run has counted, and its event log."""
        end = int(self._clock["time"])
        self._step(CLOSED, end, 0)
        return FinishedRun(counters_of(self._state), end, [event_of(line, self._spec) for line in self._lines])

    def note_end(self, line: int, now: int) -> None:
        """What began in this line of the event log was over at `now`."""
        self._lines[line][1] = now

    def _step(self, ended: int, now: int, elapsed: int, y: int = 0) -> Sequence[Begun]:
        said = self._ended
        said["ended"], said["elapsed"], said["y"] = ended, elapsed, y
        self._clock["time"], self._log["lines"] = now, 0
        self._take_up()
        if self._errors["error"]:
            check(self._state, self._chosen)
        return self._begun(int(self._log["lines"]))

    def _begun(self, count: int) -> list[Begun]:
        if not count:
            return []
        assert count <= len(self._room)  # or LINES is too small
        first, lines = len(self._lines), self._room[:count].tolist()
        self._lines += map(list, lines)
        return [self._one(n, line) for n, line in enumerate(lines, first) if line[KIND] in WORDS]

    def _one(self, n: int, line: Sequence[int]) -> Begun:
        _, _, kind, _, layer, expert, precision, cause = line
        y = (layer * self._experts + expert) * self._precisions + precision if expert >= 0 else NO_COPY
        return Begun(WORDS[kind], layer, y, self._tokens(kind), cause_of(cause, self._spec), n)

    def _tokens(self, kind: int) -> int:
        """Of what compute has begun: it begins one thing at a time."""
        if kind == IS_EXPERT:
            return int(self._accesses[self._compute["running"]]["tokens"])
        return int(self._compute["tokens"]) if kind == IS_DENSE else 0


def can_step(spec: RunSpec) -> bool:
    """Whether a run has what `Stepper` knows: one link, no lower tier, no CPU, no price that changes what is done."""
    times = spec.times
    miss = spec.chosen.miss
    if spec.lower or times.has_pieces or times.waits_for_all or miss.policy.uses_cpu(miss.params):
        return False
    return len(times.depth) == 1
