"""Workers on this machine: a few processes of threads each, replaced when they die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.batches import Batch, Headline, compute
from moereplay.sweeps.dispatch import Event, Lost, Stored, Unwritable
from moereplay.sweeps.jobs import Job
from moereplay.sweeps.processes import ending, started
from moereplay.sweeps.store import Place

CORES_PER_PROCESS = 8  #: threads share their traces; processes limit what one death costs
#: Every replay is one thread; libraries must not add their own.
ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS")
MOST_STILLBORN = 3


@dataclass
class Worker:
    """A process, and the batches that it has."""

    process: SpawnProcess
    connection: connections.Connection
    threads: int
    alone: bool = False  #: made for one batch
    ready: bool = False
    batches: dict[int, Batch] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)  #: the job in progress of each batch

    @property
    def room(self) -> int:
        """Batches that it could start now."""
        return 0 if self.alone else self.threads - len(self.batches)

    def in_progress(self, batch: Batch) -> tuple[Job, ...]:
        """The job of a batch that it has begun last, if any."""
        return (batch.jobs[self.positions[batch.number]],) if batch.number in self.positions else ()


class LocalExecutor:
    """Batches on processes of this machine, by threads where the engine lets go of the interpreter."""

    def __init__(self, workers: int, nogil: bool, out: Place, provenance: Mapping[str, Any]) -> None:
        """`workers` batches run at once."""
        processes = -(-workers // CORES_PER_PROCESS) if nogil else workers
        self._out, self._provenance = out, provenance
        self._stillborn = 0
        shares = [workers // processes + (index < workers % processes) for index in range(processes)]
        self._workers = [self._start(threads) for threads in shares]
        self.slots = workers

    @property
    def room(self) -> int:
        """Batches that would start now."""
        return sum(worker.room for worker in self._workers)

    def submit(self, batch: Batch, alone: bool = False) -> None:
        """Run a batch, in a process of its own if `alone`."""
        if alone:
            worker = self._start(1)
            worker.alone = True
            self._workers.append(worker)
        else:
            worker = max(self._workers, key=lambda worker: worker.room)
        worker.batches[batch.number] = batch
        with suppress(OSError):  # it has died; `collect` says so
            worker.connection.send(batch)

    def collect(self, seconds: float) -> list[Event]:
        """What has happened, waiting at most so long for something to. Raises ConfigError if workers do not start."""
        by_connection = {worker.connection: worker for worker in self._workers}
        events: list[Event] = []
        for ready in connections.wait(list(by_connection), seconds):
            events += self._received(by_connection[ready])  # type: ignore[index] # we waited for connections only
        return events

    def close(self) -> None:
        """Let workers end; those still at work, or still starting, are killed."""
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            if worker.batches or not worker.ready:
                worker.process.kill()
            worker.process.join()

    def pids(self) -> list[int]:
        """Process ids of the workers that have started."""
        return [worker.process.pid for worker in self._workers if worker.process.pid]

    def _start(self, threads: int) -> Worker:
        with _one_thread():
            return Worker(*started(work, threads, self._out, self._provenance), threads)

    def _received(self, worker: Worker) -> list[Event]:
        """Everything that a worker has said, and its death if that came after."""
        events: list[Event] = []
        try:
            while worker in self._workers and worker.connection.poll():
                events += self._understand(worker, worker.connection.recv())
        except (EOFError, OSError):
            events += self._bury(worker)
        return events

    def _understand(self, worker: Worker, told: Told) -> Sequence[Event]:
        if told.what == "ready":
            worker.ready = True
        elif told.what == "began":
            worker.positions[told.batch] = told.position
        else:
            return [self._ended(worker, told)]
        return []

    def _ended(self, worker: Worker, told: Told) -> Event:
        """What became of a batch. A worker that was made for it alone is dismissed, if it still lives."""
        batch = worker.batches.pop(told.batch)
        if worker.alone:
            self._workers.remove(worker)
            with suppress(OSError):
                worker.connection.send(None)
        return Unwritable(batch, told.error) if told.what == "failed" else Stored(batch, told.headlines)

    def _bury(self, worker: Worker) -> list[Event]:
        """Replace a dead worker and say what it had; only the job in progress may have killed it."""
        worker.process.join()
        self._workers.remove(worker)
        self._stillborn = 0 if worker.ready else self._stillborn + 1
        if self._stillborn >= MOST_STILLBORN:
            raise ConfigError(f"workers end as they start ({ending(worker.process)}); check memory, or lower --workers")
        if not worker.alone:
            self._workers.append(self._start(worker.threads))
        return [Lost(batch, worker.in_progress(batch), ending(worker.process)) for batch in worker.batches.values()]


@contextmanager
def _one_thread() -> Iterator[None]:
    """What a process started in here finds in its environment."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- A worker process: threads that run batches and store their parts. It ends when its driver does, however that ends.


class Told(NamedTuple):
    """What a worker tells its driver."""

    what: Literal["ready", "began", "stored", "failed"]
    batch: int = -1
    position: int = -1  #: of the job that began
    headlines: tuple[Headline, ...] = ()
    error: str = ""  #: why nothing could be stored


def work(connection: Connection, threads: int, out: Place, provenance: Mapping[str, Any]) -> None:
    """Run the batches that arrive, `threads` at a time, until None arrives or the driver is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the driver decides
        signal.signal(number, signal.SIG_IGN)
    sending = threading.Lock()

    def tell(told: Told) -> None:
        with sending, suppress(OSError):  # without a driver nobody listens
            connection.send(told)

    def run(batch: Batch) -> None:
        try:
            made = compute(batch, lambda position: tell(Told("began", batch.number, position)))
            out.store(made.part, provenance)
        except ConfigError as error:
            tell(Told("failed", batch.number, error=str(error)))
        except BaseException as error:  # a bug in here must not leave the driver waiting
            tell(Told("failed", batch.number, error=f"unexpected {type(error).__name__}: {error}"))
        else:
            tell(Told("stored", batch.number, headlines=tuple(made.headlines)))

    with ThreadPoolExecutor(threads) as pool:
        tell(Told("ready"))
        for batch in _batches(connection):
            pool.submit(run, batch)


def _batches(connection: Connection) -> Iterator[Batch]:
    """Batches as they arrive. Threads in a replay cannot be stopped, so without a driver the process ends at once."""
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if batch is None:
            return
        yield batch
