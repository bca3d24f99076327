"""A strategy of random policy files, which are replayed by both engines.

Every case is a few files of users' own, of every kind, and some small replays under them. The engines must agree on
every counter, row, time, line of the event log and executed expert, on who is resident at the end and on the policies'
memories.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.simulator import dry_run
from moereplay.simulator.config import KINDS, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import EndState
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.replay import Plan, plan, replay
from moereplay.simulator.source import Mixture, Pass, TraceSource
from moereplay.traces.schema import Trace
from tests.kit.strange_files import File, Sort
from tests.kit.strange_kinds import policy_file
from tests.kit.strange_scenarios import drawn_config, drawn_trace, platform_file

#: Shares of cases of which promises may be broken, of which integers may leave 64 bits, and of which no hook listens.
DISHONEST, WILD, SILENT = 0.1, 0.15, 0.35
SCENARIOS = 6 if not IS_PYTHON else 3  #: replays of a case, with the compiler and without


class Case(NamedTuple):
    """A case of the search."""

    sort: Sort
    given: list[File]
    dice: Random


class Recording(TraceSource):
    """A trace that remembers what each token ran."""

    ran: list[Any]

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        """Steps -> tokens -> ids."""
        self.ran.append([list(row) for row in mixture.run])


class Finished(NamedTuple):
    """Everything that a replay returns."""

    state: EndState
    ran: list[Any]


class Found(NamedTuple):
    """The end of one replay: `equal`, `refused ...`, `different` or `unnoticed`, with a description."""

    ending: str
    what: str = ""


def policy_files(short: bool = False) -> st.SearchStrategy[Case]:
    """Draw a few files and the dice for their scenarios; short files are compiled sooner."""
    return st.randoms(use_true_random=True).map(lambda dice: _drawn_case(dice, short))


def _drawn_case(dice: Random, short: bool) -> Case:
    sort = Sort(dice.random() >= DISHONEST, dice.random() < WILD, dice.random() < SILENT, short)
    shares = dict.fromkeys(KINDS, 0.35) | {"eviction": 0.8} | ({"miss": 0} if sort.silent else {})
    kinds = [kind for kind in KINDS if dice.random() < shares[kind]] or ["eviction"]
    given = [policy_file(dice, kind, f"strange_{kind}", sort) for kind in kinds]
    return Case(sort, given, dice)


def run_case(case: Case, folder: Path) -> list[Found]:
    """Replay it in some scenarios."""
    for file in case.given:
        path = folder / f"{file.name}.py"
        path.write_text(file.text)
        files.register(path)
    try:
        with warnings.catch_warnings():  # numpy's, of integers that overflow where nothing is compiled
            warnings.simplefilter("ignore" if case.sort.wild else "error", RuntimeWarning)
            return [_one_scenario(case, folder) for _ in range(SCENARIOS)]
    finally:
        for given in policies.REGISTERED.values():
            given.clear()


def _one_scenario(case: Case, folder: Path) -> Found:
    trace = drawn_trace(case.dice)
    machine = platform_file(case.dice, folder / "machine.toml")
    try:
        config = drawn_config(case.dice, trace, machine, case.given, case.sort.silent)
        ready = plan(trace, config)
    except (PolicyError, ConfigError) as error:
        return Found("refused before", str(error))
    try:
        expected = _by_reference(trace, ready)
    except PolicyError as error:
        return _refused_too(trace, config, str(error))
    try:
        what = _differs(trace, ready, expected)
    except PolicyError as error:
        return Found("refused compiled", str(error))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    if what and (case.sort.wild or not case.sort.honest):
        return _noticed(trace, config, what)
    return Found("different", what) if what else Found("equal")


# both engines


def _by_reference(trace: Trace, ready: Plan) -> Finished:
    config = ready.config
    source = Recording(
        trace, config.schedule, ready.chosen.prefetch, ready.chosen.needs, (config.lookahead, config.seed)
    )
    source.ran = []
    return Finished(reference.run_with_state(source, ready.spec(log=True)), source.ran)


def _differs(trace: Trace, ready: Plan, expected: Finished) -> str:
    """The first difference of the compiled engine, with the log and without, which may take the fast path."""
    from moereplay.simulator.compiled import engine as compiled

    with dry_run.named_by_machine_code(ready.chosen):
        logged = compiled.run_with_state(trace, ready.spec(log=True))
        short = compiled.run_with_state(trace, ready.spec(log=False))
        ran = _executed(trace, ready)
    what = _difference(expected.state, logged) or _in_log(expected.state, logged)
    if not what and ran != expected.ran:
        what = "other experts executed"
    return what or _difference(expected.state, short, "without the log: ")


def _difference(expected: EndState, found: EndState, way: str = "") -> str:
    what = dry_run.difference(expected, found)
    if not what and expected.ran.counters.per_request() != found.ran.counters.per_request():
        what = "other counts or times of single requests"
    return what and way + what


def _in_log(expected: EndState, found: EndState) -> str:
    lines, others = list(expected.ran.events), list(found.ran.events)
    if lines == others:
        return ""
    at = next((at for at, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]), -1)
    return f"line {at} of the log: {lines[at]} by the reference and {others[at]} compiled"


def _executed(trace: Trace, ready: Plan) -> list[Any]:
    from moereplay.simulator.compiled.engine import run_inputs
    from moereplay.simulator.compiled.inputs import inputs_of
    from moereplay.simulator.interface import oracle_of

    config, chosen = ready.config, ready.chosen
    source = TraceSource(trace, config.schedule, chosen.prefetch, ready.chosen.needs, (config.lookahead, config.seed))
    inputs = inputs_of(trace, config, ready.chosen.needs, chosen.reads)
    kept = run_inputs(inputs, oracle_of(source, config, chosen.eviction), ready.spec(log=True), keep=True).kept
    steps = [(step, layer) for step in source.passes() for layer in range(trace.geometry.layers)]
    return [kept[step.start : step.start + step.tokens, layer].tolist() for step, layer in steps]


# refusals


def _refused_too(trace: Trace, config: ReplayConfig, said: str) -> Found:
    """Return True if the compiled engine refuses it too; its dry run has a smaller cache and may fail elsewhere."""
    try:
        replay(trace, config, engine="compiled")
    except PolicyError as error:
        return Found("refused alike" if str(error) == said else "refused otherwise", f"{said} | {error}")
    except Exception as error:
        return Found("different", f"{said} | {type(error).__name__}: {error}")
    return Found("refused by the reference alone", said)


def _noticed(trace: Trace, config: ReplayConfig, what: str) -> Found:
    """Return True if the user gets an error for a change by a broken promise or an integer beyond 64 bits."""
    try:
        replay(trace, config, engine="compiled")
    except PolicyError as error:
        return Found("refused by the dry run", str(error))
    except Exception as error:
        return Found("different", f"{what} | {type(error).__name__}: {error}")
    return Found("unnoticed", what)
