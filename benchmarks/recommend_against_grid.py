"""Compare `moereplay recommend` with an exhaustive search of its space, in result and time.

    python benchmarks/recommend_against_grid.py a.zarr:phone-ufs4:4GB b.zarr:rtx4090-pcie4:24GB --passes token

Each case is TRACE:PLATFORM:MEMORY. The search runs first, as the command does; then every combination of its axes
is replayed on the whole trace, as far as the memory can hold it. `make study-recommend` runs it on the
miniature's recording. Seconds depend on the machine and its load; shares do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

from moereplay.analysis.tables import console, table
from moereplay.simulator.capacity import CONTEXT, divided
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.sweeps.recommend.runner import Runner, fastest_first
from moereplay.sweeps.recommend.search import Answer, Question, chosen, search
from moereplay.sweeps.recommend.space import can_replay, filling, started
from moereplay.traces.installation import bundled
from moereplay.traces.store import open_trace


class Case(NamedTuple):
    """One question."""

    trace: str
    machine: str
    memory: str

    def question(self, passes: str) -> Question:
        """Return the question, with default settings and a searched scope."""
        trace = open_trace(bundled(Path(self.trace)))
        memory = divided(trace, self.memory, CONTEXT)
        return Question(trace, memory, {"platform": self.machine, "passes": passes})


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=lambda text: Case(*text.split(":")))
    parser.add_argument("--passes", default="recorded")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    for case in options.cases:
        console().print(table([row(case, options.passes, options.workers)]))


def row(case: Case, passes: str, workers: int) -> dict[str, object]:
    """Compare the search's result with the best of all sets."""
    question = case.question(passes)
    began = time.perf_counter()
    answer = search(question, workers)
    searched = time.perf_counter()
    every = fastest_first(Runner(question.trace, workers).tried(candidates(question, answer)))
    ended = time.perf_counter()
    return {
        "case": " ".join(case),
        "found": ", ".join(chosen(answer.best).values()),
        "tok/s": answer.best.tokens_per_s,
        "of the best": f"{answer.best.tokens_per_s / every[0].tokens_per_s:.4f}",
        "best": ", ".join(chosen(every[0]).values()),
        "replays": f"{answer.replayed} of {len(every)}",
        "seconds": f"{searched - began:.0f} of {ended - searched:.0f}",
    }


def candidates(question: Question, answer: Answer) -> list[ReplayConfig]:
    """Return every combination of the axes that trace, machine and memory allow."""
    base, axes = question.at(question.memory.cache_bytes), answer.space.axes()
    every = (configure(**base, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    full = (started(question.trace, config, filling(question.trace, config.schedule)) for config in every)
    return [config for config in full if config is not None and can_replay(question.trace, config)]


if __name__ == "__main__":
    main()
