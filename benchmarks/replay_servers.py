"""Run replays in separate processes: from sources without log and request rows, and several at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Functions of `simulator/compiled/counters.py` that write the log and the rows; the copy returns from them at once.
TAKEN_OUT = ("span", "begin_pass", "end_pass", "close_row")
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
    """Copy the sources without the event log and rows per request."""
    ignored = shutil.ignore_patterns("samples", "__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "moereplay", folder / "moereplay", ignore=ignored)  # its links become folders
    path = folder / "moereplay" / "simulator" / "compiled" / "counters.py"
    text = path.read_text()
    for name in TAKEN_OUT:
        text, found = re.subn(rf"^def {name}\(.*\):\n", r"\g<0>    return\n", text, flags=re.MULTILINE)
        assert found == 1, f"counters.py no longer defines {name}"
    path.write_text(text)
    return folder


@contextmanager
def serve(tree: Path, trace: Path | None, prefetch: str, more: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that replays once per line of input."""
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
    """Time the groups one after the other, with the processes of a group at once."""

    def run() -> float:
        began = time.perf_counter()
        for group in groups:
            for process in group:
                send(process)
            for process in group:
                receive(process)
        return 1e9 * (time.perf_counter() - began) / accesses

    return run
