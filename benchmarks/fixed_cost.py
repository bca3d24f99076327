"""Measure the fixed cost of a replay: in a warm process, as a command, and on first use.

    (a) a replay of a trace of 512 accesses, whose events take next to no time, and of one of 196,608; the same from a
        trace that is opened anew each time, in whose process another replay has left what replays share
    (b) `moereplay replay miniature` over `python -c "import numba"`, in turns
    (c) the same command with an empty cache of machine code: a first replay after installing, for each kernel that
        replays use, but for that of batches

Figures are CPU time, of all threads and children; of (c) also wall time and the memory of the largest process. (a) is
the median of replays at forty capacities, (b) of rounds.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rounds import in_turns, machine

from moereplay.analysis.tables import console, table
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.documents import json_text
from moereplay.traces.geometry import known
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "moereplay", "replay", str(ROOT / "traces" / "samples" / "miniature.zarr")]
NUMBA = [sys.executable, "-c", "import numba"]
SIZES = {"events next to none": 4, "196,608 accesses": 1536}  #: tokens of 16 layers and 8 of 64 experts
#: Options that need a kernel of their own, by the kernel.
FIRST = {
    "fast path": [],
    "extended fast path": ["--platform", "desktop-24gb"],
    "general": ["--eviction", "arc"],
    "extended general": ["--platform", "desktop-ram", "--miss", "cpu"],
}
CAPACITIES = [f"{percent}%" for percent in range(1, 41)]

Row = dict[str, Any]


def made(folder: Path, tokens: int) -> Trace:
    """Make a synthetic trace with the OLMoE geometry."""
    drawn = Synthetic(
        kind="markov",
        reuse=0.5,
        geometry=known("olmoe-1b-7b").geometry,
        requests=4,
        prompt_tokens=0,
        decode_tokens=tokens // 4,
    )
    trace = synthesise(drawn)
    return write_trace(folder / f"{tokens}.zarr", trace.header, map(trace.request, range(4)))


def replays(name: str, of: Callable[[], Trace], capacities: Sequence[str]) -> Row:
    """Return the CPU time of one replay in ms, after an untimed one."""
    configs = [configure(capacity=capacity) for capacity in capacities]
    replay(of(), configs[0])
    spent = [_replayed(of(), config) for config in configs]
    return {"replay": name, "median ms": median(spent), "least ms": min(spent)}


def _replayed(trace: Trace, config: Any) -> float:
    start = time.process_time()
    replay(trace, config)
    return (time.process_time() - start) * 1e3


def command(arguments: Sequence[str]) -> float:
    """Return the CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(arguments, check=True, capture_output=True, env=environment, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_replay(options: Sequence[str], cache: Path) -> Row:
    """Return what a replay costs that finds no machine code: seconds, and the largest process in MiB."""
    began = time.perf_counter()
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(
        [*COMMAND, "--capacity", "25%", *options],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: a replay with {' '.join(options)}")
    seconds = time.perf_counter() - began
    return {
        "options": " ".join(options),
        "cpu s": used.ru_utime + used.ru_stime,
        "s": seconds,
        "MiB": used.ru_maxrss / 1024,
    }


def warm_command(rounds: int) -> Row:
    """Compare a replay of the sample with importing numba alone."""
    spent = in_turns({"replay": lambda: command(COMMAND), "numba": lambda: command(NUMBA)}, rounds)
    ratios = [a / b for a, b in zip(spent["replay"], spent["numba"], strict=True)]
    return {"command s": median(spent["replay"]), "numba s": median(spent["numba"]), "ratio": median(ratios)}


def main(
    rounds: Annotated[int, typer.Option(help="Of (b).")] = 9,
    cold: Annotated[bool, typer.Option(help="Measure (c), which compiles: some minutes.")] = True,
    out: Annotated[Path | None, typer.Option(help="All figures as JSON.")] = None,
) -> None:
    """Measure the three costs and print them side by side."""
    with TemporaryDirectory() as folder:
        traces = {name: made(Path(folder), tokens) for name, tokens in SIZES.items()}
        rows = [replays(name, lambda trace=trace: trace, CAPACITIES) for name, trace in traces.items()]
        again = Path(folder) / f"{SIZES['events next to none']}.zarr"
        rows.append(replays("opened anew each time, opening not counted", lambda: open_trace(again), CAPACITIES))
        figures: Row = {"machine": machine(), "replays": rows, "warm": warm_command(rounds)}
        if cold:
            firsts = ((what, first_replay(on, Path(folder) / what)) for what, on in FIRST.items())
            figures["cold"] = [{"first use of the kernel": what} | row for what, row in firsts]
    console().print(table(rows, title="(a) a replay in a warm process"))
    console().print(table([figures["warm"]], title="(b) the command over the import of numba, CPU seconds"))
    if cold:
        console().print(table(figures["cold"], title="(c) a first replay, nothing compiled"))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json_text(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
