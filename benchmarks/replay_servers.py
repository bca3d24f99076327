"""Replays in processes of their own: from sources without log and request rows, and several at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("policies", "simulator", "traces")
#: What takes them out of the sources: a file, the line after which a function ends.
TAKEN_OUT = {
    "log.py": ['"""Something that starts `after` ns from now and takes `spent`."""'],
    "counters.py": [
        '"""Charge to the request of this pass from here on; a request begins with its first row."""',
        '"""The pass\'s part in TTFT or TPOT of every request in it; it began then, ns."""',
        '"""What the counters gained since the last call is what the request in progress cost."""',
    ],
}
SERVER = """
import sys, time
from pathlib import Path
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
trace, config = open_trace(Path(sys.argv[1])), configure(capacity="5%", prefetch=sys.argv[2])
for _ in sys.stdin:
    began = time.perf_counter()
    totals = replay(trace, config, engine="compiled").totals
    print(1e9 * (time.perf_counter() - began) / totals["accesses"], totals["misses"], flush=True)
"""


def bare_tree(folder: Path) -> Path:
    """The sources without the event log and without rows per request."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("samples", "__pycache__"))
    for name, places in TAKEN_OUT.items():
        path = folder / "simulator" / "compiled" / name
        text = path.read_text()
        for place in places:
            assert place in text, f"{name} no longer says {place}"
            text = text.replace(place, f"{place}\n    return")
        path.write_text(text)
    return folder


@contextmanager
def serve(tree: Path, trace: Path | None, prefetch: str, more: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that replays once for every line it is sent."""
    command = [sys.executable, "-c", SERVER, str(trace), prefetch]
    environment = os.environ | {"PYTHONPATH": str(tree)} | more
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree) as process:
        yield process


def round_trip(process: subprocess.Popen[str]) -> Callable[[], float]:
    def run() -> float:
        send(process)
        return receive(process)

    return run


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def receive(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline().split()[0])


def in_groups(groups: Sequence[Sequence[subprocess.Popen[str]]], accesses: int) -> Callable[[], float]:
    """One group after the other, the processes of a group at once."""

    def run() -> float:
        began = time.perf_counter()
        for group in groups:
            for process in group:
                send(process)
            for process in group:
                receive(process)
        return 1e9 * (time.perf_counter() - began) / accesses

    return run
