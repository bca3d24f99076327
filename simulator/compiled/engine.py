"""The compiled engine: results of the reference engine, from kernels of machine code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import RESIDENT
from moereplay.simulator.arrivals import source_of_trace
from moereplay.simulator.compiled import hooks
from moereplay.simulator.compiled.charging import NotedCourse, NotedRun, key_of
from moereplay.simulator.compiled.course import NoHooks, follow
from moereplay.simulator.compiled.fast_path import FastHooks, batch_path, fast_path, priced_path
from moereplay.simulator.compiled.initial import SimulationState, initial_state
from moereplay.simulator.compiled.inputs import Inputs, inputs_from, inputs_of
from moereplay.simulator.compiled.kernel import kernel, priced_kernel, stepped_kernel
from moereplay.simulator.compiled.layout import STATE
from moereplay.simulator.compiled.outcome import check, counters_of, events_of
from moereplay.simulator.compiled.state import READERS
from moereplay.simulator.compiled.variants import ALONE, BATCHED, FOLLOWED, OWN_CLOCK, PLAIN, PRICED, STEPPED, is_priced
from moereplay.simulator.config import KINDS, PolicySet
from moereplay.simulator.interface import EndState, FinishedRun, Oracle, RunSpec, Sharing, oracle_of, oracle_of_trace
from moereplay.simulator.jit import translation
from moereplay.simulator.jit.calls import caller, flat
from moereplay.simulator.jit.machine_code import COMPILING, is_kept, kept
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.source import Source
from moereplay.simulator.threads import run_interruptibly
from moereplay.traces.schema import Trace

#: Room for lines of the event log in a first run; a second run has exactly enough.
LINES = 1 << 16
#: The named tuple of hook pointers that each kernel takes.
POINTERS = {kernel: hooks.BoundHooks, priced_kernel: hooks.BoundHooks, stepped_kernel: hooks.BoundHooks}
POINTERS |= dict.fromkeys((fast_path, batch_path, priced_path), FastHooks)
POINTERS |= {follow: NoHooks}
#: Numbers of the state that are constants in each kernel.
CONSTANTS = {kernel: PLAIN, priced_kernel: OWN_CLOCK, stepped_kernel: STEPPED}
CONSTANTS |= {fast_path: ALONE, batch_path: BATCHED, priced_path: PRICED | {"n_course": 0}, follow: FOLLOWED}
TITLES = {kernel: "general", priced_kernel: "extended general", stepped_kernel: "stepped"}
TITLES |= {fast_path: "fast-path", batch_path: "fast-path batch", priced_path: "extended fast-path", follow: "course"}
LOG = logging.getLogger(__name__)


def run(trace: Trace, spec: RunSpec, sharing: Sharing | None = None) -> FinishedRun:
    """Replay a trace, or charge decisions of `sharing` that hold. Raises TraceError, PolicyError or ConfigError."""
    inputs = prepare_inputs(trace, spec)
    if sharing is None:
        return run_inputs(*inputs, spec).ran
    return run_interruptibly(partial(_shared, *inputs, spec, sharing, (trace.digest, key_of(spec))))


def _shared(inputs: Inputs, oracle: Oracle, spec: RunSpec, sharing: Sharing, key: Hashable) -> FinishedRun:
    known: NotedRun | NotedCourse | None = sharing.run_of(key)
    if isinstance(known, NotedCourse):
        state = initial_state(inputs, oracle, spec, course=known.marks)
        if known.fits(state) and _follows(state, known, spec.chosen):
            sharing.taken += 1
            return _ran(state, spec)
    state = initial_state(inputs, oracle, spec, LINES if spec.log else 0, notes=True)
    if not state["n_noted"] and not state["n_course"]:
        return _run(inputs, oracle, spec, keep=False).ran
    if isinstance(known, NotedRun) and known.charge(state):
        sharing.taken += 1
        return _ran(state, spec)
    _start(state, spec.chosen)
    check(state, spec.chosen)
    noted = NotedCourse(state) if state["n_course"] else NotedRun(state, spec)
    if noted.holds:
        sharing.keep(key, noted)
    return _ran(state, spec)


def _follows(state: SimulationState, known: NotedCourse, chosen: PolicySet) -> bool:
    """Return whether a platform gives a known course, and bring its state to the end if it does."""
    bound(follow, state, chosen)()
    return known.complete(state)


def run_with_state(trace: Trace, spec: RunSpec) -> EndState:
    """Replay a trace and return its counters with the final state."""
    state = run_interruptibly(partial(_finished, *prepare_inputs(trace, spec), spec))
    memories = [[state.arrays[f"own_{of}_{i}"] for of in ("rows", "regs", "reals")] for i in range(len(KINDS))]
    residents = np.flatnonzero(state.arrays["copies"]["state"] == RESIDENT).tolist()
    return EndState(_ran(state, spec), residents, memories)


def prepare_inputs(trace: Trace, spec: RunSpec) -> tuple[Inputs, Oracle]:
    config, chosen = spec.config, spec.chosen
    needs = frozenset().union(*(getattr(chosen, kind).needs for kind in KINDS))
    look = (config.lookahead, config.seed)
    source = partial(source_of_trace, trace, config.schedule, len(spec.arrivals), chosen.prefetch, needs, look)
    inputs = inputs_of(trace, config, needs, chosen.reads, len(spec.arrivals))
    return inputs, oracle_of_trace(trace, source, config, chosen.eviction)


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
    return FinishedRun(counters_of(state, spec), int(state["clock"]["time"]), events_of(state, spec))


def _start(state: SimulationState, chosen: PolicySet) -> None:
    bound(fastest_kernel(state), state, chosen)()


def fastest_kernel(state: SimulationState) -> Callable[..., None]:
    """Return the fastest kernel that can replay a state."""
    if state.is_fast:
        if is_priced(state):
            return priced_path
        return batch_path if state["batched"] else fast_path
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
    shapes = hooks.shapes_of(POINTERS[of]._fields)
    return translation.kernel(of, (STATE, READERS), POINTERS[of], shapes, CONSTANTS[of])
