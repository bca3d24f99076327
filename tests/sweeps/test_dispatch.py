"""The driver of a sweep against an executor of three lines: order, batches, deaths, and who is blamed for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import local
from moereplay.sweeps.jobs import Batch, Headline, Job, shard
from moereplay.sweeps.local import Message
from moereplay.sweeps.run import MOST_JOBS, Dispatcher, Event, Lost, Progress, Stored, Unwritable
from moereplay.sweeps.store import Folder


def job(number: int, work: int = 1) -> Job:
    return Job("configuration", f"{number:016x}", "0", Path("a.zarr"), "d", configure(seed=number), work)


class Pretended:
    """Runs batches at once. `dies(batch, position)`: the worker dies in that job; `tells`: in which one is known."""

    def __init__(self, dies=lambda batch, position: False, slots: int = 2, tells: bool = True) -> None:
        self.slots, self._dies, self._tells = slots, dies, tells
        self._waiting: list[tuple[Batch, bool]] = []
        self.batches: list[Batch] = []
        self.alone: list[Batch] = []

    @property
    def room(self) -> int:
        return self.slots - sum(not alone for _, alone in self._waiting)

    def submit(self, batch: Batch, alone: bool = False) -> None:
        self._waiting.append((batch, alone))
        (self.alone if alone else self.batches).append(batch)

    def collect(self, seconds: float) -> Sequence[Event]:
        batch, _ = self._waiting.pop(0)
        for position, each in enumerate(batch.jobs):
            if self._dies(batch, position):
                return [Lost(batch, (each,) if self._tells else batch.jobs, "signal 9")]
        return [Stored(batch, [Headline(each.key, 0.01, None, {}) for each in batch.jobs])]

    def close(self) -> None:
        pass


def run(jobs: Sequence[Job], executor: Pretended, stopping=lambda: False) -> Progress:
    return Dispatcher(jobs, executor, "reference", False).run(lambda progress: None, stopping)


def started(executor: Pretended) -> list[str]:
    return [each.identity for batch in executor.batches + executor.alone for each in batch.jobs]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300), st.integers(1, 8))
def test_every_job_runs_once_longest_first(works, slots):
    executor = Pretended(slots=slots)
    progress = run([job(number, work) for number, work in enumerate(works)], executor)
    order = [each.work for batch in executor.batches for each in batch.jobs]
    assert order == sorted(works, reverse=True)
    assert (progress.done, progress.total, progress.stopped) == (len(works), len(works), False)
    assert max(len(batch.jobs) for batch in executor.batches) <= MOST_JOBS
    assert len(executor.batches[0].jobs) == 1  # nothing is known yet about how long jobs take


def test_batches_shrink_towards_the_end_so_that_no_slot_waits_for_another():
    executor = Pretended(slots=2)
    run([job(number) for number in range(1000)], executor)
    sizes = [len(batch.jobs) for batch in executor.batches]
    assert max(sizes) == MOST_JOBS
    assert sizes[-6:] == [1] * 6


@pytest.mark.parametrize("tells", [True, False])
def test_a_job_that_kills_its_worker_twice_is_named_and_the_others_are_done(tells):
    executor = Pretended(lambda batch, position: batch.jobs[position].identity == job(7).identity, tells=tells)
    progress = run([job(number) for number in range(100)], executor)
    (reason,) = progress.given_up.values()
    assert job(7).identity in reason
    assert "seed=7" in reason
    assert "signal 9" in reason
    assert progress.done == 100
    assert Counter(started(executor))[job(7).identity] == 2


def test_a_suspect_runs_again_alone_so_that_nothing_else_is_blamed():
    executor = Pretended(lambda batch, position: batch.jobs[position].identity == job(7).identity)
    run([job(number) for number in range(100)], executor)
    assert [batch.jobs for batch in executor.alone] == [(job(7),)]


def test_a_worker_killed_from_outside_costs_nothing_but_time():
    struck = []

    def once(batch, position):
        return not struck and batch.number == 3 and not struck.append(batch.jobs[position])

    executor = Pretended(once)
    progress = run([job(number) for number in range(100)], executor)
    assert struck
    assert (progress.done, progress.given_up) == (100, {})


def test_a_stop_finishes_what_is_in_flight_and_leaves_the_rest():
    executor = Pretended(slots=4)
    asked = iter([False, False] + [True] * 100)
    progress = run([job(number) for number in range(50)], executor, lambda: next(asked))
    assert progress.stopped
    assert progress.done == len(started(executor)) < 50


def test_a_disk_that_is_full_ends_the_sweep_with_the_reason():
    class Full(Pretended):
        def collect(self, seconds):
            return [Unwritable(self._waiting.pop(0)[0], "cannot write part-1: No space left on device")]

    with pytest.raises(ConfigError, match="No space left"):
        run([job(1)], Full())


def test_what_is_in_flight_is_stored_before_the_reason_is_told():
    stored = []

    class FullOnce(Pretended):
        def collect(self, seconds):
            batch, _ = self._waiting.pop(0)
            if batch.number == 1:
                return [Unwritable(batch, "cannot store part-1: no such bucket")]
            stored.append(batch.number)
            return [Stored(batch, [Headline(each.key, 0.01, None, {}) for each in batch.jobs])]

    with pytest.raises(ConfigError, match="no such bucket"):
        run([job(number) for number in range(50)], FullOnce(slots=4))
    assert stored == [0, 2, 3, 4]  # 0 made room for 4 before 1 was refused


def test_errors_count_as_done_and_are_told():
    class Failing(Pretended):
        def collect(self, seconds):
            batch, _ = self._waiting.pop(0)
            return [Stored(batch, [Headline(each.key, 0.01, "no such expert", {}) for each in batch.jobs])]

    progress = run([job(number) for number in range(3)], Failing())
    assert progress.done == 3
    assert set(progress.errors.values()) == {"no such expert"}


def test_the_best_of_each_figure_is_known_as_results_come_in():
    progress = Progress(3)
    for number, rate, tpot in ((1, 0.5, 9.0), (2, 0.7, 8.0), (3, 0.6, 7.0)):
        progress.count(Headline(job(number).key, 1.0, None, {"hit_rate": rate, "tpot_ms": tpot}))
    progress.count(Headline(("bound", "b"), 1.0, None, {"hit_rate": 0.9}))  # a bound competes with nobody
    progress.count(Headline(job(4).key, 1.0, None, {"hit_rate": 0.95}, foresees=True))  # nor does Belady
    assert progress.best == {"hit_rate": (0.7, job(2).identity), "tpot_ms": (7.0, job(3).identity)}


@given(st.sets(st.integers(0, 2**63 - 1), max_size=60), st.integers(1, 7))
def test_shards_are_disjoint_and_complete(numbers, of):
    jobs = [job(number) for number in sorted(numbers)]
    parts = [shard(jobs, (index, of)) for index in range(1, of + 1)]
    assert sorted(each.identity for part in parts for each in part) == [each.identity for each in jobs]


class Ended:
    """The line to a worker that has said something and died: nothing can be sent any more."""

    def __init__(self, *said: Message) -> None:
        self._said = list(said)

    def poll(self) -> bool:
        return True

    def recv(self) -> Message:
        if not self._said:
            raise EOFError
        return self._said.pop(0)

    def send(self, batch: Batch | None) -> None:
        raise BrokenPipeError


def test_a_worker_made_for_one_batch_that_dies_behind_its_answer_has_answered(monkeypatch, tmp_path: Path):
    """Its batch is stored, and it is neither buried nor replaced: a sweep waits for no event that cannot come."""
    batch, line = Batch(3, (job(1),), "reference", False), Ended(Message("stored", 3))
    executor = local.LocalExecutor(1, True, Folder(tmp_path), {"sweep_version": 1})
    try:
        before = executor.pids()
        with monkeypatch.context() as patched:
            patched.setattr(local, "started", lambda *how: (None, line))
            executor.submit(batch, alone=True)
            patched.setattr(local.connections, "wait", lambda lines, seconds: [line])
            assert executor.collect(0) == [Stored(batch, ())]
        assert executor.pids() == before
    finally:
        executor.close()
