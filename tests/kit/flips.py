"""`python -m tests.kit.flips FOLDER COUNT SEED`: replays after single flipped bits, each in a process of its own.

COUNT bits are flipped in a trace that is written to FOLDER, and COUNT in what is derived from it. One line of JSON says
for both how replays ended: `same` totals as undamaged, `refused` with a line for the user, `other` totals,
`unexpected`, or the number of the signal. A replay forks from a process that has loaded all machine code
and opened nothing: zarr starts threads, which do not survive a fork.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.derived import PLACE
from moereplay.traces.schema import Geometry, Trace, TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = Geometry(layers=3, experts=16, k=2, expert_bytes=(100,) * 3)
CONFIG = configure(capacity="40%", eviction="belady", prefetch="top_k", passes="token")
SAME, REFUSED, OTHER, UNEXPECTED = range(4)
ENDS = {SAME: "same", REFUSED: "refused", OTHER: "other", UNEXPECTED: "unexpected"}
ENGINES = ("compiled", "reference")


def drawn() -> Trace:
    """In memory."""
    return synthesise(Synthetic(geometry=GEOMETRY, requests=2, prompt_tokens=8, decode_tokens=56, recall=(0.8,)))


def totals(trace: Trace) -> list[dict[str, int]]:
    """Return the totals of both engines."""
    return [replay(trace, CONFIG, engine=engine).totals for engine in ENGINES]


def in_child(work: Callable[[], int]) -> str:
    """Return how work ends in a separate process."""
    child = os.fork()
    if child == 0:
        os._exit(ended(work))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ENDS.get(status, str(status))


def ended(work: Callable[[], int]) -> int:
    """The exit code of a child."""
    try:
        return work()
    except (TraceError, PolicyError) as refused:
        return REFUSED if "\n" not in str(refused) else UNEXPECTED
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return UNEXPECTED


def write(path: Path) -> int:
    """The trace."""
    made = drawn()
    write_trace(path, made.header, map(made.request, range(made.requests)))
    return SAME


def compare(path: Path, expected: list[dict[str, int]]) -> int:
    """Replay it."""
    return SAME if totals(open_trace(path)) == expected else OTHER


def flipped(file: Path, rng: np.random.Generator) -> bytes:
    """Flip a bit of a file; returns what it was."""
    before = file.read_bytes()
    content, bit = bytearray(before), int(rng.integers(8 * len(before)))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return before


def files_of(folder: Path) -> list[Path]:
    """Every file with a bit in it."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)


def run(folder: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """Return how replays of a trace ended, by the flipped part."""
    os.environ[PLACE] = str(folder)
    path, rng = folder / "a.zarr", np.random.Generator(np.random.PCG64(seed))
    work = partial(compare, path, totals(drawn()))
    assert [in_child(partial(write, path)), in_child(work)] == ["same", "same"]
    return {what: flip_one_by_one(path, what, count, rng, work) for what in ("derived", "trace")}


def flip_one_by_one(
    path: Path, what: str, count: int, rng: np.random.Generator, work: Callable[[], int]
) -> Counter[str]:
    """Each flip is undone before the next; a trace with nothing derived is read anew."""
    ends, place = Counter[str](), path.with_name("moereplay") / "derived"
    for _ in range(count):
        if what == "trace":
            shutil.rmtree(place)
        files = files_of(path if what == "trace" else place)
        file = files[int(rng.integers(len(files)))]
        before = flipped(file, rng)
        ends[in_child(work)] += 1
        file.write_bytes(before)
        place.mkdir(exist_ok=True)
    return ends


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
