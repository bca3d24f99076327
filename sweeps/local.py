"""Run batches on worker processes of this machine, each with some threads; dead workers are replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.jobs import Batch, Headline, Job, compute
from moereplay.sweeps.processes import ending, restored_environment, started
from moereplay.sweeps.run import Event, Lost, Stored, Unwritable
from moereplay.sweeps.store import Place

CORES_PER_PROCESS = 8  #: threads share their traces; processes limit what one death costs
#: A replay uses one thread; libraries must not add their own.
ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS")
MOST_FAILED_STARTS = 3


@dataclass
class Worker:
    """Driver's side of a worker process, and its batches."""

    process: SpawnProcess
    connection: connections.Connection
    threads: int
    alone: bool = False  #: started for one batch
    ready: bool = False
    batches: dict[int, Batch] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)  #: the job in progress of each batch

    @property
    def room(self) -> int:
        """Number of batches that it could start now."""
        return 0 if self.alone else self.threads - len(self.batches)

    def in_progress(self, batch: Batch) -> tuple[Job, ...]:
        """Return the job of a batch that it began last, if any."""
        return (batch.jobs[self.positions[batch.number]],) if batch.number in self.positions else ()


class LocalExecutor:
    """Executor on processes of this machine, with threads in them if the engine releases the GIL."""

    def __init__(self, workers: int, nogil: bool, out: Place, provenance: Mapping[str, Any]) -> None:
        """Start workers for `workers` batches at once."""
        processes = -(-workers // CORES_PER_PROCESS) if nogil else workers
        self._out, self._provenance = out, provenance
        self._failed_starts = 0
        shares = [workers // processes + (index < workers % processes) for index in range(processes)]
        self._workers = [self._start(threads) for threads in shares]
        self.slots = workers

    @property
    def room(self) -> int:
        """Number of batches that would start now."""
        return sum(worker.room for worker in self._workers)

    def submit(self, batch: Batch, alone: bool = False) -> None:
        """Run a batch, in a separate process if `alone`."""
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
        """Return events, waiting at most `seconds` for the first. Raises ConfigError if workers do not start."""
        by_connection = {worker.connection: worker for worker in self._workers}
        events: list[Event] = []
        for ready in connections.wait(list(by_connection), seconds):
            events += self._received(by_connection[ready])  # type: ignore[index] # we waited for connections only
        return events

    def close(self) -> None:
        """Let idle workers end, and kill those that are busy or still starting."""
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            if worker.batches or not worker.ready:
                worker.process.kill()
            worker.process.join()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that have started."""
        return [worker.process.pid for worker in self._workers if worker.process.pid]

    def _start(self, threads: int) -> Worker:
        with restored_environment(*ONE_THREAD):
            os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
            return Worker(*started(work, threads, self._out, self._provenance), threads)

    def _received(self, worker: Worker) -> list[Event]:
        """Return the pending messages of a worker as events, then its exit event if it died."""
        events: list[Event] = []
        try:
            while worker in self._workers and worker.connection.poll():
                events += self._handle(worker, worker.connection.recv())
        except (EOFError, OSError):
            events += self._replace(worker)
        return events

    def _handle(self, worker: Worker, message: Message) -> Sequence[Event]:
        if message.what == "ready":
            worker.ready = True
        elif message.what == "began":
            worker.positions[message.batch] = message.position
        else:
            return [self._ended(worker, message)]
        return []

    def _ended(self, worker: Worker, message: Message) -> Event:
        """Return the event that ends a batch, and stop a worker that was started only for it."""
        batch = worker.batches.pop(message.batch)
        if worker.alone:
            self._workers.remove(worker)
            with suppress(OSError):
                worker.connection.send(None)
        return Unwritable(batch, message.error) if message.what == "failed" else Stored(batch, message.headlines)

    def _replace(self, worker: Worker) -> list[Event]:
        """Replace a dead worker, and return its batches as lost; only the job in progress may have killed it."""
        worker.process.join()
        self._workers.remove(worker)
        self._failed_starts = 0 if worker.ready else self._failed_starts + 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            raise ConfigError(
                f"worker processes exit immediately ({ending(worker.process)}); check memory, or lower --workers"
            )
        if not worker.alone:
            self._workers.append(self._start(worker.threads))
        return [Lost(batch, worker.in_progress(batch), ending(worker.process)) for batch in worker.batches.values()]


# -- Inside a worker process: threads run batches and store their parts. It ends when its driver does


class Message(NamedTuple):
    """Message of a worker to its driver."""

    what: Literal["ready", "began", "stored", "failed"]
    batch: int = -1
    position: int = -1  #: of the job that began
    headlines: tuple[Headline, ...] = ()
    error: str = ""  #: why nothing could be stored


def work(connection: Connection, threads: int, out: Place, provenance: Mapping[str, Any]) -> None:
    """Run the batches that arrive, `threads` at a time, until None arrives or the driver is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the driver decides
        signal.signal(number, signal.SIG_IGN)
    sending = threading.Lock()

    def send(message: Message) -> None:
        with sending, suppress(OSError):  # the driver is gone
            connection.send(message)

    def run(batch: Batch) -> None:
        try:
            computed = compute(batch, lambda position: send(Message("began", batch.number, position)))
            out.store(computed.part, provenance)
        except ConfigError as error:
            send(Message("failed", batch.number, error=str(error)))
        except BaseException as error:  # a bug here must not leave the driver waiting
            send(Message("failed", batch.number, error=f"unexpected {type(error).__name__}: {error}"))
        else:
            send(Message("stored", batch.number, headlines=tuple(computed.headlines)))

    with ThreadPoolExecutor(threads) as pool:
        send(Message("ready"))
        for batch in _batches(connection):
            pool.submit(run, batch)


def _batches(connection: Connection) -> Iterator[Batch]:
    """Yield batches as they arrive. Without a driver the process exits at once: replays cannot be stopped."""
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if batch is None:
            return
        yield batch
