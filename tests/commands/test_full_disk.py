"""Full disks and killed writers: every writer of results names the file and the reason, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from moereplay.analysis.figures.catalogue import draw, save
from moereplay.commands.recommend import _write_lists
from moereplay.results.errors import ResultError
from moereplay.results.files import to_frame, write_events, write_frame
from moereplay.results.parts import Part, part_of
from moereplay.results.trace_events import Slice, write_items
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve, write_curve
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import Outcome, run_grid
from moereplay.sweeps.jobs import Batch, compute, job_of
from moereplay.sweeps.parts import merge
from moereplay.sweeps.store import Folder
from moereplay.sweeps.tune import Drawn, open_journal
from moereplay.traces import files
from moereplay.traces.exporters.contract import Options, export, load
from moereplay.traces.files import write_whole
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.every import every
from tests.kit.policy_runs import trace_of
from tests.kit.sweeping import ROOT, moereplay, store_trace

PAGE = 4096
REFUSED = (ConfigError, ResultError, TraceError)
FULL = r"cannot write \S+: (No space left on device|File too large)"


@contextmanager
def mounted(folder: Path) -> Iterator[bool]:
    """A disk of one page, if this process may mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={PAGE}", "tmpfs", str(folder)]
    try:
        may = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        may = False
    yield may
    if may:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process grows beyond a size: what a user without mounts has for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(params=("full", "nearly full"))
def disk(request, tmp_path) -> Iterator[tuple[Path, Callable]]:
    """A folder, and a context in which its disk has no room at all, or for a page."""
    nearly = request.param == "nearly full"
    with mounted(tmp_path / "disk") as is_disk:

        @contextmanager
        def full() -> Iterator[None]:
            with limited(resource.RLIM_INFINITY if is_disk else nearly * PAGE):
                yield

        if is_disk and not nearly:
            (tmp_path / "disk" / "ballast").write_bytes(bytes(PAGE))
        yield tmp_path / "disk", full


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return open_trace(store_trace(tmp_path_factory.mktemp("full") / "tiny.zarr", requests=40))


@pytest.fixture(scope="module")
def outcome(trace) -> Outcome:
    (found,) = run_grid(trace, [configure(capacity="50%")], engine="reference", log=True)
    return found


@pytest.fixture(scope="module")
def part(trace) -> Part:
    jobs = tuple(job_of(trace, configure(capacity="50%", eviction=name)) for name in ("lru", "fifo", "lfu"))
    return compute(Batch(0, jobs, "reference", True)).part


@pytest.fixture(scope="module")
def swept(part, tmp_path_factory) -> Folder:
    folder = Folder(tmp_path_factory.mktemp("swept"))
    folder.store(part, {"sweep_version": 1})
    return folder


def journalled(folder: Path) -> None:
    """Rounds of one trial each, until the disk is full."""
    with open_journal(folder / "tune.journal") as journal:
        for _ in range(100):
            journal.append("search", [Drawn({"0 capacity": 0.25}, [1.0, 2.0])])


def recorded(folder: Path) -> None:
    made = trace_of([[[0, 1]], [[1, 2]]], experts=6)
    write_trace(folder / "made.zarr", made.header, [made.request(0)])


@pytest.fixture
def writers(outcome, trace, part, swept) -> dict[str, Callable[[Path], object]]:
    """Every writer of results, into a folder."""
    events = outcome[0].events * 20
    replay, about = part_of(outcome[0], "bound", outcome[1]), {"sweep_version": 1}
    slices = [Slice(1, sha256(bytes([at % 256, at // 256])).hexdigest(), at, at, {}) for at in range(1000)]
    figure = draw("misses", to_frame([outcome[0]], [outcome[1]]))
    return {
        "replay --out": lambda folder: Folder(folder).store(replay, about),
        "replay --out, to a new folder": lambda folder: Folder(folder / "out" / "out").store(replay, about),
        "replay --events, Parquet": lambda folder: write_events(folder / "events.parquet", events),
        "replay --events, CSV": lambda folder: write_events(folder / "events.csv", events),
        "timeline": lambda folder: write_items(folder / "t.json", "", {}, slices),
        "timeline, compressed": lambda folder: write_items(folder / "t.json.gz", "", {}, slices),
        "curve --out": lambda folder: write_curve(folder, curve(trace)),
        "validate --out": lambda folder: write_frame(to_frame([outcome[0]], [outcome[1]]), folder / "v.parquet"),
        "plot": lambda folder: save(figure, folder / "figures" / "misses"),
        "sweep run": lambda folder: Folder(folder / "out").store(part, {"sweep_version": 1}),
        "sweep merge": lambda folder: merge([swept], Folder(folder / "out")),
        "tune": journalled,
        "import, record": recorded,
        "recommend --out": lambda folder: _write_lists(folder / "out", {"": {"warm": [[0, 1]] * 10_000}}),
        "export": lambda folder: export(trace, load("csv"), Options(), folder / "t.csv"),
    }


WRITERS = (
    *("replay --out", "replay --out, to a new folder", "replay --events, Parquet", "replay --events, CSV"),
    *(
        "timeline",
        "timeline, compressed",
        "curve --out",
        "validate --out",
        "plot",
        "sweep run",
        "sweep merge",
        "tune",
        "import, record",
        "recommend --out",
        "export",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_and_nothing_is_left_on_it(name, disk, writers):
    folder, full = disk
    with full(), pytest.raises(REFUSED, match=FULL) as refused:
        writers[name](folder)
    assert "\n" not in str(refused.value)
    left = {path.name for path in folder.rglob("*") if path.is_file()} - {"ballast"}
    assert left <= ({"tune.journal"} if name == "tune" else set())
    assert {path.name for path in folder.rglob("*") if path.is_dir()} <= {"out", "tmp"}  # of results, and empty


def test_every_writer_is_tried(writers):
    assert list(writers) == list(WRITERS)


def test_the_journal_of_a_search_keeps_its_rounds_when_the_disk_is_full(disk):
    folder, full = disk
    with full(), pytest.raises(ConfigError, match="stored results are kept; free disk space"):
        journalled(folder)
    with open_journal(folder / "tune.journal") as journal:
        rounds = journal.rounds("search")
    assert rounds == [[Drawn({"0 capacity": 0.25}, [1.0, 2.0])]] * len(rounds)


STEPS = {
    "open": (Path, "open"),
    "sync": (os, "fsync"),
    "rename": (Path, "replace"),
    "clear": (files, "clear_abandoned"),
}


@pytest.mark.parametrize("step", STEPS)
def test_wherever_writing_fails_what_was_there_stays_and_nothing_else(step, tmp_path, monkeypatch):
    (tmp_path / "out.csv").write_bytes(b"before")

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*STEPS[step], refuse)
    for path in (tmp_path / "out.csv", tmp_path / "new" / "folder" / "out.csv"):
        with pytest.raises(OSError, match=r"No space left.*: '.*out\.csv'"):
            write_whole(path, b"after")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.rglob("*")] == ["out.csv"]
    assert (tmp_path / "out.csv").read_bytes() == b"before"


def test_ctrl_c_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "out.csv", b"after")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, sys
from pathlib import Path
from moereplay.traces import files
from moereplay.traces.exporters.contract import Options, export, load
os.fsync = lambda handle: os.kill(os.getpid(), 9)
files.write_whole(Path(sys.argv[1]), bytes(100))
"""


def test_what_a_killed_writer_left_goes_when_another_writes_there(tmp_path):
    """And what a living one, or one on another host, is writing stays."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "part-a.parquet")], check=False, env=environment
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.part-a\.parquet\..+-\d+-[0-9a-f]{8}\.tmp", left.name)
    others = {f".part-b.parquet.{files.scratch_name()}.tmp", ".part-c.parquet.elsewhere-1-0a1b2c3d.tmp", ".mine.tmp"}
    for other in others:
        (tmp_path / other).write_bytes(b"")
    write_whole(tmp_path / "part-d.parquet", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == others | {"part-d.parquet"}


def test_the_command_says_it_in_one_line(trace, tmp_path):
    """`replay --out` onto a full disk."""
    with mounted(tmp_path / "disk") as is_disk:
        out = tmp_path / "disk" if is_disk else Path("/dev/full")
        said = f"cannot write {out}/part-" if is_disk else "cannot write /dev/full/part-"
        arguments = ("--engine", "reference", "--capacity", "50%", "--workers", 1, "--out", out)
        code, _, answer = moereplay("replay", trace.path, *arguments)
        assert (code, answer.count("\n"), answer.startswith(f"moereplay: {said}")) == (2, 1, True), answer
        assert not is_disk or list(out.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
@every(
    "unbuffered, verb",
    [
        ({}, ("platforms",)),
        ({}, ("policies", "--markdown")),
        ({"PYTHONUNBUFFERED": "1"}, ("platforms",)),
    ],
)
def test_an_answer_that_cannot_be_written_is_an_error(verb, unbuffered):
    """Also what stays in Python's buffer until the end."""
    command = [sys.executable, "-m", "moereplay", *verb]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | unbuffered
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "moereplay: cannot write the output: No space left on device; free disk space and run it again\n"
    )


@pytest.mark.slow
def test_a_module_that_a_full_disk_has_cut_off_is_named(tmp_path):
    """Python keeps the first bytes of a compiled module, and cannot load them; typer would say "Aborted!"."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "moereplay", "inspect", "miniature"]
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert run(command).returncode == 0
    compiled = next(tmp_path.rglob("analysis/inspection.*.pyc"))
    compiled.write_bytes(compiled.read_bytes()[:100])
    ended = run(command)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"moereplay: {compiled} is cut off")
