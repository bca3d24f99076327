"""Work beside the thread that waits for it: Ctrl-C ends the wait at once, and machine code at its next step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.simulator import threads
from moereplay.simulator.compiled import engine
from moereplay.simulator.compiled.initial import SimulationState
from moereplay.simulator.compiled.layout import STOP
from moereplay.simulator.config import PolicySet, configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.jit.machine_code import COMPILING
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.replay import replay
from moereplay.sweeps import grid
from moereplay.traces.schema import Trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.sweeping import ROOT, SHAPE

PLAIN = configure(capacity="40%")
GENERAL = configure(capacity="40%", contract="sequential")
#: On a machine that does something else beside; on a quiet one it is a few milliseconds.
SOON = 5.0


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthesise(Synthetic(kind="zipf", geometry=SHAPE, requests=2, prompt_tokens=2, decode_tokens=40))


def press_ctrl_c(begun: threading.Event) -> list[float]:
    """As a terminal does, a moment after something has begun; when, once it has."""
    pressed: list[float] = []

    def press() -> None:
        if begun.wait(60):
            time.sleep(0.05)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    return pressed


def flag_of(asked: int) -> np.ndarray:
    flag = np.zeros(1, STOP)
    flag["requested"] = asked
    return flag


def sleeps_for_ever(begun: threading.Event) -> Callable[..., None]:
    """Machine code that runs until its run is to stop."""

    def code(*given: Any) -> None:
        begun.set()
        while not threads.stop_flag()["requested"][0]:
            time.sleep(0.01)

    return code


def wait_until(what: Callable[[], bool]) -> None:
    """Fails if it is not so soon."""
    deadline = time.monotonic() + SOON
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert what()


def check_that_all_end() -> None:
    """Every thread of a replay ends soon."""
    wait_until(lambda: not any(thread.is_alive() for thread in threads._started))


def test_ctrl_c_ends_the_wait_for_machine_code_and_the_machine_code(trace, monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(engine, "machine_code", lambda of: sleeps_for_ever(begun))
    pressed = press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        replay(trace, PLAIN)
    assert time.monotonic() - pressed[0] < SOON
    check_that_all_end()


def test_ctrl_c_ends_a_grid_of_threads(trace, monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(engine, "machine_code", lambda of: sleeps_for_ever(begun))
    pressed = press_ctrl_c(begun)
    configs = [configure(capacity=f"{share}%") for share in (30, 40, 50, 60)]
    with pytest.raises(KeyboardInterrupt):
        list(grid.run_grid(trace, configs, workers=2))
    assert time.monotonic() - pressed[0] < SOON
    check_that_all_end()


def test_a_compilation_goes_on_by_itself_and_the_next_replay_waits_for_it(trace, monkeypatch):
    begun, goes_on, compile_it = threading.Event(), threading.Event(), engine.machine_code

    def slow(of: Callable) -> Callable | int:
        begun.set()
        goes_on.wait(60)
        return compile_it(of)

    monkeypatch.setattr(engine, "machine_code", slow)
    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        replay(trace, PLAIN)
    assert not COMPILING.acquire(blocking=False)  # held by the thread that nobody waits for
    threading.Timer(0.1, goes_on.set).start()
    assert replay(trace, PLAIN).totals == replay(trace, PLAIN, engine="reference").totals
    check_that_all_end()


@pytest.mark.parametrize("config", [PLAIN, GENERAL], ids=["plain", "general"])
def test_both_kernels_end_at_the_next_step_once_they_are_told(trace, config, monkeypatch):
    flag = flag_of(asked=1)
    monkeypatch.setattr("moereplay.simulator.compiled.initial.stop_flag", lambda: flag)
    with pytest.raises(KeyboardInterrupt):
        replay(trace, config)
    flag["requested"] = 0
    assert replay(trace, config).totals["accesses"] > 0


@pytest.mark.skipif(IS_PYTHON, reason="plain Python is stopped the same way, and slow to set up")
@pytest.mark.parametrize("config", [PLAIN, GENERAL], ids=["plain", "general"])
def test_machine_code_reads_the_flag_while_it_runs(config, monkeypatch):
    long = synthesise(Synthetic(kind="cyclic", geometry=SHAPE, requests=1, prompt_tokens=1, decode_tokens=60_000))
    flag, bound = flag_of(asked=0), engine.bound

    def tell(state: SimulationState) -> None:
        while state["clock"]["time"] == 0:  # until the code runs
            pass
        flag["requested"] = 1

    def told(kernel: Callable, state: SimulationState, chosen: PolicySet) -> Callable[[], object]:
        threading.Thread(target=tell, args=(state,), daemon=True).start()
        return bound(kernel, state, chosen)

    monkeypatch.setattr("moereplay.simulator.compiled.initial.stop_flag", lambda: flag)
    monkeypatch.setattr(engine, "bound", told)
    with pytest.raises(KeyboardInterrupt):
        replay(long, config)


def test_a_curve_is_interrupted_between_two_ranges(trace, monkeypatch):
    begun = threading.Event()

    def walk(*given: Any) -> None:
        begun.set()
        time.sleep(0.2)

    monkeypatch.setattr("moereplay.simulator.curves.lru.WALK", walk)
    monkeypatch.setattr("moereplay.simulator.curves.stream.STEPS_AT_ONCE", 1)
    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        curve(trace, "lru")
    check_that_all_end()


def test_a_replay_in_a_thread_of_ones_own_is_the_same(trace):
    found = []
    mine = threading.Thread(target=lambda: found.append(replay(trace, PLAIN).totals))
    mine.start()
    mine.join()
    assert found == [replay(trace, PLAIN).totals]


def test_what_is_raised_beside_the_wait_is_raised_from_it_with_its_line():
    def fails() -> None:
        raise ConfigError("here")

    with pytest.raises(ConfigError, match="here") as raised:
        threads.run_interruptibly(fails)
    assert raised.traceback[-1].name == "fails"


def test_threads_give_results_in_order_and_stop_at_the_first_error():
    began: list[int] = []

    def work(n: int) -> int:
        began.append(n)
        time.sleep(0.02 * (5 - n % 5))
        if n == 7:
            raise ConfigError("seven")
        return n

    assert list(threads.in_threads(work, [0, 1, 2, 3, 4], 3)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="seven"):
        list(threads.in_threads(work, [5, 6, 7, *range(8, 100)], 2))
    check_that_all_end()
    assert len(began) < 50


def test_python_in_threads_removes_what_it_has_half_written_before_the_process_ends(tmp_path):
    begun = threading.Event()

    def half_written(path: Path) -> None:
        path.write_text("half")
        begun.set()
        try:
            while True:
                time.sleep(0.01)
        finally:
            path.unlink()

    results = threads.in_threads(half_written, [tmp_path / "scratch"], 1)

    def wait() -> None:
        with pytest.raises(SystemExit):
            next(results)

    threading.Thread(target=wait, daemon=True).start()
    assert begun.wait(10)
    assert threads.end_all(SOON)
    assert list(tmp_path.iterdir()) == []


def test_one_thread_does_the_work_of_all_waits_until_one_is_interrupted():
    here = threading.get_ident()
    first, again = threads.run_interruptibly(threading.get_ident), threads.run_interruptibly(threading.get_ident)
    assert first == again != here
    begun = threading.Event()
    press_ctrl_c(begun)
    with pytest.raises(KeyboardInterrupt):
        threads.run_interruptibly(sleeps_for_ever(begun))
    check_that_all_end()
    assert threads.run_interruptibly(threads.stop_flag)["requested"] == 0


def test_an_idle_thread_keeps_no_result():
    class Kept:
        pass

    kept = weakref.ref(threads.run_interruptibly(Kept))
    wait_until(lambda: kept() is None)


def test_an_idle_thread_does_not_delay_the_end():
    threads.run_interruptibly(lambda: None)
    began = time.monotonic()
    assert threads.end_all(SOON)
    assert time.monotonic() - began < SOON / 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_a_thread_of_its_own():
    script = (
        "import os\nfrom moereplay.simulator.threads import run_interruptibly\nrun_interruptibly(int)\n"
        "child = os.fork()\nif not child: os._exit(7 if run_interruptibly(int) == 0 else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "7\n"
