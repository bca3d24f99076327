"""A search killed -9 at random moments: resumed, it is the undisturbed one, trial by trial and row by row.

This file is also the program that is killed: a search at some trials per tenth of a second.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moereplay.results.parts import PartError
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.jobs import open_traces
from moereplay.sweeps.local import LocalExecutor
from moereplay.sweeps.store import Folder
from moereplay.sweeps.tune import JOURNAL, Drawn, Search, identity, open_journal, tune
from tests.kit.sweeping import ROOT, experiment, merged, store_trace
from tests.sweeps.test_clusters import Here

pytest.importorskip("optuna")
SLOTS = 2
SPACE = """
traces = ["tiny.zarr"]
[grid]
capacity = { low = 20, high = 90, suffix = "%" }
eviction = ["lru", "fifo", "least_stale", "lfu"]
prefetch = ["none", "top_k"]
[[exclude]]
eviction = "fifo"
prefetch = "top_k"
"""


def search(file: Path, trials: int = 1) -> Search:
    described = read(file)
    traces = open_traces(described.traces, file.parent, file)
    return Search(described, file, traces, ("tpot_ms", "capacity_gb"), trials, "tpe", 3, "reference")


def in_processes(folder: Folder) -> LocalExecutor:
    """As `moereplay tune` does: workers store the parts."""
    return LocalExecutor(SLOTS, True, folder, {"sweep_version": 1})


def run(file: Path, out: Path, trials: int, start: Callable[[Folder], Any] = Here) -> list:
    folder = Folder(out)
    folder.prepare()
    executor = start(folder)
    try:
        return tune(search(file, trials), out, executor)
    finally:
        if start is not Here:
            executor.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    store_trace(folder / "tiny.zarr", prompt_tokens=10, decode_tokens=20)
    return experiment(folder, SPACE)


def trials_of(file: Path, out: Path) -> list[Drawn]:
    with open_journal(out / JOURNAL) as journal:
        return [drawn for each in journal.rounds(identity(search(file))) for drawn in each]


def kept(out: Path) -> bytes:
    return (out / JOURNAL).read_bytes() if (out / JOURNAL).exists() else b""


@pytest.mark.long
@pytest.mark.parametrize("kills", (2, pytest.param(20, marks=pytest.mark.long)))
def test_kills_and_a_resume_give_the_undisturbed_search(kills, file, tmp_path):
    whole, out, dice, trials = tmp_path / "whole", tmp_path / "killed", random.Random(kills), 40 + 20 * kills
    found = run(file, whole, trials)
    command = [sys.executable, "-W", "error", __file__, str(file), str(out), str(trials)]
    environment, groups = os.environ | {"PYTHONPATH": str(ROOT)}, []
    for _ in range(kills):
        before = kept(out)
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        groups.append(process.pid)
        wait_for_trials(process, out, before)
        time.sleep(dice.uniform(0, 0.3))  # a round and what is between two take about as long
        os.killpg(process.pid, signal.SIGKILL) if dice.random() < 0.5 else process.kill()
        assert process.wait() == -signal.SIGKILL
        assert kept(out).startswith(before)
    assert kept(out).count(b"\n") < trials / SLOTS
    wait_for_workers(groups)
    assert run(file, out, trials) == found
    assert trials_of(file, out) == trials_of(file, whole)
    assert len(trials_of(file, out)) == trials
    assert merged(tmp_path / "a", out) == merged(tmp_path / "b", whole)
    left = {path.relative_to(out).parts[0] for path in out.rglob("*") if path.is_file()}  # "tmp" may be left, empty
    assert {name for name in left if not name.startswith("part-")} == {JOURNAL}


def wait_for_workers(groups: list[int]) -> None:
    """Wait for workers of a killed search: they may write until they end; the next run removes their files."""
    for group in groups:
        with suppress(ProcessLookupError):
            while True:
                os.killpg(group, 0)
                time.sleep(0.01)


def wait_for_trials(process: subprocess.Popen[bytes], out: Path, before: bytes) -> None:
    deadline = time.monotonic() + 120
    while len(kept(out)) <= len(before):
        assert process.poll() is None and time.monotonic() < deadline, "no trial was finished"
        time.sleep(0.005)


def journal_of(out: Path, *rounds: list[Drawn]) -> Path:
    with open_journal(out / JOURNAL) as journal:
        for each in rounds:
            journal.append("a search", each)
    return out / JOURNAL


def opened(path: Path) -> None:
    with open_journal(path):
        pass


ROUNDS = [[Drawn({"0 capacity": 0.25}, [1.0])], [Drawn({"0 capacity": 0.5}, None)]]


def test_half_a_line_is_what_a_killed_process_was_writing(tmp_path):
    path = journal_of(tmp_path, *ROUNDS)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        with open_journal(path) as journal:
            assert journal.rounds("a search") == ROUNDS[:1]
            journal.append("a search", ROUNDS[1])
        assert path.read_bytes() == whole


def test_a_flipped_bit_in_a_journal_is_refused(tmp_path):
    path = journal_of(tmp_path, *ROUNDS)
    whole = path.read_bytes()
    end = whole.index(b"\n")  # its own end would make it one line with the next, which is refused as well
    for bit in range(0, 8 * end, 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"^{path}: line \d is damaged .*; remove the file to search from"):
            opened(path)


def test_two_searches_do_not_write_one_journal(tmp_path):
    path = journal_of(tmp_path)
    with open_journal(path), pytest.raises(ConfigError, match="is in use by another search; wait for it, or choose"):
        opened(path)


def test_another_experiment_is_another_search(file, tmp_path):
    """Values of a list are drawn by their place, so a list in another order would be credited with the wrong ones."""
    run(file, tmp_path, 4)
    turned = file.with_name("turned.toml")
    turned.write_text(SPACE.replace('"lru", "fifo"', '"fifo", "lru"'))
    assert identity(search(turned)) != identity(search(file)) == identity(search(file, 7))
    run(turned, tmp_path, 2)
    assert (len(trials_of(file, tmp_path)), len(trials_of(turned, tmp_path))) == (4, 2)


def test_trials_that_would_be_drawn_otherwise_are_refused(file, tmp_path):
    tmp_path.joinpath(JOURNAL).touch()
    with open_journal(tmp_path / JOURNAL) as journal:
        journal.append(identity(search(file)), [Drawn({"0 capacity": 0.123}, [1.0, 1.0])])
    with pytest.raises(ConfigError, match=r"tune\.journal: its trials differ from those that this version"):
        run(file, tmp_path, 4)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), in_processes)


def test_a_search_does_not_go_on_over_a_damaged_part(file, tmp_path):
    out = tmp_path / "out"
    run(file, out, 2)
    tables = sorted(out.glob("part-*/configurations.parquet"))
    data = bytearray(tables[0].read_bytes())
    data[len(data) // 2] ^= 4
    tables[0].write_bytes(data)
    for trials in (2, 3):  # nothing left to do, and one trial more
        with pytest.raises(PartError, match=r"configurations\.parquet is damaged; remove .*/part-.* and replay again"):
            run(file, out, trials)
    shutil.rmtree(tables[0].parent)
    assert run(file, out, 3)
