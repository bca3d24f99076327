"""Measure the cost of a sweep: 1,000 configurations with prefetching on a trace of 30,000 tokens.

Wall time and the memory of all its processes; two draws of configurations by two workers, by one, and by `replay()`
called one after the other in this process, in turns: what grows with the draw is the price of a configuration, the rest
that of starting. How long a sweep takes to say that everything is stored. And the CPU time of a grid without prefetch
on eight platforms over that on one: they share decisions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import typer
from rounds import in_turns, machine
from speed_traces import FULL, OLMOE, QUICK, make

from moereplay.simulator.interface import Sharing
from moereplay.simulator.replay import replay
from moereplay.sweeps.jobs import in_groups, open_traces
from moereplay.sweeps.run import planned
from moereplay.traces.documents import json_text

ROOT = Path(__file__).parents[1]
#: 10 x 5 x 4 x 5 configurations.
EXPERIMENT = """\
traces = ["{trace}"]

[grid]
capacity = ["1%", "2%", "3%", "5%", "8%", "12%", "16%", "20%", "25%", "35%"]
eviction = ["lru", "fifo", "lfu", "least_stale", "farthest_layer"]
prefetch = ["top_k:factor=0.5", "top_k", "top_k:factor=1.5", "top_k:factor=2"]
"platform.link.bytes_per_s" = [5e9, 12e9, 25e9, 50e9, 100e9]
"""
#: 20 x 6 configurations on each platform.
WITHOUT_PREFETCH = """\
traces = ["{trace}"]
bounds = false

[grid]
capacity = [{capacities}]
eviction = ["lru", "fifo", "lfu", "least_stale", "farthest_layer", "mru"]
"platform.link.bytes_per_s" = [{rates}]
"""
PLATFORMS, CAPACITIES = 8, 20
#: Configurations that take no time to replay, for what storing and resuming cost.
SMALL = ROOT / "traces" / "samples" / "miniature.zarr"
MANY = """\
traces = ["{trace}"]
bounds = false

[grid]
eviction = ["lru", "fifo"]

[random]
n = {count}
seed = 0

[grid.capacity]
low = 1
high = 50
suffix = "%"
"""


def command(*arguments: object) -> list[str]:
    """Return a moereplay command for this Python."""
    return [sys.executable, "-m", "moereplay", *map(str, arguments)]


def timed(arguments: Sequence[str]) -> tuple[float, int]:
    """Return wall seconds of a command and the peak memory of its processes (proportional shares, once a second)."""
    began, most = time.perf_counter(), 0
    process = subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, sum(map(share, members(process.pid))))
        time.sleep(1 if time.perf_counter() - began > 10 else 0.05)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(arguments)}")
    return time.perf_counter() - began, most


def members(group: int) -> Iterator[int]:
    """Yield the processes of a group."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                yield int(entry.name)
        except ProcessLookupError:
            continue


def share(pid: int) -> int:
    """Return the proportional memory of a process in bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def options(count: int) -> list[str]:
    """Return `--set` options that draw so many of an experiment's configurations."""
    return ["--set", f"random.n={count}", "--set", "random.seed=0", "--set", "bounds=false"]


def side_by_side(experiment: Path, folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Time the same configurations with two workers, with one, and with the engine alone."""
    drawn = options(count)
    sweep = planned(experiment, drawn[1::2])
    trace = open_traces(sweep.experiment.traces, experiment.parent, experiment)[0]

    def engine_alone() -> float:
        began = time.perf_counter()
        for group in in_groups(sweep.jobs):
            sharing = Sharing() if len(group) > 1 else None
            for job in group:
                replay(trace, job.config, sharing=sharing)
        return time.perf_counter() - began

    def swept(workers: int) -> float:
        out = folder / f"part-{workers}-{time.time_ns()}"
        return timed(command("sweep", "run", experiment, *drawn, "--workers", workers, "--out", out))[0]

    spent = in_turns({"engine": engine_alone, "one": lambda: swept(1), "two": lambda: swept(2)}, rounds)
    return {name: median(seconds) for name, seconds in spent.items()}


def prices(few: dict[str, float], many: dict[str, float], more: int) -> dict[str, float]:
    """Return the overhead of one worker: seconds to start, and a share of each configuration's time."""
    engine, one = ((many[who] - few[who]) / more for who in ("engine", "one"))
    return {"share": one / engine - 1, "start": few["one"] - few["engine"] * one / engine}


def on_platforms(trace: Path | None, folder: Path, rounds: int, capacities: int = CAPACITIES) -> dict[str, float]:
    """Return CPU seconds of a grid on one platform and on eight, their ratio, and the largest process in MiB."""
    found: dict[str, float] = {}
    for name, many in (("one", 1), ("eight", PLATFORMS)):
        shares = ", ".join(f'"{2 * number}%"' for number in range(1, capacities + 1))
        rates = ", ".join(f"{5 * number}e9" for number in range(1, many + 1))
        (folder / f"{name}.toml").write_text(WITHOUT_PREFETCH.format(trace=trace, capacities=shares, rates=rates))

    def swept(name: str) -> float:
        out = folder / f"{name}-{time.time_ns()}"
        seconds, found[f"MiB of {name}"] = spent(command("sweep", "run", folder / f"{name}.toml", "--out", out))
        return seconds

    taken = in_turns({name: partial(swept, name) for name in ("one", "eight")}, rounds)
    found |= {name: median(seconds) for name, seconds in taken.items()}
    return found | {"ratio": found["eight"] / found["one"]}


def spent(arguments: Sequence[str]) -> tuple[float, float]:
    """Return the CPU seconds of a command with its workers, and the MiB of the largest of these processes."""
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(arguments)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def resumed(folder: Path, count: int) -> dict[str, float]:
    """Time a sweep of `count` configurations, and the same command again."""
    experiment = folder / "many.toml"
    experiment.write_text(MANY.format(trace=SMALL, count=count))
    arguments = command("sweep", "run", experiment, "--out", folder / "many")
    return {"first": timed(arguments)[0], "again": timed(arguments)[0]}


def main(
    rounds: int = 3, drawn: int = 20, quick: bool = False, out: Path | None = None, folder: Path | None = None
) -> None:
    """Print what was measured, and keep it as JSON in `--out`; `--quick` is for tests of this file."""
    with TemporaryDirectory() as scratch:
        where = folder or Path(scratch)
        experiment = where / "experiment.toml"
        made = make((QUICK if quick else FULL)[OLMOE], where)
        experiment.write_text(EXPERIMENT.format(trace=made.whole.path))
        found: dict[str, Any] = {"machine": machine(), "rounds": rounds, "drawn": drawn}
        found["grid"] = on_platforms(made.whole.path, where, rounds, 1 if quick else CAPACITIES)
        few, many = (side_by_side(experiment, where, count, rounds) for count in (drawn, 4 * drawn))
        found |= {"seconds": few, "seconds_of_four_times": many, "overhead": prices(few, many, 3 * drawn)}
        whole = command("sweep", "run", experiment, "--workers", 2, "--out", where / f"whole-{time.time_ns()}")
        if not quick:
            found["whole"] = dict(zip(("seconds", "bytes"), timed(whole), strict=True))
        found["resumed"] = resumed(where, 100 if quick else 10_000)
    text = json_text(found, indent=1)
    if out:
        out.write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
