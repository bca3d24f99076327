"""Ctrl-C is answered at once, whatever runs: by one line of a command, by KeyboardInterrupt in a program."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from moereplay import command as entry
from moereplay.commands.sweep import sweep_run as sweep_run_verb
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.sweeps.processes import in_processes
from moereplay.sweeps.store import Folder
from tests.kit.command import in_python
from tests.kit.sweeping import ROOT, command_of, descendants, experiment, start, store_trace

sweep_run = in_python(sweep_run_verb)

SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
#: On a machine that does something else beside; on a quiet one it is a few milliseconds.
SOON = 5.0


# processes


def test_processes_give_results_in_order_and_what_they_raise():
    assert list(in_processes(math.sqrt, [9, 1, 4], 2)) == [3, 1, 2]
    with pytest.raises(ValueError, match="math domain error"):
        list(in_processes(math.sqrt, [1, -1], 1))
    with pytest.raises(ConfigError, match=r"a worker ended \(exit code 3\); check memory, or lower --workers"):
        list(in_processes(os._exit, [3], 1))


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    """Poll until the value is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found
    return found


def interrupted(process: subprocess.Popen[str]) -> tuple[float, str]:
    """Press Ctrl-C, which a terminal sends to the whole group: seconds until the process has ended, and stderr."""
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return time.monotonic() - pressed, said


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_ctrl_c_while_workers_of_a_reference_grid_start_shows_no_traceback_and_leaves_none(wait):
    arguments = ("--engine", "reference", "--capacity", "20%,25%,30%,35%", "--workers", 2)
    process = start("replay", SAMPLE, *arguments)
    workers = wait_for(lambda: descendants(process.pid))
    time.sleep(wait)
    seconds, said = interrupted(process)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted: nothing was written"
    assert "Traceback" not in said
    assert seconds < SOON
    assert not [worker for worker in workers if "spawn_main" in command_of(worker)]


@pytest.mark.slow
def test_ctrl_c_while_workers_of_a_sweep_start_reaches_the_sweep_and_not_them(tmp_path):
    """The first jobs are in flight already, and are finished."""
    arguments = ("--engine", "reference", "--workers", 2, "--out", tmp_path / "out")
    process = start("sweep", "run", experiment(tmp_path), *arguments)
    workers = wait_for(lambda: descendants(process.pid))
    _, said = interrupted(process)
    assert process.returncode == 130
    assert re.fullmatch(r"stopped with \d of 21 done; run the same command to resume", said.splitlines()[-1])
    assert "Traceback" not in said
    assert not [worker for worker in workers if "spawn_main" in command_of(worker)]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_sweep_though_replays_are_in_flight(tmp_path):
    store_trace(tmp_path / "tiny.zarr", prompt_tokens=20, decode_tokens=300)  # seconds of work, each
    arguments = ("--engine", "reference", "--workers", 2, "--out", tmp_path / "out")
    process = start("sweep", "run", experiment(tmp_path), *arguments)
    wait_for(lambda: list(tmp_path.glob("out/part-*")))
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert any(line.startswith("stopping: ") for line in process.stderr)
    seconds, said = interrupted(process)
    assert process.returncode == 130
    assert said == f"interrupted: results in {tmp_path / 'out'} are kept; run the same command to resume\n"
    assert seconds < SOON


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    imports = "import time; from moereplay.sweeps.processes import in_processes"
    script = f"{imports}; next(in_processes(time.sleep, [600, 600], 2))"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    workers = wait_for(lambda: len(found := descendants(process.pid)) == 2 and found)
    process.kill()
    process.wait()
    wait_for(lambda: not any("spawn_main" in command_of(worker) for worker in workers))


# commands


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """The processor time of a process so far, which does not depend on what else the machine does."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return math.inf


@pytest.mark.longest
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    "words",
    [
        "report out --out page.html",
        "plot out --out figures",
        "sweep show out",
        "inspect MINI",
        "replay MINI --capacity 10%,20%,30% --out new",
        "recommend olmoe-1b-7b --platform phone-ufs4",
        "traces slice MINI --requests 0:2 --out y.zarr",
        "models",
        "--help",
    ],
)
def test_ctrl_c_at_any_time_of_a_verb_is_one_line(words, tmp_path):
    done = start("replay", SAMPLE, "--capacity", "10%,20%", "--out", tmp_path / "out")
    assert done.wait() == 0
    arguments = words.replace("MINI", str(SAMPLE)).split()
    command = [sys.executable, "-m", "moereplay", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for at in range(1, 40):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        wait_for(lambda process=process, at=at: process.poll() is not None or cpu_seconds(process) >= 0.25 * at)
        if process.poll() is not None:
            break  # its life is over
        seconds, said = interrupted(process)
        assert process.returncode in (130, 0), (at, said)
        assert len([line for line in said.splitlines() if line.startswith("interrupted: ")]) == (
            process.returncode == 130
        )
        assert not re.search("Traceback|Exception|panicked|this is a bug", said), (at, said)
        assert seconds < SOON, at
        for made in ("page.html", "figures", "new", "x", "y.zarr"):
            shutil.rmtree(tmp_path / made, ignore_errors=True)


def test_ctrl_c_while_a_command_loads_shows_no_traceback():
    replay = ["replay", str(SAMPLE), "--engine", "reference"]  # goes on long enough, should the loading be over
    command = [sys.executable, "-v", "-m", "moereplay", *replay]  # says what it imports
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert any("import 'typer." in line for line in process.stderr)
    _, said = interrupted(process)
    assert process.returncode == 130
    assert "Traceback" not in said


def test_the_second_ctrl_c_ends_a_process_that_does_not_heed_the_first():
    script = (
        "import time\nfrom moereplay.commands.terminal import second_interrupt_ends\n"
        "with second_interrupt_ends():\n try:\n  print(flush=True); time.sleep(60)\n"
        " except KeyboardInterrupt:\n  print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == -signal.SIGINT


def test_a_command_in_the_background_of_a_script_goes_on_ignoring_it():
    script = (
        "import signal; from moereplay.commands.terminal import second_interrupt_ends\n"
        "with second_interrupt_ends(): signal.raise_signal(2)"
    )
    command = ["sh", "-c", f'trap "" INT; exec {sys.executable} -c "$0"', script]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_a_verb_that_has_no_more_to_say_answers_in_one_line(monkeypatch, capsys):
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moereplay.commands.traces.open_trace", interrupted)
    monkeypatch.setattr(sys, "argv", ["moereplay", "inspect", str(SAMPLE)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted: ")


def test_a_sweep_is_interrupted_at_once_while_nothing_is_in_flight(tmp_path, monkeypatch, capsys):
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moereplay.sweeps.grid.demand_of", interrupted)
    with pytest.raises(typer.Exit) as ended:
        sweep_run(experiment(tmp_path), str(tmp_path / "out"), workers=1)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"interrupted: results in {tmp_path / 'out'} are kept")


@pytest.mark.slow
def test_what_a_grid_has_written_is_kept_and_said(tmp_path):
    store_trace(tmp_path / "long.zarr", prompt_tokens=20, decode_tokens=60)
    evictions = "lru,fifo,mru,lfu,arc,clock,sieve,slru,s3fifo,lru_k,least_stale,random"
    arguments = ("--engine", "reference", "--capacity", "40%", "--eviction", evictions, "--out", tmp_path / "out")
    process = start("replay", tmp_path / "long.zarr", *arguments, "--workers", 1)
    wait_for(lambda: len(list((tmp_path / "out").glob("part-*"))) > 1)
    seconds, said = interrupted(process)
    assert process.returncode == 130
    assert said.splitlines()[-1] == f"interrupted: finished replays are kept in {tmp_path / 'out'}"
    assert seconds < SOON
    assert all(path.name.startswith("part-") for path in (tmp_path / "out").iterdir())  # none is half written


@pytest.mark.parametrize("when", ["rmtree", "rmdir"])
def test_an_interrupt_while_scratch_files_are_removed_leaves_none(when, tmp_path, monkeypatch):
    interrupts = iter([KeyboardInterrupt])
    owner = shutil if when == "rmtree" else Path
    remove = getattr(owner, when)

    def interrupted(*given: Any, **options: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        remove(*given, **options)

    monkeypatch.setattr(owner, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Folder(tmp_path).keep("part-0", {"a": b"1"})
    assert [path.name for path in tmp_path.iterdir()] == ["part-0"]


ABANDONED = """
import asyncio
from moereplay.commands.terminal import leave

loop = asyncio.new_event_loop()
reading = loop.create_task(asyncio.sleep(60))
loop.run_until_complete(asyncio.sleep(0))
leave(130)
"""


def test_a_read_that_is_abandoned_at_the_end_is_no_news():
    ended = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.long
@pytest.mark.skipif(IS_PYTHON, reason="nothing is compiled")
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_while_a_kernel_is_compiled_ends_the_command(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = start("replay", SAMPLE, "--capacity", "10%,20%", "--workers", workers)
    assert process.stderr is not None
    assert any(line.startswith("compiling the") for line in process.stderr)
    time.sleep(3)  # into it
    seconds, said = interrupted(process)
    assert process.returncode == 130
    assert said == "interrupted: nothing was written\n"
    assert seconds < SOON
