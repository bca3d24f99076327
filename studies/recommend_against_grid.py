"""Compare `moereplay recommend TRACE` with an exhaustive search of its space, in result and time.

Last changed in commit b579ad71. Does `recommend` find the best set of a full grid?
Answer: docs/recommend.md.

    python -m studies.recommend_against_grid a.zarr:phone-ufs4:4GB b.zarr:rtx4090-pcie4:24GB:1.3GB --passes token

Each case is TRACE:PLATFORM:MEMORY, and the bytes of dense weights where the trace does not say them. The thorough
search runs first, as the command does; then every combination of its axes is replayed on the whole trace, as far as the
memory can hold it. With --quick it is the quick search, in one process and twice, because the first one compiles; then
every combination is replayed on `--accesses` of the requests (all by default), and so is the set that was found.
`make study-recommend` and `make study-quick` run it on the miniature's recording. Seconds depend on the machine and its
load; shares do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moereplay.analysis.tables import console, table
from moereplay.simulator.capacity import CONTEXT, divided, size_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.sweeps.recommend.runner import QUICK, THOROUGH, Pace, Runner, fastest_first
from moereplay.sweeps.recommend.search import Answer, Question, judged, search
from moereplay.sweeps.recommend.space import can_replay, filling, started
from moereplay.traces.files import bundled
from moereplay.traces.selection import shortened
from moereplay.traces.store import open_trace


class Case(NamedTuple):
    """One question."""

    trace: str
    machine: str
    memory: str
    dense: str = ""

    def question(self, passes: str, pace: Pace) -> Question:
        """Return the question, with default settings and a searched scope."""
        trace = open_trace(bundled(Path(self.trace)))
        memory = divided(trace, size_of(self.memory, "memory"), CONTEXT, "", self.dense)
        return Question(trace, memory, {"platform": self.machine, "passes": passes, "dense": self.dense}, pace=pace)


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=lambda text: Case(*text.split(":")))
    parser.add_argument("--passes", default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="the quick search, whose seconds are processor time")
    parser.add_argument("--accesses", type=int, default=1 << 62)
    options = parser.parse_args()
    for case in options.cases:
        if options.quick:
            row = quick(case, options.passes or "token", options.accesses)
        else:
            row = thorough(case, options.passes or "recorded", options.workers)
        console().print(table([row]))


def thorough(case: Case, passes: str, workers: int) -> dict[str, object]:
    """Compare the thorough search's result with the best of all sets."""
    question = case.question(passes, THOROUGH)
    began = time.perf_counter()
    answer = search(question, workers)
    searched = time.perf_counter()
    every = fastest_first(Runner(question.trace, workers).tried(candidates(question, answer)))
    ended = time.perf_counter()
    return {
        "case": " ".join(filter(None, case)),
        "found": ", ".join(answer.best.policies.values()),
        "tok/s": answer.best.tokens_per_s,
        "of the best": f"{answer.best.tokens_per_s / every[0].tokens_per_s:.4f}",
        "best": ", ".join(every[0].policies.values()),
        "replays": f"{answer.replayed} of {len(every)}",
        "seconds": f"{searched - began:.0f} of {ended - searched:.0f}",
    }


def quick(case: Case, passes: str, accesses: int) -> dict[str, object]:
    """Compare the set of the quick search with the best of all sets; seconds are processor time."""
    question = case.question(passes, QUICK)
    trace = question.trace
    search(judged(question))
    began = time.process_time()
    answer = search(judged(question))
    searched = time.process_time()
    most = replace(question, trace=shortened(trace, accesses))
    run = Runner(most.trace)
    every = fastest_first(run.tried(candidates(most, answer)))
    ended = time.process_time()
    return {
        "case": ":".join(filter(None, case)),
        "found": ", ".join(answer.best.policies.values()),
        "best": ", ".join(every[0].policies.values()),
        "of the best": f"{_again(most, run, answer) / every[0].tokens_per_s:.4f}",
        "tokens": f"{judged(question).trace.tokens:,}; all sets: {most.trace.tokens:,} of {trace.tokens:,}",
        "replays": f"{answer.replayed}; all sets: {len(every)}",
        "processor seconds": f"{searched - began:.1f}; all sets: {ended - searched:.0f}",
    }


def candidates(question: Question, answer: Answer) -> list[ReplayConfig]:
    """Return every combination of the axes that trace, machine and memory allow."""
    base, axes = question.at(question.memory.cache_bytes), answer.space.axes()
    every = (configure(**base, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    full = (started(question.trace, config, filling(question.trace, config.schedule)) for config in every)
    return [config for config in full if config is not None and can_replay(question.trace, config)]


def _again(question: Question, run: Runner, answer: Answer) -> float:
    """Return the tokens/s of the set that was found, with its cache filled from the larger part of the trace."""
    plain = answer.best.config.model_copy(update={"warm": (), "profile": ()})
    full = started(question.trace, plain, filling(question.trace, plain.passes))
    return run.tried([full] if full else [answer.best.config])[0].tokens_per_s


if __name__ == "__main__":
    main()
