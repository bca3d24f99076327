"""Shared by sweep tests: a trace of milliseconds, experiments over it, and the merged bytes of a folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from moereplay.sweeps.parts import merge
from moereplay.sweeps.store import Folder, place_of
from moereplay.traces.schema import Geometry, Provenance
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Geometry(layers=3, experts=6, k=2, expert_bytes=(1000, 1000, 1000))
#: 18 configurations and 3 bounds.
GRID = """
traces = ["tiny.zarr"]
[grid]
capacity = ["20%", "40%", "60%"]
eviction = ["lru", "fifo", "least_stale"]
prefetch = ["none", "top_k"]
"""


def store_trace(path: Path, requests: int = 2, **settings: object) -> Path:
    """A trace with everything that a policy may need, which counts as recorded."""
    chosen = {"kind": "zipf", "prompt_tokens": 2, "decode_tokens": 4, "recall": (0.8,)} | settings
    made = Synthetic.model_validate({"geometry": SHAPE, "requests": requests} | chosen)
    trace = synthesise(made)
    header = trace.header.model_copy(update={"provenance": Provenance(model="tiny")})
    write_trace(path, header, map(trace.request, range(requests)))
    return path


def experiment(folder: Path, text: str = GRID, name: str = "experiment.toml") -> Path:
    """An experiment file beside its trace."""
    if not (folder / "tiny.zarr").exists():
        store_trace(folder / "tiny.zarr")
    file = folder / name
    file.write_text(text)
    return file


def merged(out: Path, *results: Path | str) -> dict[str, str]:
    """sha256 of every table of the merged folders and URLs."""
    where = Path(merge([place_of(str(each)) for each in results], Folder(out)).where)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(where.glob("*.parquet"))}


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command line as a process of its own, in a group of its own."""
    command = [sys.executable, "-W", "error", "-m", "moereplay", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def moereplay(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    ended = moereplay_here(*arguments)
    return ended.returncode, ended.stdout, ended.stderr


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, but for Python's own tracker of resources."""
    try:
        pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [child for child in pids if "spawn_main" in command_of(child)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
