"""`python -m tests.kit.strange_policies --seconds N --seed S [--jit]`: random policy files, replayed by both engines.

Every case is a few files of users' own, of every kind, and some small replays under them. The engines must agree on
every counter, row, time, line of the event log and executed expert, on who is resident at the end and on the policies'
memories. The last line is a JSON object; `--only N --show` repeats case N of a seed and prints its files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from moereplay import policies
from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.simulator import dry_run
from moereplay.simulator.config import KINDS, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import EndState
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.replay import Plan, plan, replay
from moereplay.simulator.source import Mixture, Pass, TraceSource
from moereplay.traces.schema import Trace
from tests.kit.strange_files import File, Sort
from tests.kit.strange_kinds import policy_file
from tests.kit.strange_scenarios import drawn_config, drawn_trace, platform_file

#: Shares of cases of which promises may be broken, of which integers may leave 64 bits, and of which no hook listens.
DISHONEST, WILD, SILENT = 0.1, 0.15, 0.35
SCENARIOS = {True: 6, False: 3}  #: replays of a case, with the compiler and without


class Case(NamedTuple):
    """A case of the search."""

    number: int
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


def drawn_case(seed: int, number: int, short: bool = False) -> Case:
    """Case `number` of a seed; short files are compiled sooner."""
    dice = Random(f"{seed}-{number}")
    sort = Sort(dice.random() >= DISHONEST, dice.random() < WILD, dice.random() < SILENT, short)
    shares = dict.fromkeys(KINDS, 0.35) | {"eviction": 0.8} | ({"miss": 0} if sort.silent else {})
    kinds = [kind for kind in KINDS if dice.random() < shares[kind]] or ["eviction"]
    given = [policy_file(dice, kind, f"strange_{kind}", sort) for kind in kinds]
    return Case(number, sort, given, dice)


def run_case(case: Case, folder: Path, scenarios: int) -> list[Found]:
    """Replay it in so many scenarios."""
    for file in case.given:
        path = folder / f"{file.name}_{case.number}.py"
        path.write_text(file.text)
        files.register(path)
    try:
        with warnings.catch_warnings():  # numpy's, of integers that overflow where nothing is compiled
            warnings.simplefilter("ignore" if case.sort.wild else "error", RuntimeWarning)
            return [_one_scenario(case, folder) for _ in range(scenarios)]
    finally:
        for given in policies.REGISTERED.values():
            given.clear()


def _one_scenario(case: Case, folder: Path) -> Found:
    trace = drawn_trace(case.dice)
    machine = platform_file(case.dice, folder / f"machine_{case.number}.toml")
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


# the command


def hunt(seed: int, seconds: float, cases: int, jit: bool, only: int | None = None, show: bool = False) -> dict:
    """Run cases until the time or their number is up; what was found, ready for JSON."""
    began, endings, found = time.monotonic(), Counter(), {"different": [], "unnoticed": [], "refused": {}}
    numbers = count() if only is None else [only]
    done = 0
    with TemporaryDirectory() as folder:
        for number in numbers:
            if done >= cases or time.monotonic() - began > seconds:
                break
            case = drawn_case(seed, number, short=jit)
            if show:
                print("\n".join(file.text for file in case.given), flush=True)
            for ending, what in run_case(case, Path(folder), SCENARIOS[jit]):
                endings[ending] += 1
                _note(found, ending, f"--seed {seed} --only {number}", what)
            done += 1
    return _report(done, time.monotonic() - began, endings, found)


def _note(found: dict[str, Any], ending: str, where: str, what: str) -> None:
    if ending in ("different", "unnoticed"):
        found[ending].append(f"{where}: {what}")
        print(f"{ending} {where}: {what}", file=sys.stderr, flush=True)
    elif ending != "equal":
        found["refused"].setdefault(ending, []).append(f"{where}: {what}")


def _report(done: int, seconds: float, endings: Counter, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "cases": done,
        "replays": sum(endings.values()),
        "seconds": round(seconds, 1),
        "endings": dict(sorted(endings.items())),
        "refused": sum(number for ending, number in endings.items() if ending.startswith("refused")),
        "differences": found["different"],
        "unnoticed": found["unnoticed"],
        "examples": {ending: each[:3] for ending, each in found["refused"].items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Without `--jit` it starts itself anew where nothing is compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=1 << 40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case of the seed")
    parser.add_argument("--show", action="store_true", help="print the files")
    parser.add_argument("--jit", action="store_true", help="hooks and engine in machine code")
    asked = parser.parse_args(arguments)
    if not asked.jit and os.environ.get("NUMBA_DISABLE_JIT") != "1":
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tests.kit.strange_policies", *sys.argv[1:]])
    found = hunt(asked.seed, asked.seconds, asked.cases, asked.jit, asked.only, asked.show)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
