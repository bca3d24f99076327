"""The compiled engine: results of the reference engine, from kernels of machine code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import RESIDENT, PolicyError
from moereplay.results.counters import BY_LAYER, COUNTERS, PHASES, queued, reported
from moereplay.results.result import Columns, Event, Row
from moereplay.simulator.compiled import hooks
from moereplay.simulator.compiled.clock import NEVER_DUE, OVER
from moereplay.simulator.compiled.counters import (
    BUCKETS,
    BY_RESET,
    CAUSES,
    DECLARED,
    DECODE,
    DECODED,
    END,
    EVENT_KINDS,
    FIRST,
    IS_DENSE,
    IS_EXPERT,
    NO_FIRST,
    PASSES,
    START,
    TOKENS,
    WIDTH,
)
from moereplay.simulator.compiled.fast_path import FastHooks, NoHooks, Noted, fast_path, follow, key_of, priced_path
from moereplay.simulator.compiled.initial import SimulationState, initial_state
from moereplay.simulator.compiled.inputs import Inputs, inputs_from, inputs_of
from moereplay.simulator.compiled.kernel import (
    ABANDONED,
    BEGUN,
    CLOSED,
    COMPUTED,
    LANDED,
    RESUMED,
    kernel,
    priced_kernel,
    stepped_kernel,
)
from moereplay.simulator.compiled.layout import FAST, OWN_CLOCK, PLAIN, PRICED, STATE, STEPPED, is_priced
from moereplay.simulator.compiled.state import (
    BAD_CHOICE,
    BAD_NAME,
    BAD_STAND_IN,
    BAD_VERDICT,
    BAD_VICTIM,
    BAD_WANT,
    NO_CPU,
    NO_ERROR,
    NO_HOOK,
    NO_LOGITS,
    READERS,
    STOPPED,
    STUCK,
    TOO_LATE,
)
from moereplay.simulator.config import KINDS, PolicySet
from moereplay.simulator.errors import ConfigError, too_late
from moereplay.simulator.interface import (
    ACTED_ON,
    NO_COPY,
    Begun,
    EndState,
    FinishedRun,
    Oracle,
    RunSpec,
    Sharing,
    oracle_of,
    oracle_of_trace,
)
from moereplay.simulator.jit.calls import caller, flat
from moereplay.simulator.jit.machine_code import COMPILING, is_kept, kept
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.source import Source
from moereplay.simulator.threads import run_interruptibly
from moereplay.traces.schema import Trace

# The result of a run, from its arrays, in the form that all engines report.


class FinishedCounters:
    """Counters per layer, phase and request."""

    def __init__(
        self, cells: np.ndarray, lifetimes: np.ndarray, requests: list[Row], by_layer: np.ndarray | None
    ) -> None:
        """`cells` (L, 2, counters), `lifetimes` (L, 2, buckets), and `by_layer` (R, L, 2, BY_LAYER) if it was kept."""
        self._cells, self._lifetimes, self._requests, self._by_layer = cells, lifetimes, requests, by_layer

    def totals(self, end: int) -> Row:
        """Return sums over layers and phases."""
        sums = dict(zip(COUNTERS, self._cells.sum((0, 1)).tolist(), strict=True))
        return sums | {"time_ns": end, "lifetime": self._lifetimes.sum((0, 1)).tolist()}

    def per_layer(self) -> list[Row]:
        """Return a row per layer and phase; phases without steps are omitted."""
        layers, phases = (indices.tolist() for indices in np.nonzero(self._cells.any(2)))
        cells, lifetimes = (counts[layers, phases].tolist() for counts in (self._cells, self._lifetimes))
        return [
            {"layer": layer, "phase": PHASES[phase], **reported(counts, "layer"), "lifetime": lifetime}
            for layer, phase, counts, lifetime in zip(layers, phases, cells, lifetimes, strict=True)
        ]

    def per_request(self) -> list[Row]:
        """Return a row per request in run order."""
        return self._requests

    def request_layers(self) -> Columns:
        """Return the columns of a row per request, layer and phase; empty if they were not kept."""
        if self._by_layer is None:
            return {}
        requests, layers, phases = np.nonzero(self._by_layer.any(3))
        counts = self._by_layer[requests, layers, phases].T.tolist()
        numbers, names = [row["request"] for row in self._requests], [PHASES[phase] for phase in phases.tolist()]
        key = {"request": [numbers[at] for at in requests.tolist()], "layer": layers.tolist(), "phase": names}
        return key | dict(zip(BY_LAYER, counts, strict=True))


def counters_of(state: SimulationState, spec: RunSpec) -> FinishedCounters:
    """Return the counters of a finished run."""
    layers = int(state["layers"])
    cells = state.arrays["cells"].reshape(layers, len(PHASES), WIDTH)[..., DECLARED]
    lifetimes = state.arrays["lifetimes"].reshape(layers, len(PHASES), BUCKETS)
    kept = state.arrays["layer_rows"] if spec.by_layer else None
    by_layer = None if kept is None else kept.reshape(-1, layers, len(PHASES), len(BY_LAYER))
    return FinishedCounters(cells, lifetimes, _requests(state, spec), by_layer)


def _requests(state: SimulationState, spec: RunSpec) -> list[Row]:
    arrays = state.arrays
    columns = arrays["requests"].tolist(), arrays["row_times"].tolist(), arrays["rows"][:, DECLARED].tolist()
    return [
        {
            "request": request,
            **_times(times),
            **queued(spec.arrivals, request, times[START]),
            **reported(counts, "request"),
        }
        for request, times, counts in zip(*columns, strict=True)
    ]


def _times(columns: list[int]) -> Row:
    return {
        "start_ns": columns[START],
        "ttft_ns": None if columns[FIRST] == NO_FIRST else columns[FIRST],
        "decode_ns": columns[DECODE],
        "decode_passes": columns[PASSES],
        "decode_tokens": columns[DECODED],
        "end_ns": columns[END],
        "tokens": columns[TOKENS],
    }


def event_of(line: Sequence[int], spec: RunSpec) -> Event:
    """Return a line of numbers, as in `layout.EVENT`, as an event with names."""
    t0, t1, kind, step_pass, layer, expert, precision, cause = line
    return Event(t0, t1, EVENT_KINDS[kind], step_pass, layer, expert, precision, cause_of(cause, spec))


def cause_of(cause: int, spec: RunSpec) -> str:
    """Return the name of a cause."""
    if cause == BY_RESET:
        return spec.config.reset
    return f"for {cause}" if cause >= 0 else CAUSES[-cause]


def check(state: SimulationState, chosen: PolicySet) -> None:
    """Raise the reference engine's error for a run that could not continue, or KeyboardInterrupt if it was stopped."""
    error, eviction, miss = int(state["errors"]["error"]), chosen.eviction.policy.name, chosen.miss.policy.name
    if error == NO_ERROR:
        return
    culprit = int(state["errors"]["culprit"])
    if error == STOPPED:
        raise KeyboardInterrupt
    if error == TOO_LATE:
        raise too_late()
    if error == NO_CPU:
        raise ConfigError("missing [cpu] table in the platform: the miss policy computes on the CPU")
    if error == NO_LOGITS:
        raise PolicyError("a policy that changes the mixture must declare that it needs logits: needs=always('logits')")
    raise AssertionError(
        {
            BAD_VICTIM: f"eviction {eviction}: invalid victim {culprit}: expected an evictable copy of the pool",
            STUCK: "deadlock: a demanded expert finds no space in its pool",
            BAD_CHOICE: f"routing {chosen.routing.policy.name}: invalid expert {culprit}",
            BAD_NAME: f"prefetch {chosen.prefetch.policy.name}: invalid copy {culprit}",
            BAD_WANT: f"miss {miss}: invalid precision {culprit}",
            BAD_VERDICT: f"miss {miss}: invalid verdict {culprit}: expected a verdict or a precision that is wanted",
            BAD_STAND_IN: f"miss {miss}: invalid substitute {culprit}: expected an eligible expert",
            NO_HOOK: f"miss {miss}: PER_TOKEN requires a hook substitute",
        }[error]
    )


#: Room for lines of the event log in a first run; a second run has exactly enough.
LINES = 1 << 16
#: The named tuple of hook pointers that each kernel takes.
POINTERS = {kernel: hooks.BoundHooks, priced_kernel: hooks.BoundHooks, stepped_kernel: hooks.BoundHooks}
POINTERS |= dict.fromkeys((fast_path, priced_path), FastHooks)
POINTERS |= {follow: NoHooks}
#: Numbers of the state that are constants in each kernel.
CONSTANTS = {kernel: PLAIN, priced_kernel: OWN_CLOCK, stepped_kernel: STEPPED}
CONSTANTS |= {fast_path: FAST, priced_path: PRICED | {"n_course": 0}, follow: FAST}
TITLES = {kernel: "general", priced_kernel: "extended general", stepped_kernel: "stepped"}
TITLES |= {fast_path: "fast-path", priced_path: "extended fast-path", follow: "course"}
LOG = logging.getLogger(__name__)


def run(trace: Trace, spec: RunSpec, sharing: Sharing | None = None) -> FinishedRun:
    """Replay a trace, or charge decisions of `sharing` that hold. Raises TraceError, PolicyError or ConfigError."""
    inputs = prepare_inputs(trace, spec)
    if sharing is None:
        return run_inputs(*inputs, spec).ran
    return run_interruptibly(partial(_shared, *inputs, spec, sharing, (trace.digest, key_of(spec))))


def _shared(inputs: Inputs, oracle: Oracle, spec: RunSpec, sharing: Sharing, key: Hashable) -> FinishedRun:
    known: Noted | None = sharing.run_of(key)
    if known is not None:
        state = initial_state(inputs, oracle, spec, known=known.arrays)
        if known.fits(state):
            bound(follow, state, spec.chosen)()
            if known.complete(state):
                sharing.taken += 1
                return _ran(state, spec)
    state = initial_state(inputs, oracle, spec, LINES if spec.log else 0, notes=True)
    if not state["n_noted"] and not state["n_course"]:
        return _run(inputs, oracle, spec, keep=False).ran
    _start(state, spec.chosen)
    check(state, spec.chosen)
    noted = Noted(state)
    if noted.holds:
        sharing.keep(key, noted)
    return _ran(state, spec)


def run_with_state(trace: Trace, spec: RunSpec) -> EndState:
    """Replay a trace and return its counters with the final state."""
    state = run_interruptibly(partial(_finished, *prepare_inputs(trace, spec), spec))
    memories = [[state.arrays[f"own_{of}_{i}"] for of in ("rows", "regs", "reals")] for i in range(len(KINDS))]
    residents = np.flatnonzero(state.arrays["copies"]["state"] == RESIDENT).tolist()
    return EndState(_ran(state, spec), residents, memories)


def prepare_inputs(trace: Trace, spec: RunSpec) -> tuple[Inputs, Oracle]:
    """Return what a replay of a trace reads."""
    inputs = inputs_of(trace, spec.config, spec.chosen.needs, spec.chosen.reads, len(spec.arrivals))
    return inputs, oracle_of_trace(trace, partial(spec.source_of, trace), spec.config, spec.chosen.eviction)


class Run(NamedTuple):
    """A finished run, and the experts that every row ran, (R, L, k), if they were kept."""

    ran: FinishedRun
    kept: np.ndarray
    lengths: list[int]  #: rows of each pass, if requests arrived over time
    tokens: list[int]  #: of all rows: those whose routing they have


def run_source(source: Source, spec: RunSpec, keep: bool = True) -> Run:
    """Replay a source whose gates do not depend on earlier results."""
    oracle = oracle_of(source, spec.config, spec.chosen.eviction)
    return run_inputs(inputs_from(source, bool(spec.arrivals)), oracle, spec, keep)


def run_inputs(inputs: Inputs, oracle: Oracle, spec: RunSpec, keep: bool = False) -> Run:
    """Replay input arrays in a worker thread."""
    return run_interruptibly(partial(_run, inputs, oracle, spec, keep))


def _run(inputs: Inputs, oracle: Oracle, spec: RunSpec, keep: bool) -> Run:
    state = _finished(inputs, oracle, spec, keep)
    lengths, tokens = (state.arrays[name].tolist() if spec.arrivals else [] for name in ("pass_tokens", "row_reads"))
    return Run(_ran(state, spec), state.arrays["kept"], [length for length in lengths if length], tokens)


def _finished(inputs: Inputs, oracle: Oracle, spec: RunSpec, keep: bool = False) -> SimulationState:
    """Run to the end. If the event log did not fit, run again with room for all of it."""
    chosen = spec.chosen
    state = initial_state(inputs, oracle, spec, LINES if spec.log else 0, keep)
    _start(state, chosen)
    if state["log"]["lines"] > state["n_log"]:
        state = initial_state(inputs, oracle, spec, int(state["log"]["lines"]), keep)
        _start(state, chosen)
    check(state, chosen)
    return state


def _ran(state: SimulationState, spec: RunSpec) -> FinishedRun:
    lines = state.arrays["log"][: int(state["log"]["lines"])].tolist()
    return FinishedRun(counters_of(state, spec), int(state["clock"]["time"]), [event_of(line, spec) for line in lines])


def _start(state: SimulationState, chosen: PolicySet) -> None:
    bound(fastest_kernel(state), state, chosen)()


def fastest_kernel(state: SimulationState) -> Callable[..., None]:
    """Return the fastest kernel that can replay a state."""
    if state.is_fast:
        return priced_path if is_priced(state) else fast_path
    return kernel if state.is_plain else priced_kernel


def bound(of: Callable, state: SimulationState, chosen: PolicySet) -> Callable[[], None]:
    """Return a compiled kernel bound to its state and hooks: call it once, or once per step if it is stepped."""
    with COMPILING:  # runs in other threads continue meanwhile
        with compiled_apart(of):  # meanwhile this process compiles hooks
            pointers = POINTERS[of](*hooks.bound(POINTERS[of]._fields, chosen))
        code = machine_code(of)
    if isinstance(code, int):
        return caller(code, list(flat((state.address, pointers))))
    return partial(code, state if IS_PYTHON else state.numbers, pointers)


@contextmanager
def compiled_apart(of: Callable) -> Iterator[None]:
    """Compile a kernel that is not on disk in a process of its own, and wait for it at the end of the context.

    If that process fails, `machine_code` compiles the kernel in this one, or reports why it does not compile.
    """
    if IS_PYTHON or of in _wanted or is_kept(of.__name__):
        yield
        return
    _wanted.add(of)
    LOG.info("compiling the %s kernel (some seconds, first run only)", TITLES[of])
    with started(of.__name__) as child:
        try:
            yield
            child.communicate()
        finally:
            child.kill()  # after an error or an interrupt nobody waits for the kernel


_wanted: set[Callable] = set()  #: kernels that this process has asked another to compile
BUILD = "import sys; from moereplay.simulator.compiled.engine import build; build(sys.argv[1])"


def started(name: str) -> subprocess.Popen[str]:
    """Start another Python process, with this one's packages, that compiles a kernel."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NUMBA_DISABLE_JIT": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", BUILD, name], env=environment, text=True, **pipes)


def build(name: str) -> None:
    """Compile the kernel of this name and keep it on disk: the program of `compiled_apart`."""
    machine_code(next(of for of in POINTERS if of.__name__ == name))


@cache
def machine_code(of: Callable) -> Callable | int:
    """Return a kernel's address, or the function in plain Python."""
    return of if IS_PYTHON else kept(of.__name__, partial(_built, of))


def _built(of: Callable) -> Any:
    from moereplay.simulator.jit import translation  # only a kernel that is not on disk is translated

    shapes = [hooks.shape(name) for name in POINTERS[of]._fields]
    return translation.kernel(of, (STATE, READERS), POINTERS[of], shapes, CONSTANTS[of])


# The compiled engine driven step by step: it makes decisions, and the caller reports when activities end.
#
# run(Stepper.of(trace, spec), machine, placement) # simulator.steps: as with the reference engine, but faster

#: Room in the log for the lines of one step, per copy of a layer's experts.
LINES_PER_COPY = 64
#: Kinds of log lines that the caller must carry out, by number.
WORDS = {number: word for number, word in enumerate(EVENT_KINDS) if word in ACTED_ON}


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
        begun = []
        for n, (_, _, kind, _, layer, expert, precision, cause) in enumerate(lines, first):
            if kind in WORDS:
                y = (layer * self._experts + expert) * self._precisions + precision if expert >= 0 else NO_COPY
                begun.append(Begun(WORDS[kind], layer, y, self._tokens(kind), cause_of(cause, self._spec), n))
        return begun

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
