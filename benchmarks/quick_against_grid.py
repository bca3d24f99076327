"""Compare the quick search of `moereplay recommend TRACE` with a full enumeration of its space, in result and time.

    python benchmarks/quick_against_grid.py a.zarr:phone-ufs4:4GB:1.3GB --passes token

Each case is TRACE:PLATFORM:MEMORY, and the bytes of dense weights where the trace does not say them. Quick searches
run first, twice, because the first one compiles. Then every combination of the axes is replayed on `--accesses`
of the trace's requests (all by default), and so is the set that the quick search found.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.recommend_against_grid import candidates
from moereplay.analysis.tables import console, table
from moereplay.simulator.capacity import CONTEXT, divided
from moereplay.sweeps.recommend.runner import QUICK, Runner, fastest_first
from moereplay.sweeps.recommend.search import Answer, Question, chosen, judged, search
from moereplay.sweeps.recommend.space import filling, started
from moereplay.traces.installation import bundled
from moereplay.traces.selection import shortened
from moereplay.traces.store import open_trace


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--passes", default="token")
    parser.add_argument("--accesses", type=int, default=1 << 62)
    options = parser.parse_args()
    for case in options.cases:
        console().print(table([row(case, options.passes, options.accesses)]))


def row(case: str, passes: str, accesses: int) -> dict[str, object]:
    """Compare the set of the quick search with the best of all sets; seconds are processor time."""
    name, machine, memory, dense = [*case.split(":"), ""][:4]
    trace = open_trace(bundled(Path(name)))
    base = {"platform": machine, "passes": passes, "dense": dense}
    question = Question(trace, divided(trace, memory, CONTEXT, "", dense), base, pace=QUICK)
    search(judged(question))
    began = time.process_time()
    answer = search(judged(question))
    searched = time.process_time()
    most = replace(question, trace=shortened(trace, accesses))
    run = Runner(most.trace)
    every = fastest_first(run.tried(candidates(most, answer)))
    ended = time.process_time()
    return {
        "case": case,
        "found": ", ".join(chosen(answer.best).values()),
        "best": ", ".join(chosen(every[0]).values()),
        "of the best": f"{_again(most, run, answer) / every[0].tokens_per_s:.4f}",
        "tokens": f"{judged(question).trace.tokens:,}; all sets: {most.trace.tokens:,} of {trace.tokens:,}",
        "replays": f"{answer.replayed}; all sets: {len(every)}",
        "processor seconds": f"{searched - began:.1f}; all sets: {ended - searched:.0f}",
    }


def _again(question: Question, run: Runner, answer: Answer) -> float:
    """Return the tokens/s of the set that was found, with its cache filled from the larger part of the trace."""
    plain = answer.best.config.model_copy(update={"warm": (), "profile": ()})
    full = started(question.trace, plain, filling(question.trace, plain.passes))
    return run.tried([full] if full else [answer.best.config])[0].tokens_per_s


if __name__ == "__main__":
    main()
